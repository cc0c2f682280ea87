"""A quantised twin of a loaded model, over the very same KV cache.

Contract: `quantised_twin` gives a model that shares everything with its original but the linear
layers, and the bytes it holds of its own. `cheapest_format` says which format to make it in.
Both forwards have twins: the native decoder's keep its fused layers, the transformers path's is
a copy of the module.

Not here: the formats themselves (quantised), drafting with a twin (drafters.self_quant).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from localspec.errors import ModelError
from localspec.forward.decoder import Decoder
from localspec.forward.linear import Linear, ModuleLinear
from localspec.forward.model import CausalLM, LanguageModel
from localspec.forward.quantised import (
    MIN_QUANTISED_SHARE,
    Kind,
    KindChoice,
    cheapest_kind,
    layer_bytes,
    module_linears,
    quantised_bytes,
    quantised_copy,
    quantised_layer,
    suits,
)


@dataclass(frozen=True)
class Twin:
    """model: over its original's cache. weight_bytes: what it holds beside its original."""

    model: LanguageModel
    weight_bytes: int


def quantised_twin(model: LanguageModel, kind: Kind) -> Twin:
    """Quantise now. Raises ModelError where the format, the shapes or the device forbid it."""
    if isinstance(model, Decoder):
        return _decoder_twin(model, kind)
    module = _module_of(model)
    copied = quantised_copy(module, kind)
    return Twin(CausalLM(copied, model.cache), quantised_bytes(copied))


def cheapest_format(model: LanguageModel) -> KindChoice:
    """The format whose step is cheapest on this model's device. Raises ModelError."""
    if isinstance(model, Decoder):
        return cheapest_kind(lambda: _dense(model), model.device)
    module = _module_of(model)
    return cheapest_kind(lambda: module_linears(module), model.device)


def _decoder_twin(model: Decoder, kind: Kind) -> Twin:
    held = 0
    num_weights = num_quantised = 0

    def change(linear: Linear) -> Linear:
        nonlocal held, num_weights, num_quantised
        dense = linear.dense()
        if dense is None:  # quantised already: it stays as it is
            return linear
        num_weights += dense.weight.numel()
        if not suits(dense, kind):
            return linear
        num_quantised += dense.weight.numel()
        made = quantised_layer(dense, kind)
        held += layer_bytes(made)
        return ModuleLinear(made, layer_bytes(made))

    twin = model.with_linears(change)
    if num_quantised < MIN_QUANTISED_SHARE * max(1, num_weights):
        raise ModelError(
            f"Only {num_quantised / max(1, num_weights):.0%} of the layer weights could be "
            f"quantised to {kind}, so the copy would draft no faster than the model itself. Use "
            "another drafter."
        )
    return Twin(twin, held)


def _dense(model: Decoder) -> Iterator[nn.Linear]:
    for block in model.weights.blocks:
        for linear in block.linears:
            dense = linear.dense()
            if dense is not None:
                yield dense


def _module_of(model: LanguageModel) -> nn.Module:
    assert isinstance(model, CausalLM), "a model runs natively or on transformers"
    module: nn.Module = model.module
    return module
