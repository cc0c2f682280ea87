"""Bytes of the profiles' models of 2026, against tables that were worked out apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localspec.core.config import SHIPPED_PROFILES
from localspec.formats import attention
from localspec.formats.native import NATIVE
from localspec.formats.published_tensors import published_tensors
from localspec.machine.memory import Room
from localspec.machine.planner import plan
from localspec.machine.plans import PlanRequest
from localspec.machine.profiles import load_profiles
from localspec.machine.shapes import ModelShape

GIB = 2**30
MODELS = {
    id: model
    for profile in load_profiles((SHIPPED_PROFILES,)).values()
    for id, model in profile.models.items()
}
# GiB of all weights in bf16, of everything in 4 bits without tables that are looked up, and of what
# is held of 16,384 tokens with one state and with windows that hold 256 positions more. Modules for
# multi-token prediction are included.
SIZES = {
    "Qwen/Qwen3.5-4B": (8.1, 2.3, 0.61),
    "Qwen/Qwen3.5-9B": (17.1, 4.8, 0.61),
    "Qwen/Qwen3.8-27B": (50.9, 14.3, 1.21),
    "Qwen/Qwen3.6-35B-A3B": (66.1, 18.6, 0.40),
    "google/gemma-4-E2B-it": (8.6, 1.2, 0.103),
    "google/gemma-4-E4B-it": (13.9, 2.4, 0.28),
    "google/gemma-4-12B-it": (22.2, 6.2, 0.64),
    "google/gemma-4-26B-A4B-it": (47.0, 13.2, 0.56),
    "google/gemma-4-31B-it": (57.2, 16.1, 2.23),
    "openai/gpt-oss-20b": (38.9, 10.4, 0.38),
}


def native(shape: ModelShape) -> ModelShape:
    """The shape as the native decoder will keep it, with experts in few bits."""
    kept: Any = "stored" if shape.family == "gpt_oss" else "4-bit"
    return replace(shape, not_native="", is_recurrent=False, experts_kept=kept)


@pytest.mark.parametrize("id", sorted(SIZES))
def test_weights_are_counted_by_each_projection(id: str) -> None:
    shape = native(MODELS[id].shape)
    in_bf16, in_4_bits, _ = SIZES[id]
    assert 2 * shape.num_params / GIB == pytest.approx(in_bf16, rel=0.02)
    held = shape.weight_bytes("4-bit-head")
    held += 0 if shape.mtp is None else native(shape.mtp).weight_bytes("4-bit-head")
    assert held / GIB == pytest.approx(in_4_bits, rel=0.04)


@pytest.mark.parametrize("id", sorted(SIZES))
def test_the_cache_holds_attention_layers_states_and_windows(id: str) -> None:
    shape = MODELS[id].shape
    undo = attention.NUM_PENDING * shape.ingredient_bytes
    extra_states = (attention.NUM_STATES - 1) * shape.state_bytes + undo
    of_module = 0 if shape.mtp is None else shape.mtp.kv_bytes(16384)
    held = shape.kv_bytes(16384) - extra_states + of_module
    assert held / GIB == pytest.approx(SIZES[id][2], rel=0.05)


def test_of_a_model_that_is_not_native_every_position_is_counted() -> None:
    for id, gib in (("google/gemma-4-31B-it", 13.75), ("google/gemma-4-12B-it", 5.25)):
        shape = replace(MODELS[id].shape, not_native="a key is unknown")
        assert shape.kv_bytes(16384) / GIB == pytest.approx(gib)


def test_mxfp4_experts_stay_as_published_at_every_precision() -> None:
    shape = native(MODELS["openai/gpt-oss-20b"].shape)
    assert shape.weight_bytes("bf16") / GIB == pytest.approx(12.8, rel=0.01)
    assert shape.published_bytes / GIB == pytest.approx(12.8, rel=0.01)
    target = replace(MODELS["openai/gpt-oss-20b"], drafts=(), packed=None)
    report = plan(PlanRequest(target, Room("cuda", 15 * GIB)))
    assert "kept as MXFP4, and loaded as they are" in report.plans[0].reason
    dense = replace(shape, stored_as="")
    assert dense.weight_bytes("bf16") / GIB == pytest.approx(38.9, rel=0.01)


def test_looked_up_tables_are_on_the_device_unless_the_native_decoder_runs_them() -> None:
    shape = MODELS["google/gemma-4-E4B-it"].shape
    table = 2 * 42 * 256 * 262144
    run = native(shape)
    assert run.weight_bytes("bf16", device="cpu") > run.weight_bytes("bf16") + table
    by_transformers = replace(run, not_native="it was not compared")
    assert by_transformers.weight_bytes("bf16") == run.weight_bytes("bf16") + table


def test_a_model_is_called_native_only_where_the_decoder_has_its_layout() -> None:
    for id in SIZES:
        shape = MODELS[id].shape
        assert shape.is_native == (shape.family in NATIVE), id


# Tiny models of each kind, whose weights transformers names.
TINY: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"intermediate_size": 40},
    "qwen3_5_moe_text": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    },
    "gemma4_text, experts": {
        "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
        "intermediate_size": 40, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    },
    "gemma4_text, shared": {
        "global_head_dim": 32, "intermediate_size": 40, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 48, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 24},
}  # fmt: skip
TINY_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 48,
}  # fmt: skip
STATES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("kind", sorted(TINY))
def test_listed_weights_are_those_of_transformers_own_model(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = kind.partition(",")[0]
    states = STATES if family.startswith("qwen") else {}
    config = AutoConfig.for_model(family, **TINY_SIZES, **TINY[kind], **states)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert published_tensors(config.to_dict()) == wanted


CARDS = (4, 6, 8, 12, 16, 24)
# The smallest card, in GiB, that holds each in 4 bits with 8192 tokens beside a desktop.
SMALLEST_CARD = {
    "Qwen/Qwen3.5-4B": 8,
    "Qwen/Qwen3.5-9B": 12,
    "Qwen/Qwen3.8-27B": 24,
    "Qwen/Qwen3.6-35B-A3B": 24,
    "google/gemma-4-E2B-it": 6,
    "google/gemma-4-E4B-it": 8,
    "google/gemma-4-12B-it": 12,
    "google/gemma-4-26B-A4B-it": 24,
    "google/gemma-4-31B-it": 24,
    "openai/gpt-oss-20b": 16,
}


@pytest.mark.parametrize("id", sorted(SMALLEST_CARD))
def test_each_model_fits_the_card_that_people_run_it_on(id: str) -> None:
    """Wholly: where a smaller card is enough with experts in the RAM, these are not on the card."""
    smaller = CARDS[CARDS.index(SMALLEST_CARD[id]) - 1]
    for card, is_enough in ((SMALLEST_CARD[id], True), (smaller, False)):
        room = Room(
            "cuda", int((card - 1.1) * GIB), card * GIB, has_display=True, ram_bytes=64 * GIB
        )
        plans = plan(PlanRequest(MODELS[id], room, 8192)).plans
        found = any(not each.experts_in_ram and each.context_length == 8192 for each in plans)
        assert found == is_enough, card
