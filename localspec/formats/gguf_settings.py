"""A GGUF file's settings as the config.json of a transformers model, and its tensors' names there.

Contract: `config_of` gives the config of a family of FAMILIES, with the file under
`quantization_config` (method "gguf"); other families and rotations are refused with the reason.
`tensor_names` maps the file's names to those of transformers. `unread_settings` names the keys that
nothing reads.

Not here: the tokenizer (gguf_tokenizer), values (weights.gguf).
Source: gguf-py's tensor_mapping.py and llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.gguf_families import FAMILIES, Family
from localspec.formats.gguf_file import GGUFHeader, GGUFTensor
from localspec.formats.gguf_layers import (
    MTP_ALONE,
    MTP_COUNT,
    MTP_PARTS,
    count_layers,
    gemma4_settings,
    gpt_oss_settings,
    qwen35_settings,
    usual_of,
)
from localspec.formats.gguf_rotation import (
    LONGROPE_FACTORS,
    QUERY_SCALE,
    ROTATION_FACTORS,
    refused,
    rotation_of,
)
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
NO_WEIGHTS = (ROTATION_FACTORS, *LONGROPE_FACTORS.values())
TOWERS = ("v.", "mm.", "a.")  # begin what Ollama keeps for images and sound in the same file
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
# Of families whose layers are of several kinds: the keys of config.json that say so.
OF_LAYER_KINDS = {
    "qwen35": qwen35_settings, "qwen35moe": qwen35_settings, "gemma4": gemma4_settings,
    "gpt-oss": gpt_oss_settings,
}  # fmt: skip


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
    if header.file.name.startswith(MTP_ALONE):
        raise ModelError(
            f"{header.file.name} holds a module that drafts for a model, and no model. Name the "
            "file of the model itself, beside which it is found."
        )
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
    of_kinds = OF_LAYER_KINDS.get(header.family, lambda own, tensors: {})(own, tensors)
    has_experts = {"num_experts", "num_local_experts"} & {*family.settings, *of_kinds}
    if own.get("expert_count") and not has_experts:
        raise refused(header, f"is a mixture of experts, which of the family {header.family}")
    if family.model_type == "olmo2" and own.get("attention.sliding_window"):
        raise refused(header, "is an OLMo 3, whose attention to windows")
    heads, width = int(own["attention.head_count"]), int(own["embedding_length"])
    name = family.model_type
    head_dim = int(own.get("attention.key_length") or width // heads)
    if own.get("attention.value_length", head_dim) != head_dim:
        raise refused(header, "has values of another width than its keys, which")
    _check_sizes(header, own, tensors, heads * int(of_kinds.get("head_dim") or head_dim))
    has_bias = "blk.0.attn_output.bias" in tensors or "blk.0.attn_q.bias" in tensors
    ids = header.settings
    return {
        "model_type": name,
        "architectures": [family.architecture],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        **_ffn_size(own),
        "num_hidden_layers": count_layers(own),
        "num_attention_heads": heads,
        "num_key_value_heads": usual_of(own.get("attention.head_count_kv") or heads),
        "head_dim": head_dim,
        **({} if "hidden_activation" in family.fixed else {"hidden_act": "silu"}),
        "max_position_embeddings": int(own["context_length"]),
        "rms_norm_eps": float(own["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": rotation_of(header, own, head_dim),
        **family.fixed,
        **{ours: own[key] or None for ours, key in family.settings.items()},  # 0: no window
        **of_kinds,
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


def _ffn_size(own: Mapping[str, Any]) -> dict[str, int]:
    """Return the width of dense feed-forward parts, which a model with experts alone has not."""
    if own.get("feed_forward_length") is None and own.get("expert_count"):
        return {}
    return {"intermediate_size": usual_of(own["feed_forward_length"])}


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
            _ffn_size(own).get("intermediate_size"),
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


def tensor_names(header: GGUFHeader) -> dict[str, str]:
    """The name in transformers of every tensor of the file. Raises ModelError for one that the
    family is not known to have: the model would run without it and answer wrongly."""
    found, unknown = dict[str, str](), list[str]()
    family = family_of(header)
    own = NotedSettings(header.settings, f"{header.family}.")
    num_layers = count_layers(own) if own.get(MTP_COUNT) else None
    for tensor in header.tensors:
        if tensor.name in NO_WEIGHTS or tensor.name.startswith(TOWERS):
            continue
        name = _name(tensor.name, family, num_layers)
        if name is None:
            unknown.append(tensor.name)
        else:
            found[tensor.name] = name
    if unknown:
        raise ModelError(
            f"{header.file.name} holds {len(unknown)} tensors that a {header.family} model is not "
            f"known to have, first {unknown[0]}. Fetch the model with .safetensors weights instead."
        )
    return _of_stacks(found)


def _of_stacks(names: dict[str, str]) -> dict[str, str]:
    """The same, with both stacks of a layer named as transformers does where gate and up of its
    experts are one stack."""
    stacks = [name for name in names.values() if name.endswith(".experts.gate_up_proj")]
    downs = {f"{name.removesuffix('gate_up_proj')}down_proj.weight" for name in stacks}
    return {
        theirs: name.removesuffix(".weight") if name in downs else name
        for theirs, name in names.items()
    }


def _name(name: str, family: Family, num_layers: int | None) -> str | None:
    """num_layers: of the model itself, None where no block only drafts."""
    outer, of_layers = {**OUTER_NAMES, **family.outer}, {**LAYER_NAMES, **family.renamed}
    if name in outer:
        return outer[name]
    begin, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if begin != "blk" or not layer.isdecimal():
        return None
    where = f"model.layers.{layer}."
    if num_layers is not None and int(layer) >= num_layers:
        if part in MTP_PARTS:
            return f"mtp.{MTP_PARTS[part]}"
        where = f"mtp.layers.{int(layer) - num_layers}."
    if part in family.parts:
        return f"{where}{family.parts[part]}"
    path, _, suffix = part.rpartition(".")
    return f"{where}{of_layers[path]}.{suffix}" if path in of_layers else None


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
