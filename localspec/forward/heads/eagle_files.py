"""Folders of EAGLE heads, our own and published ones, read into `HeadParts`.

A published folder holds the config of a model of one layer. With `hidden_norm` among its tensors it
is an EAGLE-3: hidden states of several layers, an output head of its own, mostly over a part of the
vocabulary (d2t: what to add to a draft id to get the target's). Otherwise it is an EAGLE-1 or 2,
which reads and predicts what the target's own head reads. An embedding or output head in the file
is used only where it differs from the target's. A config in the layout of speculators nests the
layer's, counts layers by their input and says which norms there are. In the layouts of SafeAILab
and DeepSpec the files say it: norms of queries and keys, and of what is read. The layer of
DeepSpec's EAGLE-3 for Gemma 4 is Gemma 4's (eagle_gemma).

Layouts as in SafeAILab/EAGLE model/cnets.py and cnets1.py, vllm-project/speculators models/eagle3
and deepseek-ai/DeepSpec modeling/eagle3; layer indices as vLLM and SGLang read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from localspec.core.errors import first_line
from localspec.formats.head_folder import PUBLISHED_CONFIG, architectures, is_published
from localspec.formats.rotation_settings import Incomplete, NotNative, rotation_of
from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import HeadParts, Network
from localspec.forward.heads.eagle import (
    KIND,
    LAYER_IDS,
    FirstNetwork,
    OwnNetwork,
    ThirdNetwork,
    read_shape,
    tensor_shapes,
    third_layers,
)
from localspec.forward.heads.eagle_gemma import read_gemma
from localspec.forward.heads.ends import embedding_of, output_of, output_of_target, target_ids
from localspec.forward.heads.files import (
    HeadSettings,
    TargetSizes,
    TensorLayout,
    published_tensors,
    read_head,
    read_published,
    take,
    take_published,
)
from localspec.forward.heads.layer import (
    DecoderLayer,
    LayerShape,
    llama_layout,
    packed_parts,
    require_whole_context,
)
from localspec.forward.model import LanguageModel
from localspec.forward.rotation import frequencies_of
from localspec.weights.dense import dense_linear

# What a Llama's rotation is where its config says nothing.
OF_A_LLAMA = {"rope_theta": 10000.0, "max_position_embeddings": 2048}
# Norms of what an EAGLE-3 reads, and the settings of speculators that say which it has.
READ_NORMS = {"input_norm.weight": "norm_before_fc", "fc_norm.0.weight": "fc_norm"}


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


# -- published heads ------------------------------------------------------------------------


def _published(folder: Path, target: LanguageModel) -> HeadParts:
    sizes, dtype = TargetSizes.of(target), target.embed([0]).dtype
    given = read_published(folder, KIND)
    if "Gemma4Eagle3Model" in architectures(given.values):
        return read_gemma(given, folder, target)
    config = _unnested(given)
    tensors = {_plain_name(name): tensor for name, tensor in published_tensors(folder).items()}
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    is_third = "hidden_norm.weight" in tensors
    layer = _layer_shape(config, sizes, is_third)
    require_whole_context(config, target.cache.shape.capacity)
    layers = third_layers(config, sizes) if is_third else (LAST,)
    draft_vocab_size = config.whole("draft_vocab_size", sizes.vocab_size)
    if is_third:
        layout = _third_layout(config, layer, len(layers), draft_vocab_size, tensors)
    else:
        tensors |= _missing_biases(tensors, layer)
        layout = _first_layout(layer, tensors)
    if "embed_tokens.weight" in tensors:
        layout["embedding"] = {"embed_tokens.weight": (sizes.vocab_size, sizes.hidden_size)}
    held = take_published(tensors, layout, folder.name, dtype, target.device)
    embed, embedding_bytes = embedding_of(held.pop("embedding", None), target)
    own_head = held.pop("output_head.weight", None)
    parts = packed_parts(held, layer.norm_epsilon)
    frequencies, rope_scale = _rotation(config, layer, target.device)
    network: Network = FirstNetwork(DecoderLayer(layer, parts), parts)
    output = output_of_target(target)
    if is_third:
        norms = (bool(config.values.get(n)) for n in ("norm_before_residual", "norm_output"))
        network = ThirdNetwork(DecoderLayer(layer, parts), parts, *norms)
        assert own_head is not None, "an EAGLE-3 has an output head"
        ids = target_ids(config, offsets, draft_vocab_size, target)
        output = output_of(dense_linear(own_head, None), ids, target)
    return HeadParts(
        layers=layers,
        network=network,
        output=output,
        embed=embed,
        frequencies=frequencies,
        rope_scale=rope_scale,
        dtype=dtype,
        body_bytes=embedding_bytes + sum(part.weight_bytes for part in parts.values()),
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
    own |= {name: bool(config.values.get(name)) for name in READ_NORMS.values()}
    if all(own[name] for name in READ_NORMS.values()):
        raise config.unfit(
            f"it says both {' and '.join(READ_NORMS.values())}, which exclude each other"
        )
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
    config: HeadSettings,
    layer: LayerShape,
    num_read: int,
    draft_vocab_size: int,
    tensors: Mapping[str, torch.Tensor],
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
        names = [name for parts in norms.values() for name in parts]
        # Where the config says it, a norm that is missing is an error.
        said = config.values.get(READ_NORMS.get(names[0], ""))
        if any(name in tensors for name in names) if said is None else said:
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
