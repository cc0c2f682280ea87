"""The forward with our cache equals transformers' own, for chains and trees, in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MistralConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
)

from localspec.core.errors import CacheError, ModelError
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.forward.model import PREFILL_CHUNK, CausalLM, kv_shape, prefill, window_of
from localspec.machine.folder_shapes import shape_from_folder
from localspec.training import target as training_target
from localspec.training.target import Target
from tests.kit.tiny import CPU, on_transformers, tiny_llama, with_cache

CLOSE: Any = {"atol": 1e-5, "rtol": 1e-4}  # logits reach 10
TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 23]


def plain(module: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' logits of every position, without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()


def small(kind: str) -> Any:
    torch.manual_seed(2)
    shape: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config: Any
    if kind == "gpt2":
        config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    elif kind == "qwen2":
        config = Qwen2Config(**shape)
    elif kind == "mistral":
        config = MistralConfig(**shape, sliding_window=32)
    elif kind == "gemma3":
        config = Gemma3TextConfig(**shape, head_dim=16, sliding_window=32, pad_token_id=0)
    else:
        config = Qwen3Config(**shape, head_dim=16)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        module.get_output_embeddings().weight.mul_(20.0)
    return module


@pytest.fixture(scope="module")
def tiny_module() -> Any:
    return tiny_llama(later=1.0)


@pytest.mark.parametrize("cut", [1, 2, 7, 12])
def test_chain_after_a_cache_equals_the_full_forward(tiny_module: Any, cut: int) -> None:
    model = on_transformers(tiny_module)
    first, second = model.forward(TEXT[:cut]), model.forward(TEXT[cut:])
    assert torch.allclose(torch.cat((first, second)), plain(tiny_module, TEXT), **CLOSE)


def test_one_by_one_equals_all_at_once(tiny_module: Any) -> None:
    model = on_transformers(tiny_module)
    rows = [model.forward([token])[0] for token in TEXT]
    assert torch.allclose(torch.stack(rows), plain(tiny_module, TEXT), **CLOSE)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "qwen3", "mistral", "gemma3"])
def test_other_families_agree_with_transformers(kind: str) -> None:
    module = small(kind)
    model = on_transformers(module, capacity=32)
    rows = torch.cat((model.forward(TEXT[:5]), model.forward(TEXT[5:12]), model.forward(TEXT[12:])))
    assert torch.allclose(rows, plain(module, TEXT), **CLOSE)


@pytest.mark.parametrize("start", [0, 1, 6])
def test_every_node_of_a_tree_equals_its_path_alone(tiny_module: Any, start: int) -> None:
    parents = [-1, 0, 0, 1, 2, 2, -1, 6]
    nodes = [11, 12, 13, 14, 15, 16, 17, 18]
    model = on_transformers(tiny_module)
    prefill(model, TEXT[:start])
    logits = model.forward(nodes, parents)
    for node in range(len(nodes)):
        path, at = list[int](), node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        assert torch.allclose(logits[node], plain(tiny_module, TEXT[:start] + path)[-1], **CLOSE)


def test_a_kept_tree_path_equals_having_decoded_it(tiny_module: Any) -> None:
    parents, nodes = [-1, 0, 0, 2, 2], [11, 12, 13, 14, 15]
    model = on_transformers(tiny_module)
    prefill(model, TEXT)
    model.forward(nodes, parents)
    model.cache.keep(len(TEXT), (0, 2, 4))  # 11, 13, 15
    assert model.cache.tokens == [*TEXT, 11, 13, 15]
    follow = model.forward([20, 21])
    assert torch.allclose(follow, plain(tiny_module, [*TEXT, 11, 13, 15, 20, 21])[-2:], **CLOSE)


def test_a_tree_truncated_instead_of_compacted_is_seen(tiny_module: Any) -> None:
    """The planted fault of the test above: same length and tokens, wrong slots."""
    model = on_transformers(tiny_module)
    prefill(model, TEXT)
    model.forward([11, 12, 13, 14, 15], [-1, 0, 0, 2, 2])
    model.cache.tokens[len(TEXT) :] = [11, 13, 15]
    follow = model.forward([20, 21])
    assert not torch.allclose(
        follow, plain(tiny_module, [*TEXT, 11, 13, 15, 20, 21])[-2:], atol=0.01, rtol=0.01
    )


def test_rollback_and_another_way_leaves_no_trace(tiny_module: Any) -> None:
    model = on_transformers(tiny_module)
    model.forward([*TEXT, 1, 2, 3])
    model.cache.rollback(len(TEXT))
    found = model.forward([30, 31])
    assert torch.allclose(found, plain(tiny_module, [*TEXT, 30, 31])[-2:], **CLOSE)


def test_only_the_wanted_logits_are_returned(tiny_module: Any) -> None:
    model = on_transformers(tiny_module)
    assert model.forward(TEXT, num_logits=1).shape == (1, 64)
    assert torch.allclose(
        model.forward([1, 2, 3], num_logits=2), plain(tiny_module, [*TEXT, 1, 2, 3])[-2:], **CLOSE
    )


def test_prefill_in_chunks_equals_one_forward() -> None:
    module = tiny_llama(later=1.0)
    text = [(7 * i) % 61 for i in range(PREFILL_CHUNK + 5)]
    model = on_transformers(module, capacity=len(text) + 1)
    prefill(model, text)
    assert model.cache.tokens == text
    assert torch.allclose(model.forward([9])[0], plain(module, [*text, 9])[-1], **CLOSE)


def test_a_full_context_is_refused_and_the_cache_stays_usable(tiny_module: Any) -> None:
    model = on_transformers(tiny_module, capacity=8)
    model.forward(TEXT[:6])
    with pytest.raises(CacheError):
        model.forward([1, 2, 3])
    assert torch.allclose(model.forward([4])[0], plain(tiny_module, [*TEXT[:6], 4])[-1], **CLOSE)


def test_logits_are_fp32_in_half_precision() -> None:
    model = on_transformers(tiny_llama().to(torch.bfloat16))
    assert model.forward(TEXT).dtype == torch.float32
    assert model.cache.dtype == torch.bfloat16


def test_tied_weights_count_once() -> None:
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    module = AutoModelForCausalLM.from_config(config)
    held = [*module.parameters(), *module.buffers()]  # each parameter once
    assert on_transformers(module).weight_bytes == 4 * sum(tensor.numel() for tensor in held)


def sliding_mistral(window: int) -> MistralConfig:
    return MistralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        max_position_embeddings=64,
    )


def windowed(family: str, window: int) -> Any:
    """A tiny model whose layers, all or some, attend to a window."""
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "sliding_window": window,
        "pad_token_id": 0,
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config: Any
    if family == "mistral":
        config = MistralConfig(**shape)
    elif family == "qwen2":
        config = Qwen2Config(**shape, use_sliding_window=True, max_window_layers=1)
    elif family == "olmo3":
        config = Olmo3Config(**shape, layer_types=kinds)
    elif family == "gemma3":
        config = Gemma3TextConfig(**shape, head_dim=16, layer_types=kinds)
    elif family == "gemma2":
        config = Gemma2Config(**shape, head_dim=16, layer_types=kinds)
    elif family in ("cohere2", "exaone4"):
        config = AutoConfig.for_model(family, **shape, layer_types=kinds)
    else:
        config = GptOssConfig(
            **shape, head_dim=16, layer_types=kinds, num_local_experts=4, num_experts_per_tok=2
        )
    attention = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    module = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        module.get_output_embeddings().weight.mul_(20.0)
    return module


NATIVE = ["mistral", "qwen2", "olmo3", "gemma3"]
WINDOWED = [*NATIVE, "gemma2", "gpt_oss", "cohere2", "exaone4"]


@pytest.mark.slow
@pytest.mark.parametrize("family", WINDOWED)
def test_beyond_its_window_a_model_says_what_transformers_says(family: str) -> None:
    module = windowed(family, window=4)
    model = on_transformers(module, capacity=32)
    pieces = (TEXT[:3], TEXT[3:4], TEXT[4:10], TEXT[10:11], TEXT[11:])
    rows = torch.cat([model.forward(piece) for piece in pieces])
    wanted = plain(module, TEXT)
    assert torch.allclose(rows, wanted, **CLOSE)
    unlimited = windowed(family, window=64)
    assert not torch.allclose(plain(unlimited, TEXT)[-1], wanted[-1], atol=1e-3)  # it bites


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "made"),
    [*((each, on_transformers) for each in WINDOWED), *((each, with_cache) for each in NATIVE)],
)
def test_a_tree_beyond_the_window_sees_what_its_paths_see(
    family: str, made: Callable[[Any, int], CausalLM | Decoder]
) -> None:
    module = windowed(family, window=4)
    parents, nodes = [-1, 0, 0, 1, 2, 2, -1, 6, 3], [11, 12, 13, 14, 15, 16, 17, 18, 19]
    model = made(module, 32)
    prefill(model, TEXT)
    logits = model.forward(nodes, parents)
    for node in range(len(nodes)):
        path, at = list[int](), node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        assert torch.allclose(logits[node], plain(module, TEXT + path)[-1], **CLOSE)
    model.cache.keep(len(TEXT), (0, 2, 4))
    rows = model.forward([20, 21])
    assert torch.allclose(rows, plain(module, [*TEXT, 11, 13, 15, 20, 21])[-2:], **CLOSE)


def test_layers_that_drop_positions_are_refused_by_kind() -> None:
    with pytest.raises(ModelError, match="full attention"):
        kv_shape(MambaConfig(), capacity=8192)


def test_a_window_that_is_switched_off_is_none() -> None:
    assert window_of(Qwen2Config(use_sliding_window=False)) is None
    assert window_of(MistralConfig(sliding_window=None)) is None
    assert window_of(MistralConfig(sliding_window=8)) == 8
    assert window_of(Gemma3TextConfig()) == 4096


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IDS = [3, 1, 4, 1, 5]


def granite() -> Any:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))


def cohere() -> Any:
    kinds = {"layer_types": ["full_attention"] * 2, "logit_scale": 0.25}
    return Cohere2ForCausalLM(Cohere2Config(**SIZES, **kinds))


def gemma() -> Any:
    """Capped so low that the cap shows."""
    kinds = {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": 0.5}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **kinds))


@pytest.mark.parametrize("family", [granite, cohere, gemma])
def test_the_head_gives_the_logits_of_the_forward(family: Any, tmp_path: Any) -> None:
    torch.manual_seed(3)
    made = family().eval().requires_grad_(False)
    model = CausalLM(made, KVCache(kv_shape(made.config, 64), torch.float32, CPU))
    features = model.follow([LAST])
    own = model.forward(IDS)
    rows = features.rows(LAST, 0, len(IDS))
    assert torch.allclose(model.head(rows), own, atol=1e-5)
    assert torch.allclose(Target(made, tmp_path).teacher().head(rows), own, atol=1e-5)
    training_target.require_known_head(Target(made, tmp_path))


def test_a_head_that_is_not_known_is_refused_before_anything_is_trained(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    made = granite().eval().requires_grad_(False)
    monkeypatch.setattr(training_target, "scaled", lambda logits, config: logits)
    with pytest.raises(ModelError, match="not known here"):
        training_target.require_known_head(Target(made, tmp_path))


def test_latent_attention_is_refused_in_words() -> None:
    config = DeepseekV3Config(kv_lora_rank=8, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"latent attention .MLA.*another family"):
        kv_shape(config, 32)


def test_keys_of_each_layer_have_their_own_size() -> None:
    """Gemma 4: wide heads where a layer sees everything, and last layers that read others' keys."""
    torch.manual_seed(3)
    kinds = ["sliding_attention", "full_attention"]
    config: Any = AutoConfig.for_model(
        "gemma4_text", **SIZES | {"num_hidden_layers": 6, "head_dim": 8}, global_head_dim=16,
        hidden_size_per_layer_input=4, vocab_size_per_layer_input=40, num_kv_shared_layers=2,
        sliding_window=6, layer_types=kinds * 3,
    )  # fmt: skip
    model = on_transformers(AutoModelForCausalLM.from_config(config).eval(), 64)
    heads = config.num_key_value_heads
    assert model.cache.shape.of_layers == ((heads, 8), (heads, 16)) * 2
    model.forward(TEXT[:8])
    tree = model.forward([TEXT[8], 7, TEXT[9]], parents=(-1, -1, 0))
    assert torch.allclose(tree[[0, 2]], plain(model.module, TEXT[:10])[8:], **CLOSE)
    model.cache.keep(8, (0, 2))
    assert torch.allclose(model.forward(TEXT[10:]), plain(model.module, TEXT)[10:], **CLOSE)
    assert model.cache.kv_bytes == 2 * 4 * 64 * heads * (8 + 16) * 2


@pytest.mark.slow
@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize(
    "more",
    [{}, {"num_kv_shared_layers": 2}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}],
    ids=lambda more: " ".join(more) or "usual",
)
def test_the_keys_of_each_layer_are_planned_as_they_are_kept(
    more: dict[str, Any], is_published: bool, tmp_path: Path
) -> None:
    """transformers writes the width of wide heads at each layer; published configs have it once."""
    wide: dict[str, Any] = {"global_head_dim": 32, **more}
    config: Any = AutoConfig.for_model(
        "gemma4_text", **SIZES | {"num_hidden_layers": 6, "head_dim": 8}, **wide, sliding_window=6,
        hidden_size_per_layer_input=4, vocab_size_per_layer_input=40,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    if is_published:
        del written["per_layer_config"]
        (tmp_path / "config.json").write_text(json.dumps({**written, **wide}))
    cache = KVCache(kv_shape(config, 64), torch.float32, CPU)
    assert shape_from_folder(tmp_path).kv_bytes(64, "fp32") == cache.kv_bytes
