"""EAGLE: one decoder layer that continues from the target's hidden states.

The networks of EAGLE-1 to 3, and of our own format, which shares the target's embedding and output
head.

Not here: reading a folder (eagle_files), running a head (autoregressive), which tokens are worth a
row (drafters.eagle).
Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840). Layouts as in
SafeAILab/EAGLE model/cnets.py and cnets1.py, vllm-project/speculators models/eagle3 and
deepseek-ai/DeepSpec modeling/eagle3; layer indices as vLLM and SGLang read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import (
    HeadShape,
    Layer,
    Network,
)
from localspec.forward.heads.files import HeadSettings, Shapes, TargetSizes
from localspec.forward.heads.layer import (
    HeadLayer,
    LayerShape,
    RowFunction,
)

KIND = "eagle"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("embedding_norm", "hidden_norm", "input_norm", "final_norm")


class FirstNetwork(Network):
    """EAGLE-1 and 2: embedding and hidden state are fused into the layer's input; the output is
    what the target's head reads, as the hidden state was."""

    def transform(self, rows: torch.Tensor, embedded: torch.Tensor, layer: Layer) -> torch.Tensor:
        fused = self.parts["fuse"](torch.cat((embedded, rows), dim=-1))
        return layer(fused, fused)


class _FusedNetwork(Network):
    """Hidden states of several layers are fused to one, which is normalised for the output head."""

    def enter(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.parts["fuse"](torch.cat(tuple(features), dim=-1))

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        return self.parts["final_norm"](rows)

    def _both(self, rows: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        normed = (self.parts["embedding_norm"](embedded), self.parts["hidden_norm"](rows))
        return torch.cat(normed, dim=-1)  # [..., 2 d]


class ThirdNetwork(_FusedNetwork):
    """EAGLE-3: the layer's stream carries the fused state; embedding and state, each normalised,
    make its queries, keys and values.

    norms_stream: the stream carries the normalised state (norm_before_residual). norms_output: the
    next step reads what the output head reads (norm_output of EAGLE 3.1). What is fused is
    normalised by the norms that a file holds: of each layer read, or of all of them as one."""

    def __init__(
        self,
        layer: HeadLayer,
        parts: Mapping[str, RowFunction],
        norms_stream: bool,
        norms_output: bool,
    ) -> None:
        super().__init__(layer, parts)
        self._norms_stream = norms_stream
        self._norms_output = norms_output

    def enter(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        if "read_norm_0" in self.parts:
            features = [self.parts[f"read_norm_{i}"](rows) for i, rows in enumerate(features)]
        if "read_norm" in self.parts:
            features = [self.parts["read_norm"](torch.cat(tuple(features), dim=-1))]
        return super().enter(features)

    def transform(self, rows: torch.Tensor, embedded: torch.Tensor, layer: Layer) -> torch.Tensor:
        stream = self.parts["hidden_norm"](rows) if self._norms_stream else rows
        made = layer(self._both(rows, embedded), stream)
        return super().leave(made) if self._norms_output else made

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._norms_output else super().leave(rows)


class OwnNetwork(_FusedNetwork):
    """Ours: hidden states are fused as in EAGLE-3, then state and embedding are mixed into the
    layer's stream as in EAGLE-1, so that its feed-forward part sees both at once. With a few
    minutes of training that learns faster than EAGLE-3's layer."""

    def transform(self, rows: torch.Tensor, embedded: torch.Tensor, layer: Layer) -> torch.Tensor:
        mixed = self.parts["mix"](self._both(rows, embedded))
        return layer(self.parts["input_norm"](mixed), mixed)


def tensor_shapes(shape: HeadShape) -> Shapes:
    """Every tensor of a head. The embedding stands before the hidden state in `mix`."""
    width = shape.layer.hidden_size
    products: Shapes = {
        "fuse.weight": (width, len(shape.layers) * width),
        "mix.weight": (width, 2 * width),
    }
    norms = {f"{norm}.weight": (width,) for norm in NORMS}
    return products | norms | shape.layer.shapes()


def settings_of(shape: HeadShape) -> dict[str, Any]:
    """As head.json holds them."""
    layer = asdict(shape.layer)
    del layer["input_size"]
    return {"layers": list(shape.layers), **layer, "rope_base": shape.rope_base}


def read_shape(settings: HeadSettings, sizes: TargetSizes) -> HeadShape:
    """The settings, checked. Raises ModelError."""
    layers, width = settings.values.get("layers"), settings.whole("hidden_size")
    known = (LAST, *range(sizes.num_layers))
    if not isinstance(layers, list) or not layers or any(i not in known for i in layers):
        raise settings.unfit(
            f"it reads the layers {layers!r} of a target that has {sizes.num_layers}"
        )
    if width != sizes.hidden_size:
        raise settings.unfit(f"its rows are {width} wide, the target's {sizes.hidden_size}")
    layer = LayerShape.own(settings, width)
    shape = HeadShape(layer, tuple(layers), settings.fraction("rope_base"))
    if unknown := sorted(settings.values.keys() - settings_of(shape).keys()):
        raise settings.unfit(f"its setting {unknown[0]} is not known")
    return shape


def third_layers(config: HeadSettings, sizes: TargetSizes) -> tuple[int, ...]:
    """Return the blocks whose output an EAGLE-3 reads: those its config names, else its authors'
    choice, the inputs of blocks 2, n / 2 and n - 3. Raises ModelError."""
    number = sizes.num_layers
    made_for = config.values.get("num_target_layers", number)
    if made_for != number:
        raise config.unfit(f"it was made for a target of {made_for} layers; this one has {number}")
    nested = config.values.get("eagle_config") or {}
    places = (nested if isinstance(nested, dict) else {}, config.values)
    found = (place.get(name) for place in places for name in (LAYER_IDS, "target_layer_ids"))
    named = next((each for each in found if each), None)
    layers = named or [1, number // 2 - 1, number - 4]
    if not isinstance(layers, list) or not all(type(i) is int and 0 <= i < number for i in layers):
        raise config.unfit(f"it reads the layers {layers} of a target that has {number} layers")
    return tuple(layers)
