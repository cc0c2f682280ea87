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
from transformers import AutoModelForImageTextToText as OfImages

from localspec.core.errors import ModelError
from localspec.formats.native import LAYOUTS
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.from_transformers import take_over
from localspec.forward.model import CausalLM, kv_shape
from localspec.forward.weight_layout import PackedLinear, PlainLinear
from localspec.forward.weights import drop_towers
from tests.kit.tiny import CPU, on_transformers, tiny_llama, with_cache

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 23]
TREE = (-1, 0, 0, 1, 2, 2, -1)
CLOSENESS = 1e-4  # of the largest logit
CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"

SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONG = {
    **PARTIAL, "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 64,
}  # fmt: skip
BY_PARTS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2,
          "out_hidden_size": 32, "deepstack_visual_indexes": [0]}  # fmt: skip
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 64,
}
TWO_ROTATIONS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied, head of its own size": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "head_dim": 16,
    },
    "llama, biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, stretched": {"model_type": "llama", "rope_parameters": LLAMA3},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "phi3": {"model_type": "phi3"},
    "phi3, a part of each head rotated": {"model_type": "phi3", "rope_parameters": PARTIAL},
    "phi3, within its first length": {
        "model_type": "phi3", "rope_parameters": LONG, "original_max_position_embeddings": 64,
    },
    "mistral, windowed": {"model_type": "mistral", "sliding_window": 6},
    "qwen2, windowed from a layer on": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6,
        "max_window_layers": 1,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
    "qwen3_moe, shares as they are, a dense layer": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "norm_topk_prob": False, "mlp_only_layers": [1],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "granite 4, attention alone": {
        "model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 40, "layer_types": ["attention"] * 3, "mamba_n_heads": 2,
        "position_embedding_type": "rope", "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.2,
    },
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16},
    "exaone4, one length": {
        "model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3,
    },
    "exaone4, positions in windows only": {
        "model_type": "exaone4", "sliding_window": 6, "sliding_window_pattern": 3,
    },
    "cohere2": {
        "model_type": "cohere2", "sliding_window": 6, "num_hidden_layers": 5, "logit_scale": 0.25,
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "helium": {"model_type": "helium", "head_dim": 8},
    "cwm": {"model_type": "cwm", "sliding_window": 6, "num_hidden_layers": 5, "head_dim": 16},
    "ministral": {"model_type": "ministral", "sliding_window": 6, "head_dim": 16},
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": SCALED},
    "internlm3": {"model_type": "internlm3", "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"model_type": "iquestcoder", "head_dim": 16},
    "mellum": {
        "model_type": "mellum", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "sliding_window": 6, "rope_parameters": TWO_ROTATIONS,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "flex_olmo": {"model_type": "flex_olmo", "num_experts": 4, "num_experts_per_tok": 2},
    "arcee": {"model_type": "arcee", "head_dim": 16, "mlp_bias": True},
    "jais2": {"model_type": "jais2", "head_dim": 8},
    "nemotron": {"model_type": "nemotron", "rope_parameters": PARTIAL},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 6},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "rope_parameters": PARTIAL},
    "phi": {"model_type": "phi", "rope_parameters": PARTIAL},
    "qwen2_vl": {"model_type": "qwen2_vl_text", "rope_parameters": BY_PARTS},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text", "rope_parameters": BY_PARTS},
    "qwen3_vl": {"model_type": "qwen3_vl_text", "head_dim": 8, "rope_parameters": BY_PARTS},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe_text", "head_dim": 8, "rope_parameters": BY_PARTS,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    },
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "glm": {"model_type": "glm", "head_dim": 16, "rope_parameters": PARTIAL},
    "glm4": {"model_type": "glm4", "head_dim": 16, "rope_parameters": PARTIAL},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 6.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.2, "logits_scaling": 4.0,
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 6, "num_hidden_layers": 4},
    "gemma3_text": {
        "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 24,
        "sliding_window": 6, "num_hidden_layers": 7, "rope_parameters": TWO_ROTATIONS,
    },
}  # fmt: skip


