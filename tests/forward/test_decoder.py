"""The native decoder equals transformers' own forward in every family it takes, in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from localspec.formats.native import LAYOUTS
from localspec.formats.rotation_settings import NotNative
from localspec.forward.by_transformers import drop_towers
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.model import CausalLM, kv_shape
from localspec.weights.dense import PackedLinear
from localspec.weights.linear import PlainLinear
from tests.kit.decoders import decoder_of
from tests.kit.families import (
    ATTENTION_ALONE,
    LONG,
    SETTINGS,
    SHAPE,
    assert_close,
    scrambled,
    small,
)
from tests.kit.tiny import CPU, on_transformers, tiny_llama, with_cache

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 23]
TREE = (-1, 0, 0, 1, 2, 2, -1)
CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"


QUICK = ("llama", "phi3", "qwen3_moe", "gemma3_text")  # the others of these take seconds together


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in ATTENTION_ALONE
    ],
)
def pair(request: pytest.FixtureRequest) -> tuple[CausalLM, Decoder]:
    module = small(request.param)
    return on_transformers(module, 64), with_cache(module, 64)


def emptied(*models: CausalLM | Decoder) -> None:
    for model in models:
        model.cache.rollback(0)


def test_every_family_that_is_named_is_compared() -> None:
    assert {settings["model_type"] for settings in SETTINGS.values()} == set(LAYOUTS)


@pytest.mark.slow
def test_a_chain_gives_the_logits_of_transformers(pair: tuple[CausalLM, Decoder]) -> None:
    emptied(*pair)
    wanted, found = (model.forward(TEXT) for model in pair)
    assert_close(found, wanted)


@pytest.mark.slow
def test_tokens_after_a_cache_and_one_by_one(pair: tuple[CausalLM, Decoder]) -> None:
    reference, native = pair
    emptied(*pair)
    wanted = reference.forward(TEXT)
    several = torch.cat((native.forward(TEXT[:5]), native.forward(TEXT[5:])))
    assert_close(several, wanted)
    native.cache.rollback(4)
    single = torch.cat([native.forward([token]) for token in TEXT[4:]])
    assert_close(single, wanted[4:])


def test_a_tree_sees_its_own_path(pair: tuple[CausalLM, Decoder]) -> None:
    emptied(*pair)
    for model in pair:
        model.forward(TEXT)
    wanted, found = (model.forward([5, 6, 7, 8, 9, 10, 11], TREE) for model in pair)
    assert_close(found, wanted)


def test_only_the_wanted_logits_are_computed(pair: tuple[CausalLM, Decoder]) -> None:
    native = pair[1]
    emptied(native)
    everything = native.forward(TEXT)
    emptied(native)
    assert torch.allclose(native.forward(TEXT, num_logits=2), everything[-2:], atol=1e-4)


def test_the_text_part_of_a_model_that_sees_images() -> None:
    text = {**SHAPE, **SETTINGS["gemma3_text"]}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    settings = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    module = scrambled(AutoConfig.for_model("gemma3", **settings))
    drop_towers(module)
    assert_close(with_cache(module, 64).forward(TEXT), on_transformers(module, 64).forward(TEXT))


def test_hidden_states_are_those_of_transformers() -> None:
    module = small("llama")
    native = with_cache(module, 64)
    native.forward(TEXT)
    kept = native.look_back(len(TEXT), keep=(0, 1, -1)).hidden
    with torch.no_grad():
        states = module(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    assert sorted(kept) == [-1, 0, 1]
    for layer, wanted in ((0, states[1]), (1, states[2]), (-1, states[-1])):
        assert_close(kept[layer], wanted[0])


def test_weights_on_a_cpu_are_packed() -> None:
    block = with_cache(small("qwen2"), 64).weights.blocks[0]
    assert all(isinstance(linear, PackedLinear) for linear in block.linears)


def test_a_copy_with_other_linears_shares_all_else() -> None:
    native = with_cache(small("qwen2"), 64)
    wanted = native.forward(TEXT)

    def plain(linear: Any) -> PlainLinear:
        dense = linear.dense()
        return PlainLinear(dense.weight, dense.bias)

    twin = native.with_linears(plain)
    assert twin.cache is native.cache
    native.cache.rollback(0)
    assert_close(twin.forward(TEXT), wanted)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4}, "its family, gpt2, is not native"),
        ("cohere", {**SHAPE, "use_qk_norm": True}, "key heads have norms of their own"),
        ("llama", {**SHAPE, "hidden_act": "gelu"}, "gelu, not silu"),
        ("gemma3_text", {**SHAPE, "attn_logit_softcapping": 3.0}, "attn_logit_softcapping is 3"),
        ("gemma3_text", {**SHAPE, "final_logit_softcapping": 3.0}, "final_logit_softcapping is 3"),
        ("llama", {**SHAPE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
                                                "factor": 2.0}}, "changes with the length"),
        ("phi3", {**SHAPE, "rope_parameters": {**LONG, "original_max_position_embeddings": 32},
                  "original_max_position_embeddings": 32}, "longrope, which changes"),
    ],
)  # fmt: skip
def test_what_it_does_not_know_is_refused(
    model_type: str, settings: dict[str, Any], reason: str
) -> None:
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    cache = KVCache(kv_shape(module.config, 64), torch.float32, CPU)
    with pytest.raises(NotNative, match=reason):
        decoder_of(module, cache)


def with_sin(native: Decoder) -> Decoder:
    tables = tuple((cos, -sin) for cos, sin in native.weights.tables)
    weights = replace(native.weights, tables=tables)
    return Decoder(weights, native.cache)


def with_layers_swapped(native: Decoder) -> Decoder:
    weights = replace(native.weights, blocks=native.weights.blocks[::-1])
    return Decoder(weights, native.cache)


@pytest.mark.parametrize("fault", [with_sin, with_layers_swapped])
def test_the_comparison_sees_a_fault(fault: Callable[[Decoder], Decoder]) -> None:
    module = tiny_llama(later=1.0)
    wanted = on_transformers(module).forward(TEXT)
    with pytest.raises(AssertionError):
        assert_close(fault(with_cache(module)).forward(TEXT), wanted)


# -- the shapes people run ------------------------------------------------------------------


def real_configs() -> list[Any]:
    folders = sorted(CONFIGS.iterdir()) if CONFIGS.is_dir() else []
    return folders or [pytest.param(None, marks=pytest.mark.skip("the data folder is not here"))]


def real_settings(folder: Path) -> dict[str, Any]:
    """Of one layer and a small vocabulary; all else as published."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {k: v for k, v in settings.items() if not k.endswith("token_id")}
    return {**kept, "num_hidden_layers": 1, "vocab_size": 512, "layer_types": None}


