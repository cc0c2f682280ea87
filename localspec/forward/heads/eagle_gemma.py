"""An EAGLE-3 head in DeepSpec's layout for Gemma 4, whose layer is the native decoder's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from localspec.formats.decoder_settings import DecoderSettings
from localspec.forward.builder import Builder
from localspec.forward.heads.autoregressive import HeadParts
from localspec.forward.heads.block_layout import OF_DRAFTERS, drafter_settings
from localspec.forward.heads.eagle import ThirdNetwork, third_layers
from localspec.forward.heads.ends import embedding_of, output_of
from localspec.forward.heads.files import HeadSettings, Shapes, TargetSizes, published_tensors, take
from localspec.forward.heads.layer import BlockLayer
from localspec.forward.model import LanguageModel
from localspec.forward.rotation import frequencies_of
from localspec.forward.tensor_names import TensorNames, qkv_sizes
from localspec.weights.precision import Precision
from localspec.weights.source import HeldTensors

EMBEDDING = "embed_tokens.weight"


def read_gemma(config: HeadSettings, folder: Path, target: LanguageModel) -> HeadParts:
    """Return the head in `folder`. Raises ModelError."""
    sizes, dtype = TargetSizes.of(target), target.embed([0]).dtype
    settings, layers = _settings(config, sizes), third_layers(config, sizes)
    tensors = {
        name.removeprefix("model."): each for name, each in published_tensors(folder).items()
    }
    names = _names(settings, len(layers), tensors, folder.name)
    held = take(tensors, names.shapes, folder.name, dtype, target.device)
    precision, capacity = Precision(dtype, target.device), target.cache.shape.capacity
    builder = Builder(settings, HeldTensors(held), names, precision, capacity)
    return _built(builder, settings, layers, held[EMBEDDING], target)


def _settings(config: HeadSettings, sizes: TargetSizes) -> DecoderSettings:
    """Return the settings of its layer. Raises ModelError for a head of another target."""
    config.require("num_hidden_layers", 1)
    settings = drafter_settings(config, str(config.values.get("model_type")), OF_DRAFTERS)
    made_for = (settings.hidden_size, settings.vocab_size)
    if made_for != (sizes.hidden_size, sizes.vocab_size):
        raise config.unfit(
            f"it was made for a target {settings.hidden_size} wide with {settings.vocab_size} "
            f"tokens; this one is {sizes.hidden_size} wide with {sizes.vocab_size}"
        )
    return settings


def _names(
    settings: DecoderSettings, num_read: int, tensors: Mapping[str, torch.Tensor], model: str
) -> TensorNames:
    """Return names and shapes of the tensors. num_read: layers of the target."""
    width, vocab_size = settings.hidden_size, settings.vocab_size
    others: Shapes = {
        "fc.weight": (width, num_read * width),
        "layers.0.hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (vocab_size, width),
        EMBEDDING: (vocab_size, width),
    }
    names = TensorNames.of_layers(settings, {name: name for name in tensors}, others, model)
    shapes = dict(names.shapes)
    for part in qkv_sizes(settings, 0):  # which read the embedding and the state side by side
        path = f"layers.0.self_attn.{part}.weight"
        shapes[path] = (shapes[path][0], 2 * width)
    return replace(names, shapes=shapes)


def _built(
    builder: Builder,
    settings: DecoderSettings,
    layers: tuple[int, ...],
    embedding: torch.Tensor,
    target: LanguageModel,
) -> HeadParts:
    """Return the head. layers: whose states it reads. embedding: of its files, [V, d]."""
    block = builder.block(0)
    assert block.attention_norm is not None, "this family has a norm before attention"
    own = {
        "hidden_norm": builder.norm("layers.0.hidden_norm"),
        "final_norm": builder.norm("norm"),
        "fuse": builder.product("fc"),
    }
    parts = {"embedding_norm": block.attention_norm, **own}  # that norm is counted with the block
    embed, embedding_bytes = embedding_of(embedding, target, settings.embedding_scale)
    frequencies, rope_scale = frequencies_of(settings.rotations[0])
    return HeadParts(
        layers=layers,
        network=ThirdNetwork(BlockLayer(block), parts, norms_stream=False, norms_output=False),
        output=output_of(builder.product("lm_head"), None, target, settings.logit_cap),
        embed=embed,
        frequencies=frequencies.to(target.device),
        rope_scale=rope_scale,
        dtype=embedding.dtype,
        body_bytes=embedding_bytes
        + block.weight_bytes
        + sum(part.weight_bytes for part in own.values()),
    )
