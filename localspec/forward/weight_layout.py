"""Whether single rows are better served by a second, plain copy of the weights. By trying.

Contract: `tune` times a pass of one row through all packed layers of a decoder in either form, as
a step would meet them, and keeps plain copies where that pass is clearly faster and the memory is
there. CPU only; a second or so.

Plain decoding is one row a step and lives off the memory's bandwidth; checking a draft is several
rows and wants the packed layout. Which wins for one row depends on the processor and on whether
the model fits its cache.

Not here: the products (linear).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch

from localspec.forward.decoder import Decoder
from localspec.forward.linear import PackedLinear

MARGIN = 1.05
PASSES = 5
MOST_SECONDS = 2.0  # for either form


@torch.inference_mode()
def tune(
    decoder: Decoder, spare_bytes: int | None, clock: Callable[[], float] = perf_counter
) -> bool:
    """Keep plain weights for single rows if that pays; whether it did. spare_bytes: memory that
    may be used for them, None for as much as they need. clock: seconds, monotonic."""
    layers = [each for each in decoder.linears() if isinstance(each, PackedLinear)]
    needed = sum(layer.weight_bytes for layer in layers)
    if not layers or (spare_bytes is not None and needed > spare_bytes):
        return False
    plain = [_plain(layer, decoder) for layer in layers]
    packed_s = _pass_seconds(layers, clock)
    _keep(layers, plain)
    pays = packed_s > MARGIN * _pass_seconds(layers, clock)
    if not pays:
        _keep(layers, [None] * len(layers))
    return pays


def _plain(layer: PackedLinear, decoder: Decoder) -> torch.Tensor:
    """The layer's weight as [out, in]; an output head tied to the embedding shares its table."""
    weight: torch.Tensor = layer.dense().weight
    table = decoder.weights.embedding
    if layer is decoder.weights.head and torch.equal(weight, table):
        return table
    return weight.detach()


def _keep(layers: Sequence[PackedLinear], plain: Sequence[torch.Tensor | None]) -> None:
    for layer, weight in zip(layers, plain, strict=True):
        layer.rows_alone = weight


def _pass_seconds(layers: Sequence[PackedLinear], clock: Callable[[], float]) -> float:
    sizes = {layer.in_features for layer in layers}
    rows = {size: torch.ones(1, size, dtype=layers[0].dtype) for size in sizes}
    times, begun = list[float](), clock()
    for _ in range(PASSES + 1):  # the first warms up
        started = clock()
        for layer in layers:
            layer(rows[layer.in_features])
        times.append(clock() - started)
        if clock() - begun > MOST_SECONDS and len(times) > 1:
            break
    return median(times[1:])
