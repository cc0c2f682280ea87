"""What a model has that the native decoder lacks, by its settings and the names of its weights.

Contract: `why_not_native` is pure. NATIVE_FAMILIES are those that forward.from_transformers takes
over; a test compares the two.

Not here: taking a model over, and the settings of a native family that are refused there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

NATIVE_FAMILIES = (
    "llama", "mimo", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "phi3", "glm4", "granite",
    "olmo2", "olmo3", "gemma", "gemma3", "gemma3_text", "glm", "mixtral", "olmoe", "seed_oss",
    "ernie4_5", "exaone4", "cohere", "cohere2", "helium", "cwm", "ministral",
)  # fmt: skip
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ACTIVATION_NAMES = ("hidden_act", "hidden_activation", "activation_function", "activation")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# What a weight's name tells.
TOLD = (
    (r"\bsinks\b", "attention sinks"),
    (r"(norm|\bln)\w*\.bias$", "LayerNorm with a bias"),
    (r"\b(wpe|embed_positions)\b", "learnt positions"),
    (r"\bshared_experts?\b", "experts that every token goes through"),
    (r"\b(e_score_correction_bias|expert_bias)$", "a router with a correction of its scores"),
    (r"\.experts\..*bias$", "experts with a bias"),
    (r"\b(query_key_value|Wqkv|c_attn)\b", "queries, keys and values mixed in one weight"),
)
GATED = r"gate_proj|gate_up|\bw3\b"
# What a layer of the native families holds.
KNOWN_PART = re.compile(
    r"(q|k|v|o|qkv|gate|up|down|gate_up)_proj|experts|gate|w[123]|block_sparse_moe|\d+"
    r"|mlp|self_attn|weight|bias|\w*norm"
)


def why_not_native(text: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Why not natively, after "because"; None for a native family. text: the settings of the part
    that reads text. names: of its weights."""
    family, of_weights = str(text.get("model_type")), sorted(names)
    if family in NATIVE_FAMILIES:
        return None
    found = ["soft-capped logits"] if any(text.get(cap) for cap in CAPS) else []
    found += ["positions by ALiBi"] if text.get("alibi") else []
    found += [what for told, what in TOLD if any(re.search(told, name) for name in of_weights)]
    if not any(re.search(GATED, name) for name in of_weights):
        found.append("a feed-forward part without a gate")
    activation = next((text[name] for name in ACTIVATION_NAMES if text.get(name)), None)
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        found.append(f"the activation {activation}")
    found = found or _unknown_parts(of_weights)
    if not found:
        return f"its family, {family}, was not compared with the native decoder"
    listed = " and ".join(", ".join(found).rsplit(", ", 1))
    return f"it has {listed}"


def _unknown_parts(names: Iterable[str]) -> list[str]:
    """What layers hold beside the parts of the native families."""
    in_layers = (re.split(r"(?:^|\.)layers\.\d+\.", name, maxsplit=1) for name in names)
    parts = {part for each in in_layers if len(each) == 2 for part in each[1].split(".")}
    unknown = sorted(part for part in parts if not KNOWN_PART.fullmatch(part))
    return [f"layers with {each}" for each in unknown[:1]]
