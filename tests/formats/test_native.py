"""What a family that is not native has is told from its settings and the names of its weights."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.formats.native import NATIVE, why_not_native

LAYER = "model.layers.0."
GATED = (f"{LAYER}mlp.gate_proj.weight", f"{LAYER}self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("settings", "names", "told"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, (), "soft-capped scores"),
        ({"model_type": "unheard_of"}, (f"{LAYER}self_attn.sinks",), "attention sinks"),
        (
            {"model_type": "gpt_neox"},
            (f"{LAYER}query_key_value.weight",),
            "queries, keys and values",
        ),
        ({"model_type": "glm4_moe"}, (f"{LAYER}mlp.gate.e_score_correction_bias",), "a router"),
        ({"model_type": "apertus", "hidden_act": "xielu"}, (), "the activation xielu"),
        ({"model_type": "diffllama"}, (f"{LAYER}self_attn.lambda_k1",), "attention that is the"),
        ({"model_type": "gemma3n"}, (f"{LAYER}layer_scalar",), "a factor of its own"),
        ({"model_type": "unheard_of"}, (f"{LAYER}self_attn.odd",), "layers with odd"),
        ({"model_type": "falcon", "alibi": True}, (), "positions by ALiBi"),
    ],
)
def test_what_is_lacking_is_named(
    settings: dict[str, Any], names: tuple[str, ...], told: str
) -> None:
    reason = why_not_native(settings, (*GATED, *names))
    assert reason is not None and reason.startswith(f"it has {told}")


def test_several_are_listed_in_one_sentence() -> None:
    names = ("transformer.wpe.weight", "transformer.h.0.attn.c_attn.weight")
    reason = why_not_native({"model_type": "gpt2", "activation_function": "gelu"}, names)
    mixed = "queries, keys and values mixed in one weight"
    assert reason == f"it has learnt positions, {mixed} and the activation gelu"


def test_a_family_that_looks_like_a_native_one_was_not_compared() -> None:
    reason = why_not_native({"model_type": "unheard_of", "hidden_act": "silu"}, GATED)
    assert reason == "its family, unheard_of, was not compared with the native decoder"


def test_a_native_family_lacks_nothing() -> None:
    assert {why_not_native({"model_type": each}, GATED) for each in NATIVE} == {None}