def scrambled(config: Any) -> Any:
    """A module whose every parameter is noise: norms and biases too, which start as 1 and 0."""
    auto: Any = AutoModelForCausalLM if config is config.get_text_config() else OfImages
    module: Any = auto.from_config(config, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            noise = torch.rand(tensor.shape, generator=generator) - 0.5
            tensor.copy_(1.0 + noise if "norm" in name else 0.6 * noise)
    return module.requires_grad_(False)


def small(name: str, **changed: Any) -> Any:
    settings = {**SHAPE, **SETTINGS[name], **changed}
    family = settings.pop("model_type")
    if "_vl_" in family:
        whole = family.removesuffix("_text")
        return scrambled(
            AutoConfig.for_model(whole, text_config=settings, vision_config=dict(VISION))
        )
    return scrambled(AutoConfig.for_model(family, **settings))


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= CLOSENESS * float(wanted.abs().max())


QUICK = ("llama", "phi3", "qwen3_moe", "gemma3_text")  # the others of these take seconds together


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETTINGS
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
    kept = native.run(TEXT, keep=(0, 1, -1)).hidden
    with torch.no_grad():
        states = module(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    assert sorted(kept) == [-1, 0, 1]
    for layer, wanted in ((0, states[1]), (1, states[2]), (-1, states[-1])):
        assert_close(kept[layer], wanted[0])


def test_weights_on_a_cpu_are_packed_and_the_module_can_be_emptied() -> None:
    module = small("qwen2")
    wanted = on_transformers(module, 64).forward(TEXT)
    cache = KVCache(kv_shape(module.config, 64), torch.float32, CPU)
    native = take_over(module, cache, is_emptied=True)
    block = native.weights.blocks[0]
    assert all(isinstance(linear, PackedLinear) for linear in block.linears)
    assert module.model.layers[0].mlp.down_proj.weight.numel() == 0
    assert_close(native.forward(TEXT), wanted)


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
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4}, "because it has learnt positions"),
        ("cohere", {**SHAPE, "use_qk_norm": True}, "key heads have norms of their own"),
        ("llama", {**SHAPE, "hidden_act": "gelu"}, "gelu, not silu"),
        ("gemma3_text", {**SHAPE, "final_logit_softcapping": 3.0}, "final_logit_softcapping is 3"),
        ("llama", {**SHAPE, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
                                                "factor": 2.0}}, "changes with the length"),
        ("phi3", {**SHAPE, "rope_parameters": {**LONG, "original_max_position_embeddings": 32},
                  "original_max_position_embeddings": 32}, "longrope, which changes"),
    ],
)  # fmt: skip
def test_what_it_does_not_know_is_refused_and_left_whole(
    model_type: str, settings: dict[str, Any], reason: str
) -> None:
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    cache = KVCache(kv_shape(module.config, 64), torch.float32, CPU)
    with pytest.raises(ModelError, match=reason):
        take_over(module, cache, is_emptied=True)
    assert CausalLM(module, cache).forward([1, 2, 3]).isfinite().all()


def with_sin(native: Decoder) -> Decoder:
    weights = replace(native.weights, sin=-native.weights.sin)
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
    rotary = type(module.model.rotary_emb)  # its buffers came from meta as well
    module.model.rotary_emb = rotary(config=module.config)
    wanted = on_transformers(module, 64).forward(TEXT)
    cache = KVCache(kv_shape(module.config, 64), torch.float32, CPU)
    assert_close(take_over(module, cache, is_emptied=True).forward(TEXT), wanted)


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
    with pytest.raises(ModelError, match=r"beyond 64 tokens; a --context of that many"):
        with_cache(module, 65)


def test_an_option_of_a_family_that_is_not_native_is_named() -> None:
    settings = {**SHAPE, **SETTINGS["stablelm"]}
    for option, told in (("qk_layernorm", "norms of their own"), ("use_parallel_residual", "same")):
        config = AutoConfig.for_model(**settings, **{option: True})
        with pytest.raises(ModelError, match=told):
            with_cache(scrambled(config), 64)
