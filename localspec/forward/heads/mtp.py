"""Multi-token prediction: one more decoder layer that reads the target's last hidden state.

A state and the embedding of the next token, each normalised, are joined and projected, pass one
decoder layer, and become a state from which the target's own head predicts the token after that.
Further steps read that state. The settings and tensors of a trained module are named here; its
files, and those of modules that models ship, are read by mtp_files.

Not here: catching up and drafting (autoregressive, drafters.mtp), training (training.mtp).
Source: DeepSeek-V3 (arXiv 2412.19437), after Gloeckle et al. 2024 (arXiv 2404.19737); one module
for all steps, as such models are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import HeadShape, Layer, Network
from localspec.forward.heads.files import HeadSettings, Shapes, TargetSizes
from localspec.forward.heads.layer import HeadLayer, LayerShape, RowFunction

KIND = "mtp"
NORMS = ("hidden_norm", "token_norm", "attention_norm", "final_norm")


class MtpNetwork(Network):
    """Its rows are already what the output head reads. is_hidden_first: the state stands before the
    embedding where both are joined."""

    def __init__(
        self, layer: HeadLayer, parts: Mapping[str, RowFunction], is_hidden_first: bool = True
    ) -> None:
        super().__init__(layer, parts)
        self._is_hidden_first = is_hidden_first

    def transform(self, rows: torch.Tensor, embedded: torch.Tensor, layer: Layer) -> torch.Tensor:
        part = self.parts
        normed = (part["hidden_norm"](rows), part["token_norm"](embedded))
        stream = part["input"](torch.cat(normed if self._is_hidden_first else normed[::-1], dim=-1))
        stream = layer(part["attention_norm"](stream), stream)
        return part["final_norm"](stream)


def tensor_shapes(shape: HeadShape) -> Shapes:
    """Every tensor of a module. The state stands before the embedding in `input`."""
    layer, width = shape.layer.shapes(), shape.layer.hidden_size
    norms = {f"{name}.weight": (width,) for name in NORMS}
    return {**norms, "input.weight": (width, 2 * width), **layer}


def settings_of(shape: HeadShape) -> dict[str, Any]:
    """As head.json holds them."""
    layer = asdict(shape.layer)
    del layer["hidden_size"], layer["input_size"]
    return layer | {"rotation_base": shape.rope_base}


def read_shape(settings: HeadSettings, sizes: TargetSizes) -> HeadShape:
    """The settings of our own format, checked. Raises ModelError."""
    settings.require("has_bias", False)  # older files say it
    layer = LayerShape.own(settings, sizes.hidden_size)
    return HeadShape(layer, (LAST,), settings.fraction("rotation_base"))
