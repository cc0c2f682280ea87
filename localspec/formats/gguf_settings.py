"""A GGUF file's settings as the config.json of a transformers model, and its tensors' names there.

Contract: `config_of` gives the config of a family of FAMILIES, with the file under
`quantization_config` (method "gguf"); other families and rotations are refused with the reason.
`tensor_names` maps the file's names to those of transformers. Both are pure but for the factors of
a scaled rotation, which stand in the file as a tensor: they are only accepted if the known formula
gives the very same. `unread_settings` names the keys that nothing reads.

Not here: the tokenizer (gguf_tokenizer), values (weights.gguf).
Source: gguf-py's tensor_mapping.py and llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from math import prod
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.gguf_families import FAMILIES, Family
from localspec.formats.gguf_file import GGUFHeader, GGUFTensor
from localspec.formats.noted_settings import NotedSettings
from localspec.formats.stored import GGUF_IN_GROUPS

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
# Of Phi: for texts within the original length, and for longer ones.
LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
NO_WEIGHTS = (ROTATION_FACTORS, *LONGROPE_FACTORS.values())
TOWERS = ("v.", "mm.", "a.")  # begin what Ollama keeps for images and sound in the same file
# How much Ministral 3 scales its queries with the length.
QUERY_SCALE = "attention.temperature_scale"
YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
        "mscale": "rope.scaling.yarn_log_multiplier",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
        "llama_4_scaling_beta": QUERY_SCALE}  # fmt: skip
# Of Gemma, the layers of the 27B models, which divide their scores by another number.
LAYERS_OF_27B = {"gemma2": 46, "gemma3_text": 62}
# The keys that are reported where nothing reads them begin so, without the family's name.
NOTED = ("rope.", "attention.", "tokenizer.")
# Keys that change no reply: where text in the middle is written, what texts are told apart by, the
# positions of pictures, whether a rotation was trained, and the published tokenizer itself.
NEEDLESS = re.compile(
    r"tokenizer\.ggml\.((fim_\w+|prefix|suffix|middle|seperator|mask|cls)_token_id|token_type_count"
    r"|pre|scores|add_sep_token)|tokenizer\.huggingface\.json|rope\.dimension_sections"
    r"|rope\.scaling\.(finetuned|original_context_length)"
)
DEFAULTS = {"attention.causal": True, "rope.scaling.type": "none",
            "rope.scaling.attn_factor": 1.0,
            "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0}  # fmt: skip
PARTLY_ROTATED = ("phi3", "glm4")
DEFAULT_THETA = {"gemma3": 1e6}  # older files leave it unsaid
# Of every Llama 3.1 and later: where the slow frequencies begin and end, and the trained length.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def family_of(header: GGUFHeader) -> Family:
    """Raises ModelError for a family that is not read from GGUF files."""
    kind = header.settings.get("general.type", "model")
    kind = "mmproj" if header.family == "clip" else kind  # older files say only this
    if kind != "model":
        raise ModelError(
            f"{header.file.name} is a GGUF file of the kind {kind}, a part of a model and not one. "
            "Name the file of the model itself."
        )
    known = FAMILIES.get(header.family)
    if header.family == "mistral3" and f"mistral3.{QUERY_SCALE}" not in header.settings:
        known = FAMILIES["llama"]  # Mistral Small 3
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
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(
            f"{header.file.name} does not say {error}, so its size cannot be known. Fetch the file "
            "again."
        ) from error


def _config(header: GGUFHeader, family: Family) -> dict[str, Any]:
    own = NotedSettings(header.settings, f"{header.family}.")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    lacking = [key for key in family.settings.values() if key not in own]
    if lacking:
        raise KeyError(f"{header.family}.{lacking[0]}")
    if own.get("expert_count") and "num_experts" not in family.settings:
        raise _unread(header, f"is a mixture of experts, which of the family {header.family}")
    if family.model_type == "olmo2" and own.get("attention.sliding_window"):
        raise _unread(header, "is an OLMo 3, whose attention to windows")
    heads, width = int(own["attention.head_count"]), int(own["embedding_length"])
    name = family.model_type
    head_dim = int(own.get("attention.key_length") or width // heads)
    if own.get("attention.value_length", head_dim) != head_dim:
        raise _unread(header, "has values of another width than its keys, which")
    _check_sizes(header, own, tensors, heads * head_dim)
    has_bias = "blk.0.attn_output.bias" in tensors or "blk.0.attn_q.bias" in tensors
    ids = header.settings
    return {
        "model_type": name,
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
        **family.fixed,
        **{ours: own[key] or None for ours, key in family.settings.items()},  # 0: no window
        **(_of_gemma(name, own, heads, head_dim) if name in LAYERS_OF_27B else {}),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": has_bias and name != "qwen2",  # every Qwen2 has one
        "bos_token_id": ids.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": ids.get("tokenizer.ggml.padding_token_id"),
        "quantization_config": {
            "quant_method": "gguf",
            "kinds": header.kinds,
            "num_in_groups": _count_in_groups(header),
            "num_bytes": header.num_bytes,
        },
    }


def _count_in_groups(header: GGUFHeader) -> int:
    """Weights of the layers' matrices that a processor can keep in their 4 bits."""
    blocks = (each for each in header.tensors if each.name.startswith("blk."))
    matrices = (each for each in blocks if len(each.shape) == 2)
    return sum(prod(each.shape) for each in matrices if each.kind in GGUF_IN_GROUPS)


