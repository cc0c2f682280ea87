"""Whether the attention that a config.json describes can be run here, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KNOWN_KINDS = ("full_attention", "sliding_attention")


def attention_fault(text: Mapping[str, Any]) -> str | None:
    """Why not, as sentences; None where nothing is against it. text: the config of the part that
    reads text."""
    family = text.get("model_type")
    others = sorted({str(kind) for kind in text.get("layer_types") or ()} - set(KNOWN_KINDS))
    if others:
        return (
            f"{family} has layers of the kind {', '.join(others)}. Their state cannot take back a "
            "rejected draft. Choose a model with full attention."
        )
    if text.get("kv_lora_rank"):
        return (
            f"{family} has latent attention (MLA), whose keys and values differ in size, which the "
            "cache here does not hold yet. Choose a model of another family, such as Qwen3."
        )
    return None
