"""The rotation that a GGUF file says, as `rope_parameters` of a config.json.

Factors of a scaled rotation stand in the file as a tensor: they are only accepted if a known
formula gives the very same.
Source: gguf-py and llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.gguf_file import GGUFHeader, GGUFTensor

ROTATION_FACTORS = "rope_freqs.weight"
# Of Phi: for texts within the original length, and for longer ones.
LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
# How much Ministral 3 scales its queries with the length.
QUERY_SCALE = "attention.temperature_scale"
# What gpt-oss's config.json says and its files leave unsaid.
GPT_OSS_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
        "mscale": "rope.scaling.yarn_log_multiplier",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
        "llama_4_scaling_beta": QUERY_SCALE}  # fmt: skip
PARTLY_ROTATED = ("phi3", "glm4", "qwen35", "qwen35moe")
# Gemma 4 divides the angles that do not turn by this number or more.
UNTURNED = 1e29
DEFAULT_THETA = {"gemma3": 1e6}  # older files leave it unsaid
# Of every Llama 3.1 and later: where the slow frequencies begin and end, and the trained length.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotation_of(header: GGUFHeader, own: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of config.json. own: the settings, without the family's name. Raises
    ModelError for a rotation that is not read."""
    found = _scaled_rotation(header, own, head_dim)
    rotated = int(own.get("rope.dimension_count") or head_dim)
    if rotated != head_dim:
        if header.family not in PARTLY_ROTATED:
            raise refused(header, "rotates a part of each head only, which")
        found["partial_rotary_factor"] = rotated / head_dim
    if header.family not in ("gemma3", "gemma4"):
        return found
    local = float(own.get("rope.freq_base_swa") or 10000.0)
    return {
        "full_attention": found,
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _scaled_rotation(header: GGUFHeader, own: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    theta = float(own.get("rope.freq_base") or DEFAULT_THETA.get(header.family, 10000.0))
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if ROTATION_FACTORS in tensors and header.family == "gemma4":
        return {**found, **_proportional(header, tensors[ROTATION_FACTORS])}
    if ROTATION_FACTORS in tensors:
        return {**found, **_llama3(header, tensors[ROTATION_FACTORS], theta, head_dim)}
    factors = {
        name: _numbers(tensors[key]) for name, key in LONGROPE_FACTORS.items() if key in tensors
    }
    original = own.get("rope.scaling.original_context_length")
    if factors:
        return {
            **found,
            **factors,
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "attention_factor": own.get("rope.scaling.attn_factor"),
        }
    kind = str(own.get("rope.scaling.type", "linear"))  # what llama.cpp takes
    older = own.get("rope.scale_linear")
    factor = float(own.get("rope.scaling.factor") or older or 1.0)
    if kind in ("none", "") or (kind == "linear" and factor == 1.0):
        return found
    if kind == "linear":
        return {**found, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        length = int(own["rope.scaling.original_context_length"])
        return {
            **found,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
            **(GPT_OSS_YARN if header.family == "gpt-oss" else {}),
            **{name: float(own[key]) for name, key in YARN.items() if own.get(key)},
        }
    raise refused(header, f"scales its rotation by {kind}, which")


def _numbers(tensor: GGUFTensor) -> list[float]:
    """Of a vector in fp32."""
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return list(struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.num_bytes)))


def _llama3(header: GGUFHeader, factors: GGUFTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings whose factors the file holds: of the largest one, with what all Llamas share."""
    held = _numbers(factors)
    wanted = {"rope_type": "llama3", "factor": max(held), **LLAMA3}
    computed = llama3_factors(theta, head_dim, max(held))
    if len(computed) == len(held) and all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(computed, held, strict=True)
    ):
        return wanted
    raise refused(header, "scales its rotation by factors of its own, which")


def _proportional(header: GGUFHeader, factors: GGUFTensor) -> dict[str, Any]:
    """Return the settings of Gemma 4's layers that see everything, whose file holds ones for angles
    that turn and a huge number for the others."""
    held = _numbers(factors)
    num_turned = sum(factor == 1.0 for factor in held)
    if any(factor < UNTURNED for factor in held[num_turned:]):
        raise refused(header, "scales its rotation by factors of its own, which")
    return {"rope_type": "proportional", "partial_rotary_factor": num_turned / len(held)}


def refused(header: GGUFHeader, fault: str) -> ModelError:
    """fault: up to the words "is not read"."""
    return ModelError(
        f"{header.file.name} {fault} is not read from GGUF files yet. Fetch the model with "
        ".safetensors weights instead."
    )


def llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """By how much each frequency is divided, [head_dim / 2], as llama.cpp writes it."""
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    length = LLAMA3["original_max_position_embeddings"]
    found = []
    for place in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (place / head_dim)
        if wavelength < length / high:
            found.append(1.0)
        elif wavelength > length / low:
            found.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found
