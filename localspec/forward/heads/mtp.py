"""Multi-token prediction: one more decoder layer that reads the target's last hidden state.

Contract: a state and the embedding of the next token, each normalised, are joined and projected,
pass one decoder layer, and become a state from which the target's own head predicts the token after
that. `read_mtp` reads a module of our own format, or the one that a model's own files hold in
MiMo-7B's layout (a Qwen2 layer under model.mtp_layers.0); `ships_mtp` says whether they hold one.
Other layouts are recognised by their names and refused with the reason: their layers have experts
or compressed attention, and their targets cannot take a draft back or are not run here.

Not here: catching up and drafting (autoregressive, drafters.mtp), training (training.mtp).
Source: DeepSeek-V3 (arXiv 2412.19437), after Gloeckle et al. 2024 (arXiv 2404.19737); one module
for all steps, as such models are run. Names from the published checkpoints and from vLLM's
mimo_mtp.py, deepseek_mtp.py and qwen3_next_mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from localspec.core.errors import ModelError
from localspec.formats.folder_files import weight_files
from localspec.formats.safetensors_file import tensor_shapes as shapes_in
from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import HeadParts, HeadShape, Layer, Network
from localspec.forward.heads.files import (
    HeadSettings,
    Shapes,
    TargetSizes,
    TensorLayout,
    is_published,
    read_head,
    read_published,
    take,
    take_published,
)
from localspec.forward.heads.layer import LayerShape, llama_layout
from localspec.forward.model import LanguageModel

KIND = "mtp"
NORMS = ("hidden_norm", "token_norm", "attention_norm", "final_norm")

PREFIX = "model.mtp_layers."
FIRST = f"{PREFIX}0."
# A part of a tensor's name -> the layout it belongs to.
OTHER_LAYOUTS = {
    ".eh_proj.": "DeepSeek-V3 or GLM-4.5",
    "mtp.fc.": "Qwen3-Next or Qwen3.5",
    "mtp_block.": "ERNIE 4.5",
    "mtp.layers.": "another family",
}


class MtpNetwork(Network):
    """Its rows are already what the output head reads."""

    def transform(self, rows: torch.Tensor, embedded: torch.Tensor, layer: Layer) -> torch.Tensor:
        part = self.parts
        joined = torch.cat((part["hidden_norm"](rows), part["token_norm"](embedded)), dim=-1)
        stream = part["input"](joined)
        stream = layer(part["attention_norm"](stream), stream)
        return part["final_norm"](stream)


def tensor_shapes(shape: HeadShape) -> Shapes:
    """Every tensor of a module. The state stands before the embedding in `input`."""
    layer, width = shape.layer.shapes(), shape.layer.hidden_size
    bias = {"qkv.bias": layer["qkv.weight"][:1]} if shape.has_bias else {}
    norms = {f"{name}.weight": (width,) for name in NORMS}
    return {**norms, "input.weight": (width, 2 * width), **layer, **bias}


def settings_of(shape: HeadShape) -> dict[str, Any]:
    """As head.json holds them."""
    layer = asdict(shape.layer)
    del layer["hidden_size"], layer["input_size"]
    return layer | {"rotation_base": shape.rope_base, "has_bias": shape.has_bias}


def read_shape(settings: HeadSettings, sizes: TargetSizes) -> HeadShape:
    """The settings of our own format, checked. Raises ModelError."""
    has_bias = settings.values.get("has_bias", False)
    if type(has_bias) is not bool:
        raise settings.unfit(f"its has_bias is {has_bias!r}, but must be true or false")
    layer = LayerShape.own(settings, sizes.hidden_size)
    return HeadShape(layer, (LAST,), settings.fraction("rotation_base"), has_bias)


def read_mtp(folder: Path, target: LanguageModel) -> HeadParts:
    """The module in `folder`, of our own format or shipped with a model. Raises ModelError."""
    sizes, dtype = TargetSizes.of(target), target.embed([0]).dtype
    if is_published(folder):
        shape, tensors = _shipped(folder, sizes, dtype, target.device)
    else:
        files = read_head(folder, KIND, sizes)
        shape = read_shape(files.settings, sizes)
        wanted = tensor_shapes(shape)
        tensors = take(files.tensors, wanted, folder.name, dtype, target.device)
    return HeadParts.sharing(target, shape, MtpNetwork, tensors)


# -- a module that a model ships ------------------------------------------------------------


def ships_mtp(folder: Path) -> bool:
    """Whether a model's files hold a multi-token-prediction module of any layout. False where the
    folder cannot be read: loading the model will say why."""
    try:
        names = _files_by_name(folder)
    except ModelError:
        return False
    return any(part in name for name in names for part in (PREFIX, *OTHER_LAYOUTS))


def _shipped(
    folder: Path, sizes: TargetSizes, dtype: torch.dtype, device: torch.device
) -> tuple[HeadShape, dict[str, torch.Tensor]]:
    """Raises ModelError for another layout, and for settings that change the layer's function."""
    files = _files_by_name(folder)
    _require_known_layout(folder, files)
    tensors = _read_first(files)
    config = read_published(folder, KIND)
    rotation = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind != "default":
        raise config.unfit(f"its rotation is {kind}, and only the default one is known here")
    if config.values.get("use_sliding_window"):
        raise config.unfit("it attends to a window only")
    shape = HeadShape(
        LayerShape.published(config, sizes.hidden_size, sizes.hidden_size),
        (LAST,),
        config.fraction("rope_theta", rotation.get("rope_theta")),
        has_bias="self_attn.q_proj.bias" in tensors,
    )
    return shape, take_published(tensors, _layout(shape), folder.name, dtype, device)


def _layout(shape: HeadShape) -> TensorLayout:
    width = shape.layer.hidden_size
    return {
        "hidden_norm.weight": {"hidden_layernorm.weight": (width,)},
        "token_norm.weight": {"token_layernorm.weight": (width,)},
        "attention_norm.weight": {"input_layernorm.weight": (width,)},
        "final_norm.weight": {"final_layernorm.weight": (width,)},
        "input.weight": {"input_proj.weight": (width, 2 * width)},
        **llama_layout(shape.layer, shape.has_bias),
    }


def _files_by_name(folder: Path) -> dict[str, Path]:
    """The file of every tensor, by its name, from the files' own headers. Raises ModelError."""
    return {name: file for file in weight_files(folder) for name in shapes_in(file)}


def _read_first(files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """The first module's tensors, by their names within it."""
    found, wanted = dict[str, torch.Tensor](), [name for name in files if name.startswith(FIRST)]
    for file in {files[name] for name in wanted}:
        with safe_open(file, framework="pt") as opened:
            here = [name for name in wanted if files[name] == file]
            found.update({name.removeprefix(FIRST): opened.get_tensor(name) for name in here})
    return found


def _require_known_layout(folder: Path, files: Mapping[str, Path]) -> None:
    """Raises ModelError unless a module of the known layout is there."""
    if any(name.startswith(FIRST) for name in files):
        return
    remedy = f"Train one for this target: python -m localspec train {KIND}."
    for name in files:
        for part, layout in OTHER_LAYOUTS.items():
            if part in name:
                raise ModelError(
                    f"{folder.name} ships a multi-token-prediction module of the layout of "
                    f"{layout} ({name}), which is not run here; that of MiMo-7B is. {remedy}"
                )
    raise ModelError(f"{folder.name} ships no multi-token-prediction module. {remedy}")
