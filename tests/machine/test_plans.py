"""The plan's exact parts against the bytes of models that were really built (CPU)."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from localspec.core.config import SHIPPED_PROFILES
from localspec.core.precisions import Precision
from localspec.formats.native import ACTIVATIONS, NATIVE
from localspec.machine.config_shapes import shape_from_config
from localspec.machine.memory import Arrangement, Room, bytes_of
from localspec.machine.model import Model
from localspec.machine.profiles import load_profiles
from localspec.machine.shapes import PACKS_BF16
from tests.kit.tiny import KINDS

pytestmark = pytest.mark.slow  # imports transformers

CONTEXT = 1000  # no multiple of a block of keys
ROOM = Room("cpu", 2**34)


@pytest.fixture(scope="module")
def module() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_weights_and_cache_are_planned_to_the_byte(module: Any) -> None:
    import torch

    from localspec.forward.cache import native_cache
    from localspec.forward.model import CausalLM, kv_shape
    from tests.kit.decoders import decoder_of

    shape = shape_from_config(module.config.to_dict(), "small")
    planned = bytes_of(Arrangement(Model("small", known_shape=shape), "bf16", CONTEXT), ROOM)
    cpu = torch.device("cpu")
    cache = native_cache(kv_shape(module.config, CONTEXT), torch.bfloat16, cpu)
    # The model also holds the few frequencies of its rotary positions, which are no weights.
    buffers = {t.data_ptr(): t.numel() * t.element_size() for t in module.buffers()}
    held = CausalLM(module, cache).weight_bytes - sum(buffers.values())
    assert shape.weight_bytes("bf16") == held
    native = decoder_of(module, cache)
    # Where oneDNN lays out bf16, the head as well, beside the embedding it is tied to.
    copied = native.weights.head.weight_bytes if PACKS_BF16 else 0
    tables = sum(part.nbytes for table in native.weights.tables for part in table)
    assert planned.target_weights == held + copied + tables
    assert planned.target_kv == cache.kv_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_self_draft_is_planned_no_smaller_than_it_is(
    module: Any, kind: Literal["nf4", "int8", "int4"]
) -> None:
    from localspec.forward.quantise import quantised_copy

    shape = shape_from_config(module.config.to_dict(), "small")
    precision: Precision = "8-bit" if kind == "int8" else "4-bit"
    planned = bytes_of(
        Arrangement(Model("small", known_shape=shape), "bf16", CONTEXT, self_draft=precision), ROOM
    )
    _, held = quantised_copy(module, kind)
    assert held <= planned.draft_weights <= 1.1 * held


def test_the_activations_that_are_named_are_those_of_the_decoder() -> None:
    from localspec.forward import activations

    assert set(ACTIVATIONS) == activations.ACTIVATIONS.keys()
    assert {"llama", "mimo", "gemma3"} <= NATIVE.keys()


@pytest.mark.parametrize(
    "family",
    ["gemma4, values from keys", "gemma4, keys of earlier layers", "gemma3_text", "gpt_oss",
     "mistral, windowed"],
)  # fmt: skip
def test_the_rings_of_a_model_are_planned_to_the_byte(family: str) -> None:
    """Also where config.json lists no kinds of layers."""
    import torch

    from localspec.machine.folder_shapes import counted_shape
    from tests.kit.families import small
    from tests.kit.tiny import with_cache

    module = small(family, max_position_embeddings=2048).to(torch.bfloat16)
    sizes = {name: tuple(each.shape) for name, each in module.state_dict().items()}
    config = module.config.to_dict()
    if family == "gemma3_text":  # as it is published
        del config["layer_types"]
    shape = counted_shape(config, sizes, "small")
    cache = with_cache(module, 2048).cache
    assert any(pair[0].shape[2] < cache.num_slots for pair in cache.slots)
    assert shape.loaded_bytes("bf16", "bf16", 2048, "cpu")[1] == cache.kv_bytes


def test_gemma_3_is_planned_with_the_rings_of_its_profile() -> None:
    shape = load_profiles((SHIPPED_PROFILES,))["gemma3"].models["google/gemma-3-27b-it"].shape
    assert shape.kv_bytes(16384) == 4 * 128 * 16 * (10 * 16384 + 52 * 1280)


def test_layers_of_two_head_sizes_are_planned_to_the_byte() -> None:
    import torch

    from localspec.machine.folder_shapes import counted_shape
    from tests.kit.families import small
    from tests.kit.tiny import with_cache

    module = small("gemma4, values from keys").to(torch.bfloat16)
    sizes = {name: tuple(each.shape) for name, each in module.state_dict().items()}
    shape = counted_shape(module.config.to_dict(), sizes, "small")
    native = with_cache(module, CONTEXT)
    weights, cache = shape.loaded_bytes("bf16", "bf16", CONTEXT, "cpu")
    tables = sum(part.nbytes for table in native.weights.tables for part in table)
    assert weights - shape.weight_bytes("bf16", "bf16", "cpu") == tables
    assert cache == native.cache.kv_bytes
