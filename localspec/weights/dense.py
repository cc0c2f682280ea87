"""Linear layers of full precision, each in the layout that is fastest on its device.

`dense_linear` lays a weight out for oneDNN's matrix kernels, which about halves the time of a step
and makes checking eight tokens cost little more than one. The kernels are private operators of
torch: each layer is compared with the plain product once, when it is packed, and stays plain where
they are missing or wrong. `dense` gives the weight back.

In fp32, which is what a processor without instructions for bf16 computes in, weights that were
published in bf16 or fp16 are kept in fp16, by FBGEMM's kernels: half the bytes of a step, and the
same sums within the rounding of fp32.

`tune` adds a plain copy of the weights for single rows where that is faster. Plain decoding is one
row a step and bound by the memory's bandwidth; checking a draft is several rows and wants the
packed layout. Which is faster for one row depends on the processor and on whether the model fits
its cache. So a pass of one row through all packed layers is timed in both layouts, which takes
about a second. CPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from localspec.weights.linear import (
    ROW_MULTIPLE,
    Linear,
    PlainLinear,
    as_module,
    bytes_of,
    taken,
)
from localspec.weights.nf4 import Nf4Embedding

PACKED_DTYPES = (torch.bfloat16, torch.float32)
TYPICAL_ROWS = 64  # what the layout is chosen for; for one row it would be slower at all widths
FP16_ROW_MULTIPLE = 3  # FBGEMM's kernels for one and two rows add up in another order
FP16_PROBED_ROWS = 63  # up to these it is measured which widths need no such rows
FP16_STEP = 2.0**-24  # between the least numbers of fp16
COMPARED_ROWS = 4096  # of a weight at once
MANY_ROWS = 9  # rows beside which a row's bits are measured
# Numbers of rows that may be enough. A single row in bf16 has other bits with some thread counts.
FEWEST_ROWS = {torch.bfloat16: (2,), torch.float32: (1, 2)}
TESTED_ROWS = (1, 5)  # one row and several take different kernels
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # relative, of the largest output

MARGIN = 1.05  # how much faster plain weights must be to be kept
TIMED_PASSES = 5
MOST_SECONDS = 2.0  # of timing one layout or format


class PackedLinear:
    """A weight in the layout of oneDNN's matrix kernels. CPU, bf16 and fp32. A sum of more than
    1,024 products is split at several rows, and not at one.

    fewest_rows: the number of rows from which on a row has the same bits, as `dense_linear` has
    measured it.
    single_row_weight: the plain weight as well, for one row at a time; None where memory or time
    are better without it (`tune`)."""

    reads_host = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        kernels: Any = torch.ops.mkldnn
        self.fewest_rows = ROW_MULTIPLE
        self._packed: torch.Tensor = kernels._reorder_linear_weight(
            weight.contiguous(), TYPICAL_ROWS
        )
        self._product: Any = kernels._linear_pointwise.default
        self._product_and_sum: Any = kernels._linear_pointwise.binary
        self.bias = bias
        self.single_row_weight: torch.Tensor | None = None
        self.in_features: int = weight.shape[1]
        self.dtype = weight.dtype
        self._packed_bytes = bytes_of(weight, bias)

    @property
    def has_invariant_rows(self) -> bool:
        return self.fewest_rows == 1

    @property
    def weight_bytes(self) -> int:
        return self._packed_bytes + bytes_of(self.single_row_weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.single_row_weight is not None and rows.shape[0] == 1:
            return _single_row(rows, self.single_row_weight, self.bias)
        made: torch.Tensor = self._product(rows, self._packed, self.bias, "none", [], "")
        return made

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.single_row_weight is not None and rows.shape[0] == 1:
            return _single_row(rows, self.single_row_weight, self.bias).add_(residual)
        made: torch.Tensor = self._product_and_sum(rows, residual, self._packed, self.bias, "add")
        return made

    def dense(self) -> nn.Linear:
        plain = self.single_row_weight
        return as_module(self._packed.to_dense() if plain is None else plain, self.bias)

    def of_outputs(self, places: torch.Tensor) -> Linear:
        """See Linear."""
        weight = self.dense().weight.detach()[places]
        layer = dense_linear(weight, taken(self.bias, places))
        if isinstance(layer, PackedLinear) and self.single_row_weight is not None:
            layer.single_row_weight = weight
        return layer


def _single_row(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product by torch's own vector kernel: it streams the plain weight at the speed of the
    memory, which oneDNN's matrix kernels do not."""
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(row, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)