def narrowed(settings: dict[str, Any]) -> dict[str, Any]:
    """With two key heads of 16; the other widths keep their ratios, the feed-forward's is odd."""
    heads, size = settings["num_attention_heads"], settings["hidden_size"]
    num_heads = 2 * heads // settings["num_key_value_heads"]
    width = num_heads * 16 * size // (heads * (settings.get("head_dim") or size // heads))
    return settings | {
        "num_key_value_heads": 2,
        "num_attention_heads": num_heads,
        "head_dim": 16,
        "hidden_size": width,
        "intermediate_size": width * settings["intermediate_size"] // size | 1,
    }


def assert_taken_over(settings: dict[str, Any]) -> None:
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    module = module.to_empty(device="cpu").float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for tensor in module.parameters():
        tensor.uniform_(-0.03, 0.03, generator=generator)
    module.tie_weights()
    rotary = type(module.model.rotary_emb)  # its buffers came from meta as well
    module.model.rotary_emb = rotary(config=module.config)
    wanted = on_transformers(module, 64).forward(TEXT)
    cache = KVCache(kv_shape(module.config, 64), torch.float32, CPU)
    assert_close(decoder_of(module, cache).forward(TEXT), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("folder", real_configs(), ids=lambda f: f.name if f else "none")
def test_real_shapes_at_reduced_width_and_depth(folder: Path) -> None:
    settings = real_settings(folder)
    if "num_experts" in settings:
        pytest.skip("a mixture of experts runs on transformers")
    assert_taken_over(narrowed(settings))


@pytest.mark.slow
@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the data folder is not here")
def test_one_real_width() -> None:
    """The packed kernels get the sizes of a real layer."""
    assert_taken_over(real_settings(CONFIGS / "Qwen2.5-3B"))


def test_queries_that_are_scaled_with_the_length_run_natively_up_to_it() -> None:
    module = small("ministral3")
    assert with_cache(module, 64).cache.shape.capacity == 64
    with pytest.raises(NotNative, match=r"beyond 64 tokens; a --context of that many"):
        with_cache(module, 65)


def test_an_option_of_a_family_that_is_not_native_is_named() -> None:
    settings = {**SHAPE, **SETTINGS["stablelm"]}
    for option, told in (("qk_layernorm", "norms of their own"), ("use_parallel_residual", "same")):
        config = AutoConfig.for_model(**settings, **{option: True})
        with pytest.raises(NotNative, match=told):
            with_cache(scrambled(config), 64)
