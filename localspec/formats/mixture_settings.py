"""What a config.json says of a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.native import LAYOUTS
from localspec.formats.rotation_settings import Incomplete, NotNative

# What the experts of gpt-oss were trained with, where nothing is said: the limit of gate and up,
# and the steepness of the gate's sigmoid.
CLAMP = (7.0, 1.702)


@dataclass(frozen=True)
class MixtureSettings:
    """Experts of the layers that have them. is_normalised: the shares of a row add up to 1. limit:
    of what gate and up may be, None for no limit; steepness: of the gate's sigmoid then. is_beside:
    the layers have a dense part as well."""

    num_experts: int
    num_chosen: int
    ffn_size: int
    is_normalised: bool
    layers: tuple[bool, ...]
    is_beside: bool = False
    limit: float | None = None
    steepness: float = 1.0


def mixture_of(
    text: Mapping[str, Any], family: str, num_layers: int, is_complete: bool
) -> MixtureSettings | None:
    """Return the experts of a family that may have them, None for a model without any.

    text: settings by their usual names. is_complete: whether it has every key of its family.
    Raises Incomplete, NotNative, ModelError."""
    is_beside = LAYOUTS[family].has_own_sizes
    if is_beside and not text.get("enable_moe_block"):
        return None
    count = text.get("num_local_experts")
    if not count:
        if count is None and not is_complete:
            raise _unsaid("num_local_experts")
        return None
    num_chosen = int(_need(text, "top_k_experts" if is_beside else "num_experts_per_tok"))
    if not 1 <= num_chosen <= int(count):
        raise ModelError(
            f"The config of this {family} model chooses {num_chosen} of {count} experts for a "
            "token, which no model does. Fetch it again."
        )
    said, size = text.get("norm_topk_prob"), text.get("moe_intermediate_size")
    layers = _layers_with_experts(text, num_layers)
    if LAYOUTS[family].has_shared_expert and not all(layers):
        raise NotNative("some of its layers have no experts")
    return MixtureSettings(
        num_experts=int(count),
        num_chosen=num_chosen,
        ffn_size=int(size or _need(text, f"{'moe_' if is_beside else ''}intermediate_size")),
        is_normalised=said is None or bool(said),
        layers=layers,
        is_beside=is_beside,
        **(_clamp(text) if LAYOUTS[family].has_expert_columns else {}),
    )


def _need(text: Mapping[str, Any], key: str) -> Any:
    value = text.get(key)
    if value is None:
        raise _unsaid(key)
    return value


def _unsaid(key: str) -> Incomplete:
    return Incomplete(f"its config.json does not say {key}")


def _clamp(text: Mapping[str, Any]) -> dict[str, float]:
    text.get("experts_per_token")  # published configs say it twice
    pair = (text.get("swiglu_limit"), text.get("swiglu_alpha"))
    limit, steepness = (
        usual if value is None else float(value) for value, usual in zip(pair, CLAMP, strict=True)
    )
    return {"limit": limit, "steepness": steepness}


def _layers_with_experts(text: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    if kinds := text.get("mlp_layer_types"):
        return tuple(kind == "sparse" for kind in kinds)
    step, dense = text.get("decoder_sparse_step"), text.get("mlp_only_layers") or ()
    return tuple(
        layer not in dense and not (layer + 1) % int(step or 1) for layer in range(num_layers)
    )