def _check_sizes(
    header: GGUFHeader, own: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], queries: int
) -> None:
    """Raises ModelError where settings and tensors disagree: a model of a damaged number could take
    all memory there is."""
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    said = {
        "block_count": (int(own["block_count"]), len(layers)),
        "embedding_length": (int(own["embedding_length"]), _width(tensors, "token_embd", 1)),
        "feed_forward_length": (
            int(own["feed_forward_length"]),
            _width(tensors, "blk.0.ffn_down", 1),
        ),
        "attention.head_count": (queries, _width(tensors, "blk.0.attn_q", 0)),
    }
    wrong = [name for name, (number, held) in said.items() if held is not None and number != held]
    if wrong:
        raise ModelError(
            f"{header.file.name} is damaged: its {wrong[0]} is not that of its tensors. Fetch the "
            "file again."
        )


def _width(tensors: Mapping[str, GGUFTensor], name: str, axis: int) -> int | None:
    found = tensors.get(f"{name}.weight")
    return found.shape[axis] if found is not None and len(found.shape) == 2 else None


def _of_gemma(family: str, own: Mapping[str, Any], heads: int, head_dim: int) -> dict[str, Any]:
    """What llama.cpp takes as given: which layers attend to a window, and by what the 27B models
    divide their scores."""
    count, width = int(own["block_count"]), int(own["embedding_length"])
    usual = 2 if family == "gemma2" else 6
    pattern = own.get("attention.sliding_window_pattern") or usual
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(count)]
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        "layer_types": [kinds[bool(is_window)] for is_window in pattern],
        "query_pre_attn_scalar": width // heads if count == LAYERS_OF_27B[family] else head_dim,
    }


def _rotation(header: GGUFHeader, own: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    found = _scaled_rotation(header, own, head_dim)
    rotated = int(own.get("rope.dimension_count") or head_dim)
    if rotated != head_dim:
        if header.family not in PARTLY_ROTATED:
            raise _unread(header, "rotates a part of each head only, which")
        found["partial_rotary_factor"] = rotated / head_dim
    if header.family != "gemma3":
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
            **{name: float(own[key]) for name, key in YARN.items() if own.get(key)},
        }
    raise _unread(header, f"scales its rotation by {kind}, which")


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
    raise _unread(header, "scales its rotation by factors of its own, which")


def _unread(header: GGUFHeader, fault: str) -> ModelError:
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


def tensor_names(header: GGUFHeader) -> dict[str, str]:
    """The name in transformers of every tensor of the file. Raises ModelError for one that the
    family is not known to have: the model would run without it and answer wrongly."""
    found, unknown = dict[str, str](), list[str]()
    names = {**LAYER_NAMES, **family_of(header).renamed}
    for tensor in header.tensors:
        if tensor.name in NO_WEIGHTS or tensor.name.startswith(TOWERS):
            continue
        name = _name(tensor.name, names)
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


def _name(name: str, of_layers: Mapping[str, str]) -> str | None:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in of_layers:
        return None
    return f"model.layers.{parts[1]}.{of_layers[parts[2]]}.{parts[3]}"


def unread_settings(header: GGUFHeader) -> list[str]:
    """Return the keys of rotation, attention and vocabulary that the file holds and nothing has
    read, but for those that change nothing here. header: its settings are NotedSettings."""
    assert isinstance(header.settings, NotedSettings)
    unread = sorted(header.settings.keys() - header.settings.read)
    named = {key: key.removeprefix(f"{header.family}.") for key in unread}
    return [
        key
        for key, name in named.items()
        if name.startswith(NOTED)
        and not NEEDLESS.fullmatch(name)
        and not _is_off(header, key, name)
    ]


def _is_off(header: GGUFHeader, key: str, name: str) -> bool:
    """True if a key says what is done without it."""
    value = header.settings[key]
    return value is False or value == DEFAULTS.get(name)


def end_ids_of(header: GGUFHeader) -> list[int]:
    """Ids that end a reply: of the text, of a turn, of a message to a tool."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = [header.settings.get(key) for key in keys]
    return list(dict.fromkeys(each for each in found if isinstance(each, int)))