class Fp16Linear:
    """Weights in fp16 for rows in fp32, which multiplies and adds in fp32. CPU.

    is_padded: rows are filled up to a width that gives them the same bits as every other such
    width (`_fp16_widths`)."""

    has_invariant_rows = True
    reads_host = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        kernels: Any = torch.ops.quantized
        self._packed: Any = kernels.linear_prepack_fp16(weight.contiguous(), bias)
        self._unpack: Any = kernels.linear_unpack_fp16.default
        self._product: Any = kernels.linear_dynamic_fp16.default
        self.is_padded = True
        self._widths = _fp16_widths(weight.shape[1])
        self.bias = bias
        self.weight_bytes = weight.numel() * torch.half.itemsize + bytes_of(bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        size = rows.shape[0]
        if self.is_padded:
            is_known = size < len(self._widths)
            missing = self._widths[size] - size if is_known else -size % FP16_ROW_MULTIPLE
            rows = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        made: torch.Tensor = self._product(rows, self._packed)
        return made[:size]

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(rows).add_(residual)

    def dense(self) -> nn.Linear:
        return as_module(self._unpack(self._packed)[0], self.bias)

    def of_outputs(self, places: torch.Tensor) -> Fp16Linear:
        """See Linear."""
        layer = Fp16Linear(self._unpack(self._packed)[0][places], taken(self.bias, places))
        layer.is_padded = self.is_padded
        return layer


def _suits_fp16(weight: torch.Tensor) -> bool:
    """Whether fp16 holds the weights: exactly, but for what is smaller than its least numbers."""
    if weight.dtype != torch.float32 or not _fp16_widths(weight.shape[1]):
        return False
    # In pieces, for a head is as large as ten layers. inf - inf is NaN, which is no smaller.
    pieces = torch.split(weight, COMPARED_ROWS)
    return all(bool((each - each.half()).abs().amax() <= FP16_STEP / 2) for each in pieces)


@cache
@torch.inference_mode()
def _fp16_widths(in_features: int) -> tuple[int, ...]:
    """For every number of rows, 0 to FP16_PROBED_ROWS, the least width from there on at which
    FBGEMM gives a row the bits of other widths. Empty where its kernels do not run here, or
    multiples of FP16_ROW_MULTIPLE are no such widths."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(2, FP16_PROBED_ROWS, in_features, generator=generator)
    kernels: Any = torch.ops.quantized
    try:
        packed = kernels.linear_prepack_fp16(weight, None)
        at_once = kernels.linear_dynamic_fp16(rows, packed)
        same = [
            torch.equal(kernels.linear_dynamic_fp16(rows[:n], packed), at_once[:n])
            for n in range(1, FP16_PROBED_ROWS + 1)
        ]
    except (RuntimeError, AttributeError, NotImplementedError):
        return ()
    if not all(same[FP16_ROW_MULTIPLE - 1 :: FP16_ROW_MULTIPLE]):
        return ()
    return tuple(same.index(True, max(n, 1) - 1) + 1 for n in range(FP16_PROBED_ROWS + 1))


def dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest form of a full-precision layer on its device that computes the same."""
    plain = PlainLinear(weight, bias)
    if weight.device.type != "cpu" or weight.dtype not in PACKED_DTYPES:
        return plain
    try:
        made = (Fp16Linear if _suits_fp16(weight) else PackedLinear)(weight, bias)
        is_right = all(_agree(made, plain, num_rows) for num_rows in TESTED_ROWS)
    except (RuntimeError, AttributeError, NotImplementedError):
        return plain  # kernels of another torch or another processor
    if is_right and isinstance(made, PackedLinear):
        made.fewest_rows = _measured_fewest_rows(made)
    return made if is_right else plain


@torch.inference_mode()
def _measured_fewest_rows(layer: PackedLinear) -> int:
    """Return the least of FEWEST_ROWS from which on a row has the bits that it has beside many."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(MANY_ROWS, layer.in_features, generator=generator).to(layer.dtype)
    whole = layer(rows)
    is_same = [
        torch.equal(layer(rows[:count]), whole[:count]) for count in range(1, ROW_MULTIPLE + 1)
    ]
    return next(
        (count for count in FEWEST_ROWS[layer.dtype] if all(is_same[count - 1 :])), ROW_MULTIPLE
    )


def fewest_rows(linears: Iterable[Linear]) -> int:
    """Return how many rows a forward on a processor needs, so that no layer gives a row other bits
    beside more of them."""
    return max((_fewest_rows_of(linear) for linear in linears), default=1)


def _fewest_rows_of(linear: Linear) -> int:
    if isinstance(linear, PackedLinear):
        return linear.fewest_rows
    return 1 if linear.has_invariant_rows else ROW_MULTIPLE


@torch.inference_mode()
def _agree(made: Linear, plain: PlainLinear, num_rows: int) -> bool:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, plain.weight.shape[1], generator=generator)
    rows = rows.to(plain.weight.dtype)
    wanted = plain(rows).float()  # [n, out]
    bound = TOLERANCE[rows.dtype] * float(wanted.abs().max()) + 1e-6
    alone = float((made(rows).float() - wanted).abs().max())
    residual = torch.ones_like(wanted).to(rows.dtype)
    added = float((made.add_to(rows, residual).float() - wanted - 1.0).abs().max())
    return alone <= bound and added <= 2.0 * bound + TOLERANCE[rows.dtype]  # NaN is refused too


# -- plain weights for single rows ----------------------------------------------------------


@torch.inference_mode()
def tune(
    linears: Sequence[Linear],
    embedding: torch.Tensor | Nf4Embedding,
    spare_bytes: int | None,
    clock: Callable[[], float] = perf_counter,
) -> bool:
    """The fastest layers for single rows, whatever their bits: keep plain weights for them if that
    is faster; returns whether it is.

    linears: all products of one step. embedding: [V, d]; an output head tied to it shares it.
    spare_bytes: memory that may be used, None for as much as is needed. clock: seconds."""
    layers = [each for each in linears if isinstance(each, PackedLinear)]
    for linear in linears:
        if isinstance(linear, Fp16Linear):
            linear.is_padded = False
    needed = sum(layer.weight_bytes for layer in layers)
    if not layers or (spare_bytes is not None and needed > spare_bytes):
        return False
    plain = [_plain(layer, embedding) for layer in layers]
    rows = [torch.ones(1, layer.in_features, dtype=layer.dtype) for layer in layers]
    packed_s = pass_seconds(layers, rows, clock)
    for layer, weight in zip(layers, plain, strict=True):
        layer.single_row_weight = weight
    is_faster = packed_s > MARGIN * pass_seconds(layers, rows, clock)
    if not is_faster:
        for layer in layers:
            layer.single_row_weight = None
    return is_faster


def _plain(layer: PackedLinear, embedding: torch.Tensor | Nf4Embedding) -> torch.Tensor:
    weight = layer.dense().weight.detach()  # [out, in]
    if isinstance(embedding, torch.Tensor) and torch.equal(weight, embedding):
        return embedding
    return weight


def pass_seconds(
    layers: Sequence[Callable[[torch.Tensor], object]],
    rows: Sequence[torch.Tensor],
    clock: Callable[[], float],
) -> float:
    """Median time of all layers on a row each. The first pass warms up and does not count."""
    times = list[float]()
    while len(times) < 2 or (len(times) <= TIMED_PASSES and sum(times) < MOST_SECONDS):
        started = clock()
        for layer, row in zip(layers, rows, strict=True):
            layer(row)
        times.append(clock() - started)
    return median(times[1:])
