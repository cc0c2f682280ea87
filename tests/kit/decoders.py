"""Decoders built natively of a transformers module's weights, without files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from localspec.formats.decoder_settings import DecoderSettings, settings_of
from localspec.forward.builder import build_weights
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.decoder_weights import Weights
from localspec.forward.tensor_names import TensorNames
from localspec.weights.linear import Linear, SideBySide
from localspec.weights.precision import Precision
from localspec.weights.source import WeightSource
from localspec.weights.stored import Dense, Weight


class TensorSource:
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def read(self, name: str) -> Weight:
        return Dense(self._tensors[name].detach())

    def entries(self, name: str) -> Iterator[Weight]:
        yield from (Dense(matrix) for matrix in self._tensors[name].detach())


def settings_of_module(module: Any) -> DecoderSettings:
    """Of the part that reads text. Raises NotNative."""
    text = module.config.get_text_config().to_dict()
    tied = module.config.to_dict().get("tie_word_embeddings")
    said = {} if tied is None else {"tie_word_embeddings": tied}
    return settings_of({**text, **said}, {**text, **said})


def decoder_of(
    module: Any,
    cache: KVCache,
    source: WeightSource | None = None,
    dtype: torch.dtype | None = None,
    quantises_ends: bool = False,
) -> Decoder:
    """A decoder with the weights of `module` over `cache`, on its device. source, dtype: of the
    weights, None for those of the module. Raises NotNative, ModelError."""
    precision = Precision(dtype or module.dtype, cache.device)
    weights = weights_of(module, precision, cache.shape.capacity, source, quantises_ends)
    return Decoder(weights, cache)


def weights_of(
    module: Any,
    precision: Precision,
    capacity: int,
    source: WeightSource | None = None,
    quantises_ends: bool = False,
) -> Weights:
    """The weights of `module` for contexts of `capacity`. Raises NotNative, ModelError."""
    settings, source = settings_of_module(module), source or TensorSource(module.state_dict())
    settings.require_length(capacity)
    names = TensorNames.of(settings, source.names, "a module")
    return build_weights(settings, source, names, precision, capacity, quantises_ends)


def layers_of(decoder: Decoder) -> list[Linear]:
    """The linear layers of its blocks, those that stand side by side one by one."""
    linears = (each for block in decoder.weights.blocks for each in block.linears)
    return [
        part
        for each in linears
        for part in (each.linears if isinstance(each, SideBySide) else (each,))
    ]
