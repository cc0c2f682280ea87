"""EAGLE: one decoder layer that continues from the target's hidden states.

Contract: `read_eagle` gives a head that fits the target. One of our own format shares the target's
embedding and output head. A published folder holds the config of a Llama of one layer. With
`hidden_norm` among its tensors it is an EAGLE-3: hidden states of several layers, an output head of
its own, mostly over a part of the vocabulary (d2t: what to add to a draft id to get the target's).
Otherwise it is an EAGLE-1 or 2, which reads and predicts what the target's own head reads. An
embedding or output head in the file is used only where it differs from the target's. A config in
the layout of speculators nests the layer's and counts layers by their input. Norms of queries and
keys (DeepSpec) and of what is read (EAGLE 3.1) are used where a file holds them.

Not here: running a head (autoregressive), which tokens are worth a row (drafters.eagle).
Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840). Layouts as in
SafeAILab/EAGLE model/cnets.py and cnets1.py, vllm-project/speculators models/eagle3 and
deepseek-ai/DeepSpec modeling/eagle3; layer indices as vLLM and SGLang read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from localspec.core.errors import first_line
from localspec.formats.rotation_settings import Incomplete, NotNative, rotation_of
from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import (
    HeadParts,
    HeadShape,
    Layer,
    Network,
    OutputHead,
)
from localspec.forward.heads.ends import embedding_of, output_of, target_ids
from localspec.forward.heads.files import (
    PUBLISHED_CONFIG,
    HeadSettings,
    Shapes,
    TargetSizes,
    TensorLayout,
    is_published,
    published_tensors,
    read_head,
    read_published,
    take,
    take_published,
)
from localspec.forward.heads.layer import (
    DecoderLayer,
    HeadLayer,
    LayerShape,
    RowFunction,
    llama_layout,
    packed_parts,
    require_whole_context,
)
from localspec.forward.model import LanguageModel
from localspec.forward.rotation import frequencies_of

KIND = "eagle"
# What a Llama's rotation is where its config says nothing.
OF_A_LLAMA = {"rope_theta": 10000.0, "max_position_embeddings": 2048}
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


def read_eagle(folder: Path, target: LanguageModel) -> HeadParts:
    """The head in `folder`, of our own format or a published one. Raises ModelError."""
    if is_published(folder):
        return _published(folder, target)
    sizes = TargetSizes.of(target)
    files = read_head(folder, KIND, sizes)
    shape = read_shape(files.settings, sizes)
    wanted, dtype = tensor_shapes(shape), target.embed([0]).dtype
    tensors = take(files.tensors, wanted, folder.name, dtype, target.device)
    return HeadParts.sharing(target, shape, OwnNetwork, tensors)


# -- our own format -------------------------------------------------------------------------


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


# -- published heads ------------------------------------------------------------------------


def _published(folder: Path, target: LanguageModel) -> HeadParts:
    sizes, dtype = TargetSizes.of(target), target.embed([0]).dtype
    config = _unnested(read_published(folder, KIND))
    tensors = {_plain_name(name): tensor for name, tensor in published_tensors(folder).items()}
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    is_third = "hidden_norm.weight" in tensors
    layer = _layer_shape(config, sizes, is_third)
    require_whole_context(config, target.cache.shape.capacity)
    layers = _third_layers(config, sizes) if is_third else (LAST,)
    draft_vocab_size = config.whole("draft_vocab_size", sizes.vocab_size)
    if is_third:
        layout = _third_layout(layer, len(layers), draft_vocab_size, tensors)
    else:
        tensors |= _missing_biases(tensors, layer)
        layout = _first_layout(layer, tensors)
    if "embed_tokens.weight" in tensors:
        layout["embedding"] = {"embed_tokens.weight": (sizes.vocab_size, sizes.hidden_size)}
    held = take_published(tensors, layout, folder.name, dtype, target.device)
    embed, own_bytes = embedding_of(held.pop("embedding", None), target)
    parts = packed_parts(held, layer.norm_epsilon)
    frequencies, rope_scale = _rotation(config, layer, target.device)
    network: Network = FirstNetwork(DecoderLayer(layer, parts), parts)
    output = OutputHead(target.head, target.vocab_size)
    if is_third:
        norms = (bool(config.values.get(n)) for n in ("norm_before_residual", "norm_output"))
        network = ThirdNetwork(DecoderLayer(layer, parts), parts, *norms)
        own = parts.pop("output_head")
        ids = target_ids(config, offsets, draft_vocab_size, target)
        output, head_bytes = output_of(own, ids, target)
        own_bytes += head_bytes
    return HeadParts(
        layers=layers,
        network=network,
        output=output,
        embed=embed,
        frequencies=frequencies,
        rope_scale=rope_scale,
        dtype=dtype,
        weight_bytes=own_bytes + sum(part.weight_bytes for part in parts.values()),
    )


def _unnested(config: HeadSettings) -> HeadSettings:
    """The settings of a head in the layout of speculators under the names of the others, its
    layers by their output; any other as it is. Raises ModelError."""
    if "speculators_model_type" not in config.values:
        return config
    from transformers import AutoConfig

    layer = config.values.get("transformer_layer_config")
    try:  # it leaves out what its family has as a default
        whole = AutoConfig.for_model(**{"model_type": "llama", **(layer or {})}).to_dict()
    except Exception as error:  # unknown values in transformers' code: any type is possible
        reason = f"{PUBLISHED_CONFIG} describes no layer ({first_line(error)})"
        raise config.unfit(reason) from error
    names = ("draft_vocab_size", "norm_before_residual", "norm_output", "target_hidden_size")
    own = {name: config.values[name] for name in names if config.values.get(name) is not None}
    ids = config.values.get(LAYER_IDS)
    if isinstance(ids, list):
        own[LAYER_IDS] = [i - 1 if type(i) is int else i for i in ids]
    return replace(config, values={**whole, **own})


def _plain_name(name: str) -> str:
    """Without the prefixes that differ between files: the one layer is called layers.0 or
    midlayer, and some files put `model.` before all."""
    for prefix in ("model.", "layers.0.", "midlayer."):
        name = name.removeprefix(prefix)
    return name


def _layer_shape(config: HeadSettings, sizes: TargetSizes, is_third: bool) -> LayerShape:
    """Raises ModelError for another target or an unknown variant."""
    config.require("num_hidden_layers", 1)
    if not is_third:
        config.require("norm_before_residual", False)
    width, vocab_size = config.whole("hidden_size"), config.whole("vocab_size")
    read = config.whole("target_hidden_size", width)
    if (width, read, vocab_size) != (sizes.hidden_size, sizes.hidden_size, sizes.vocab_size):
        raise config.unfit(
            f"it was made for a target {read} wide with {vocab_size} tokens; this one is "
            f"{sizes.hidden_size} wide with {sizes.vocab_size}"
        )
    return LayerShape.published(config, width, 2 * width if is_third else width)


def _third_layers(config: HeadSettings, sizes: TargetSizes) -> tuple[int, ...]:
    """The blocks whose output an EAGLE-3 reads: those its config names, else its authors' choice,
    the inputs of blocks 2, n / 2 and n - 3."""
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


def _first_layout(layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> TensorLayout:
    width = layer.hidden_size
    layout = llama_layout(layer, has_bias="self_attn.q_proj.bias" in tensors)
    layout["fuse.weight"] = {"fc.weight": (width, 2 * width)}
    if "fc.bias" in tensors:
        layout["fuse.bias"] = {"fc.bias": (width,)}
    return layout


def _missing_biases(
    tensors: Mapping[str, torch.Tensor], layer: LayerShape
) -> dict[str, torch.Tensor]:
    """Zeros for the biases that are missing of queries, keys and values, where any has one."""
    biases = llama_layout(layer, has_bias=True)["qkv.bias"]
    if not biases.keys() & tensors.keys():
        return {}
    return {name: torch.zeros(size) for name, size in biases.items() if name not in tensors}


def _third_layout(
    layer: LayerShape, num_read: int, draft_vocab_size: int, tensors: Mapping[str, torch.Tensor]
) -> TensorLayout:
    width = layer.hidden_size
    layout = llama_layout(layer, has_bias="self_attn.q_proj.bias" in tensors) | {
        "fuse.weight": {"fc.weight": (width, num_read * width)},
        "embedding_norm.weight": {"input_layernorm.weight": (width,)},
        "hidden_norm.weight": {"hidden_norm.weight": (width,)},
        "final_norm.weight": {"norm.weight": (width,)},
        "output_head.weight": {"lm_head.weight": (draft_vocab_size, width)},
    }
    optional: tuple[TensorLayout, ...] = (
        {
            f"{ours}_norm.weight": {f"self_attn.{theirs}_norm.weight": (layer.head_dim,)}
            for ours, theirs in {"query": "q", "key": "k"}.items()
        },
        {"read_norm.weight": {"input_norm.weight": (num_read * width,)}},
        {f"read_norm_{i}.weight": {f"fc_norm.{i}.weight": (width,)} for i in range(num_read)},
    )
    for norms in optional:
        if any(name in tensors for parts in norms.values() for name in parts):
            layout |= norms
    return layout


def _rotation(
    config: HeadSettings, layer: LayerShape, device: torch.device
) -> tuple[torch.Tensor, float]:
    """Frequencies [head_dim / 2] and scale. Raises ModelError."""
    names = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    given = {name: config.values[name] for name in names if config.values.get(name) is not None}
    try:
        rotation = rotation_of({**OF_A_LLAMA, **given}, layer.head_dim)
        frequencies, scale = frequencies_of(rotation)
    except (Incomplete, NotNative, TypeError, ValueError, LookupError) as error:
        reason = f"{PUBLISHED_CONFIG} describes no rotation that is known ({first_line(error)})"
        raise config.unfit(reason) from error
    return frequencies.to(device), scale
