"""A GGUF file's settings as the config.json of a transformers model, and its tensors' names there.

Contract: `config_of` gives the config of a family of FAMILIES, with the file under
`quantization_config` (method "gguf"); other families and rotations are refused with the reason.
`tensor_names` maps the file's names to those of transformers. Both are pure but for the factors of
a scaled rotation, which stand in the file as a tensor: they are only accepted if the known formula
gives the very same.

Not here: the tokenizer (gguf_tokenizer), values (forward.stored).
Source: gguf-py's tensor_mapping.py and llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from localspec.errors import ModelError
from localspec.formats.gguf_file import GGUFHeader, GGUFTensor


@dataclass(frozen=True)
class Family:
    """A family of GGUF files as transformers knows it. is_interleaved: whether llama.cpp keeps the
    rows of queries and keys in another order (each pair that is rotated stands together)."""

    model_type: str
    architecture: str
    is_interleaved: bool = False


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", is_interleaved=True),  # Mistral's too
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", is_interleaved=True),
}
OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROTATION_FACTORS = "rope_freqs.weight"
# Of every Llama 3.1 and later: where the slow frequencies begin and end, and the trained length.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def family_of(header: GGUFHeader) -> Family:
    """Raises ModelError for a family that is not read from GGUF files."""
    if header.settings.get("general.type", "model") != "model":
        raise ModelError(
            f"{header.file.name} is a GGUF file of the kind {header.settings['general.type']}, a "
            "part of a model and not one. Name the file of the model itself."
        )
    known = FAMILIES.get(header.family)
    if known is None:
        raise ModelError(
            f"{header.file.name} is a GGUF file of the family {header.family}, and of these "
            f"families alone GGUF files are read: {', '.join(FAMILIES)} (Mistral's say llama). "
            "Fetch the model with .safetensors weights instead."
        )
    return known


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """The config.json of the model in a file. Raises ModelError."""
    family = family_of(header)
    try:
        return _config(header, family)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{header.file.name} does not say {error}, so its size cannot be known. Fetch the file "
            "again."
        ) from error


def _config(header: GGUFHeader, family: Family) -> dict[str, Any]:
    own = {
        key.removeprefix(f"{header.family}."): value
        for key, value in header.settings.items()
        if key.startswith(f"{header.family}.")
    }
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if own.get("expert_count"):
        raise ModelError(
            f"{header.file.name} is a mixture of experts, which is not read from GGUF files yet. "
            "Fetch the model with .safetensors weights instead."
        )
    heads, width = int(own["attention.head_count"]), int(own["embedding_length"])
    head_dim = int(own.get("attention.key_length") or width // heads)
    rotated = int(own.get("rope.dimension_count") or head_dim)
    if rotated != head_dim:
        raise ModelError(
            f"{header.file.name} rotates a part of each head only, which is not read from GGUF "
            "files yet. Fetch the model with .safetensors weights instead."
        )
    has_bias = "blk.0.attn_output.bias" in tensors or (
        family.model_type == "llama" and "blk.0.attn_q.bias" in tensors
    )
    ids = header.settings
    return {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": int(own["feed_forward_length"]),
        "num_hidden_layers": int(own["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(own.get("attention.head_count_kv") or heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(own["context_length"]),
        "rms_norm_eps": float(own["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rotation(header, own, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": has_bias,
        "bos_token_id": ids.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": ids.get("tokenizer.ggml.padding_token_id"),
        "quantization_config": {
            "quant_method": "gguf",
            "kinds": header.kinds,
            "num_bytes": header.num_bytes,
        },
    }


def _rotation(header: GGUFHeader, own: dict[str, Any], head_dim: int) -> dict[str, Any]:
    theta = float(own.get("rope.freq_base") or 10000.0)
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factors = next((each for each in header.tensors if each.name == ROTATION_FACTORS), None)
    if factors is not None:
        return {**found, **_llama3(header, factors, theta, head_dim)}
    kind = str(own.get("rope.scaling.type", "none"))
    if kind in ("none", ""):
        return found
    factor = float(own.get("rope.scaling.factor") or 1.0)
    if kind == "linear":
        return {**found, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        length = int(own["rope.scaling.original_context_length"])
        return {
            **found,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
        }
    raise ModelError(
        f"{header.file.name} scales its rotation by {kind}, which is not read from GGUF files yet. "
        "Fetch the model with .safetensors weights instead."
    )


def _llama3(header: GGUFHeader, factors: GGUFTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """The settings whose factors the file holds: of the largest one, with what all Llamas share."""
    with factors.file.open("rb") as stream:
        stream.seek(factors.start)
        held = struct.unpack(f"<{factors.shape[0]}f", stream.read(factors.num_bytes))
    wanted = {"rope_type": "llama3", "factor": max(held), **LLAMA3}
    computed = llama3_factors(theta, head_dim, max(held))
    if len(computed) == len(held) and all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(computed, held, strict=True)
    ):
        return wanted
    raise ModelError(
        f"{header.file.name} scales its rotation by factors of its own, which is not read from "
        "GGUF files yet. Fetch the model with .safetensors weights instead."
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


def tensor_names(header: GGUFHeader) -> dict[str, str]:
    """The name in transformers of every tensor of the file. Raises ModelError for one that the
    family is not known to have: the model would run without it and answer wrongly."""
    found, unknown = dict[str, str](), list[str]()
    for tensor in header.tensors:
        if tensor.name == ROTATION_FACTORS:
            continue
        name = _name(tensor.name)
        if name is None:
            unknown.append(tensor.name)
        else:
            found[tensor.name] = name
    if unknown:
        raise ModelError(
            f"{header.file.name} holds {len(unknown)} tensors that a {header.family} model is not "
            f"known to have, first {unknown[0]}. Fetch the model with .safetensors weights instead."
        )
    return found


def _name(name: str) -> str | None:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_NAMES:
        return None
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"


def end_ids_of(header: GGUFHeader) -> list[int]:
    """Ids that end a reply: of the text, of a turn, of a message to a tool."""
    return _ids(header, ("eos", "eot", "eom"))


def _ids(header: GGUFHeader, names: Iterable[str]) -> list[int]:
    found = [header.settings.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return list(dict.fromkeys(each for each in found if isinstance(each, int)))
