"""Multi-token-prediction modules as models ship them, read from the model's own files.

Contract: `ships_mtp` says whether a model's folder holds such a module at all; `read_native` gives
the one of MiMo-7B's layout (a Qwen2 layer under model.mtp_layers.0) as `MtpWeights`. Other layouts
are known by their names and refused in words: their layers have experts or compressed attention,
and their targets cannot take a draft back or are not run here.

Only the tensors of the module are read. Names from the published checkpoints and from vLLM's
mimo_mtp.py, deepseek_mtp.py and qwen3_next_mtp.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from localspec.errors import ModelError
from localspec.forward.heads.files import TargetSizes, take
from localspec.forward.heads.mtp import MtpShape, MtpWeights
from localspec.forward.model import LanguageModel
from localspec.forward.weights import check_safetensors, weight_files

PREFIX = "model.mtp_layers."
FIRST = f"{PREFIX}0."
# In the order in which our tensors stack them.
LAYOUT = {
    "hidden_norm.weight": ("hidden_layernorm.weight",),
    "token_norm.weight": ("token_layernorm.weight",),
    "attention_norm.weight": ("input_layernorm.weight",),
    "final_norm.weight": ("final_layernorm.weight",),
    "input.weight": ("input_proj.weight",),
    "qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "qkv.bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "output.weight": ("self_attn.o_proj.weight",),
    "feed_forward_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}
# What part of a name tells of another layout.
OTHERS = {
    ".eh_proj.": "DeepSeek-V3 or GLM-4.5",
    "mtp.fc.": "Qwen3-Next or Qwen3.5",
    "mtp_block.": "ERNIE 4.5",
    "mtp.layers.": "another family",
}


def ships_mtp(folder: Path) -> bool:
    """Whether a model's files hold a multi-token-prediction module of any kind. False where the
    folder cannot be read: loading the model will say why."""
    try:
        return any(_is_mtp(name) for name in _places(folder))
    except ModelError:
        return False


def read_native(folder: Path, target: LanguageModel) -> MtpWeights:
    """The module that the model in `folder` ships. Raises ModelError."""
    places = _places(folder)
    _require_known(folder, places)
    found = _read(places)
    has_bias = "self_attn.q_proj.bias" in found
    shape = _shape(folder, _config(folder), has_bias)
    stacked = _stacked(found, folder.name, has_bias)
    sizes = TargetSizes.of(target)
    wanted = shape.shapes(sizes.hidden_size)
    dtype = target.embed([0]).dtype
    return MtpWeights(shape, take(stacked, wanted, folder.name, dtype, target.device))


def _is_mtp(name: str) -> bool:
    return name.startswith(PREFIX) or any(part in name for part in OTHERS)


def _places(folder: Path) -> dict[str, Path]:
    """Name -> file of every tensor, from the files' own headers. Raises ModelError."""
    found = dict[str, Path]()
    for file in weight_files(folder):
        check_safetensors(file)
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def _require_known(folder: Path, places: Mapping[str, Path]) -> None:
    """Raises ModelError unless a module of the known layout is there, alone."""
    if not any(name.startswith(FIRST) for name in places):
        for name in places:
            kind = next((kind for part, kind in OTHERS.items() if part in name), None)
            if kind is not None:
                raise ModelError(
                    f"{folder.name} ships a multi-token-prediction module of the layout of {kind} "
                    f"({name}), which is not run here; that of MiMo-7B is. Train one for this "
                    "target: python -m localspec train mtp."
                )
        raise ModelError(
            f"{folder.name} ships no multi-token-prediction module. Train one: "
            "python -m localspec train mtp."
        )


def _read(places: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """The first module's tensors, by their names within it."""
    found = dict[str, torch.Tensor]()
    for file in {file for name, file in places.items() if name.startswith(FIRST)}:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in places if name.startswith(FIRST) and places[name] == file]
            found.update({name.removeprefix(FIRST): opened.get_tensor(name) for name in names})
    return found


def _stacked(
    found: Mapping[str, torch.Tensor], where: str, has_bias: bool
) -> dict[str, torch.Tensor]:
    """Our tensors from theirs. Raises ModelError for one too few, too many or of another shape."""
    layout = {ours: parts for ours, parts in LAYOUT.items() if has_bias or ours != "qkv.bias"}
    known = {part for parts in layout.values() for part in parts}
    missing, extra = sorted(known - found.keys()), sorted(found.keys() - known)
    if missing or extra:
        said = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which is not known"
        raise ModelError(
            f"The multi-token-prediction module of {where} {said} ({len(missing)} tensors "
            f"missing, {len(extra)} too many). Fetch the model again."
        )
    try:
        return {ours: torch.cat([found[part] for part in parts]) for ours, parts in layout.items()}
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"The multi-token-prediction module of {where} has queries, keys and values, or gate "
            "and up, of sizes that do not go together. Fetch the model again."
        ) from error


def _shape(folder: Path, config: Mapping[str, Any], has_bias: bool) -> MtpShape:
    """Raises ModelError for settings that would change the layer's mathematics."""
    if config.get("hidden_act", "silu") != "silu":
        raise _unsuited(folder, f"its activation is {config['hidden_act']}, not silu")
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind != "default":
        raise _unsuited(folder, f"its positions are turned by {kind}")
    if config.get("use_sliding_window"):
        raise _unsuited(folder, "it attends to a window only")
    heads, size = config.get("num_attention_heads"), config.get("hidden_size")
    derived = size // heads if isinstance(heads, int) and isinstance(size, int) and heads else None
    settings = {
        "ffn_size": config.get("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or derived,
        "rotation_base": config.get("rope_theta") or rotation.get("rope_theta"),
        "norm_epsilon": config.get("rms_norm_eps"),
        "has_bias": has_bias,
    }
    return MtpShape.of(settings, f"{folder.name}/config.json")


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{folder}/config.json cannot be read. Fetch the model again.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{folder}/config.json is not a JSON object. Fetch the model again.")
    return found


def _unsuited(folder: Path, reason: str) -> ModelError:
    return ModelError(
        f"The multi-token-prediction module of {folder.name} is not run here: {reason}. Train one "
        "for this target: python -m localspec train mtp."
    )
