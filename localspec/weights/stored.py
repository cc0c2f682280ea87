"""Weights as files keep them, before a linear layer is made of them.

Each type is a matrix [out, in], `Dense` and `Mxfp4` also a stack of them: `dense` gives its values,
`rows` puts its outputs into another order, and `joined` puts several of one input below each other.
Nothing here computes a product. Source: QuantState and Int8Params of bitsandbytes 0.50 for `Nf4`
and `Int8`; Microscaling Formats 1.0 of the Open Compute Project for `Mxfp4`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from localspec.formats.stored import GROUP_SIZES
from localspec.weights.library import bitsandbytes

PIECE_VALUES = 2**22  # Values that are computed in fp32 at once, so that 16 MiB are in use.
INT8_STEPS = 127  # Steps of an 8-bit weight from zero to the largest weight of its output.
# Values of the 4 bits of MXFP4; bit 3 is the sign. Two weights share a byte, the lower half first.
FP4_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
MXFP4_BLOCK = 32  # Weights that share one scale.
INT4_ROWS = 64  # Outputs of a whole block in the layouts of the kernels for 4 bits in groups.


@dataclass(frozen=True, eq=False)
class Dense:
    """A tensor in full precision, of any number of axes."""

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype)

    def rows(self, order: torch.Tensor | slice | int) -> Dense:
        return Dense(self.values[order])

    def columns(self, order: torch.Tensor) -> Dense:
        """Return the matrix with its inputs in another order."""
        return Dense(self.values[:, order])


@dataclass(frozen=True, eq=False)
class Grouped:
    """A weight is value * scale + offset.

    values: [out, in] whole numbers. scales, offsets: [out, groups] fp32. bits: of a value.
    places: [in], the group of each input; None where groups follow one another."""

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bits: int
    places: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for parts that do not belong together."""
        (num_out, num_in), (num_rows, num_groups) = self.values.shape, self.scales.shape
        if num_rows != num_out or self.offsets.shape != self.scales.shape:
            raise ValueError(f"{num_rows} rows of scales for {num_out} of weights")
        if self.places is None:
            if num_groups < 1 or num_in % num_groups:
                raise ValueError(f"{num_groups} groups of {num_in} inputs")
        elif self.places.shape != (num_in,) or not bool(
            ((self.places >= 0) & (self.places < num_groups)).all()
        ):
            raise ValueError(f"inputs of other groups than the {num_groups} there are")

    @classmethod
    def with_zeros(
        cls,
        values: torch.Tensor,
        zeros: torch.Tensor,
        scales: torch.Tensor,
        bits: int,
        places: torch.Tensor | None = None,
    ) -> Grouped:
        """zeros: [out, groups], the number that stands for zero."""
        scales = scales.float()
        return cls(values, scales, -zeros.float() * scales, bits, places)

    @classmethod
    def rounded(cls, weight: torch.Tensor, group_size: int) -> Grouped:
        """Return 4-bit groups: the nearest of 16 even steps from the least to the largest weight of
        each group. weight: [out, in]."""
        parts = [_rounded(piece, group_size) for piece in _pieces(weight)]
        values, scales, least = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(values, scales, least, 4)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def is_kept(self) -> bool:
        """True if a kernel for 4 bits in groups takes it."""
        return self.bits == 4 and self.group_size in GROUP_SIZES and self._is_in_a_row()

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values, [out, in], computed in fp32."""
        result = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        step = max(1, PIECE_VALUES // self.shape[1])
        for start in range(0, self.shape[0], step):
            result[start : start + step] = self.rows(slice(start, start + step))._unpacked()
        return result

    def rows(self, order: torch.Tensor | slice) -> Grouped:
        parts = (self.values[order], self.scales[order], self.offsets[order])
        return Grouped(*parts, self.bits, self.places)

    def columns(self, order: torch.Tensor) -> Grouped:
        """Return the matrix with its inputs in another order. Groups that move as a whole still
        follow one another."""
        values, size = self.values[:, order], self.group_size
        groups = order[::size] // size
        if self.places is None and torch.equal(_whole(groups, size), order):
            return Grouped(values, self.scales[:, groups], self.offsets[:, groups], self.bits)
        places = torch.arange(self.shape[1]) // size if self.places is None else self.places
        return Grouped(values, self.scales, self.offsets, self.bits, places[order])

    def _unpacked(self) -> torch.Tensor:
        if self.places is None:  # in a tenth of the time that it takes to look up each scale
            groups = self.values.reshape(*self.scales.shape, self.group_size).float()
            return (groups * self.scales[..., None] + self.offsets[..., None]).flatten(1)
        places = self.places.long()
        return self.values.float() * self.scales[:, places] + self.offsets[:, places]

    def _is_in_a_row(self) -> bool:
        in_a_row = torch.arange(self.values.shape[1]) // self.group_size
        return self.places is None or torch.equal(self.places.long(), in_a_row)


def _whole(groups: torch.Tensor, size: int) -> torch.Tensor:
    """Return the inputs of whole groups, in the order of the groups."""
    return (groups[:, None] * size + torch.arange(size)).flatten()


@dataclass(frozen=True, eq=False)
class Nf4:
    """Weights of 4 bits by a table, as bitsandbytes packs them.

    packed: [out * in / 2, 1] uint8. scales: fp32, for each block of weights. kind: "nf4" or
    "fp4", the table."""

    packed: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, ...]
    block_size: int
    kind: str

    @classmethod
    def rounded(cls, weight: torch.Tensor, block_size: int) -> Nf4:
        """weight: [out, in], on the device that quantises it."""
        bitsandbytes()
        packed, scales = torch.ops.bitsandbytes.quantize_4bit.default(
            weight.contiguous(), block_size, "nf4", torch.uint8
        )
        return cls(packed, scales, tuple(weight.shape), block_size, "nf4")

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        bitsandbytes()
        unpack: Any = torch.ops.bitsandbytes.dequantize_4bit.default
        values: torch.Tensor = unpack(
            self.packed, self.scales, self.block_size, self.kind, self.shape, dtype
        )
        return values

    def rows(self, order: torch.Tensor | slice) -> Nf4:
        """Raise ValueError where a block of weights has parts of two rows."""
        num_out, num_in = self.shape
        if num_in % self.block_size:
            raise ValueError(f"blocks of {self.block_size} in rows of {num_in}")
        packed = self.packed.view(num_out, -1)[order]
        scales = self.scales.view(num_out, -1)[order]
        shape = (packed.shape[0], num_in)
        return replace(self, packed=packed.reshape(-1, 1), scales=scales.flatten(), shape=shape)

    def to(self, device: torch.device) -> Nf4:
        return replace(self, packed=self.packed.to(device), scales=self.scales.to(device))


@dataclass(frozen=True, eq=False)
class Int8:
    """Weights of LLM.int8: numbers [out, in] int8, and the largest weight of each output, [out]
    fp32. Source: arXiv 2208.07339."""

    numbers: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def rounded(cls, weight: torch.Tensor) -> Int8:
        """weight: [out, in], on the device that quantises it."""
        quantise: Any = bitsandbytes().functional.int8_vectorwise_quant
        numbers, largest, _ = quantise(weight.half().contiguous())  # as the library's layer does
        return cls(numbers, largest.float())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.numbers.float() * (self.largest / INT8_STEPS)[:, None]).to(dtype)

    def rows(self, order: torch.Tensor | slice) -> Int8:
        return Int8(self.numbers[order], self.largest[order])

    def to(self, device: torch.device) -> Int8:
        return Int8(self.numbers.to(device), self.largest.to(device))


@dataclass(frozen=True)
class Mxfp4Tables:
    """What bytes stand for: pairs, [256, 2], the weights of a byte; scales, [256, 1], powers of two
    by their exponent; values, [16] fp32, the weights of 4 bits."""

    pairs: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device, is_turned: bool = False) -> Mxfp4Tables:
        """is_turned: the first weight of a byte is in its upper half."""
        halves = [(byte & 15, byte >> 4)[:: -1 if is_turned else 1] for byte in range(256)]
        pairs = [[FP4_VALUES[half] for half in pair] for pair in halves]
        scales = [[2.0 ** (exponent - 127)] for exponent in range(255)] + [[float("nan")]]
        return cls(
            torch.tensor(pairs, dtype=dtype, device=device),
            torch.tensor(scales, dtype=dtype, device=device),
            torch.tensor(FP4_VALUES, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, eq=False)
class Mxfp4:
    """Weights of 4 bits by a table, each block of 32 along the inputs times a power of two.

    blocks: [..., out, in / 32, 16] uint8. scales: [..., out, in / 32] uint8, exponents + 127."""

    blocks: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        """Raise ValueError for parts that do not belong together."""
        if self.blocks.shape != (*self.scales.shape, MXFP4_BLOCK // 2):
            raise ValueError(f"scales {[*self.scales.shape]} of blocks {[*self.blocks.shape]}")
        if {self.blocks.dtype, self.scales.dtype} != {torch.uint8}:
            raise ValueError(f"blocks of {self.blocks.dtype}, scales of {self.scales.dtype}")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales.shape[:-1], self.scales.shape[-1] * MXFP4_BLOCK)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.unpacked(Mxfp4Tables.of(dtype, self.blocks.device))

    def unpacked(self, tables: Mxfp4Tables) -> torch.Tensor:
        """Return the values in the precision of the tables, exactly where it holds them."""
        values = F.embedding(self.blocks.int(), tables.pairs).flatten(-2)  # [..., in / 32, 32]
        return values.mul_(F.embedding(self.scales.int(), tables.scales)).flatten(-2)

    def rows(self, order: torch.Tensor | slice | int) -> Mxfp4:
        return Mxfp4(self.blocks[order], self.scales[order])

    def to(self, device: torch.device) -> Mxfp4:
        return Mxfp4(self.blocks.to(device), self.scales.to(device))


Weight = Dense | Grouped | Nf4 | Int8 | Mxfp4


def joined(weights: Sequence[Weight]) -> Weight | None:
    """Return weights of one input as one, their outputs in this order; None where their formats
    cannot be one."""
    first = weights[0]
    if len(weights) == 1:
        return first
    dense = [each for each in weights if isinstance(each, Dense)]
    if len(dense) == len(weights):
        return Dense(torch.cat([each.values for each in dense]))
    grouped = [each for each in weights if isinstance(each, Grouped)]
    if len(grouped) == len(weights):
        return _joined_groups(grouped)
    nf4 = [each for each in weights if isinstance(each, Nf4)]
    if len(nf4) == len(weights):
        return _joined_nf4(nf4)
    int8 = [each for each in weights if isinstance(each, Int8)]
    if len(int8) == len(weights):
        numbers, largest = ([each.numbers for each in int8], [each.largest for each in int8])
        return Int8(torch.cat(numbers), torch.cat(largest))
    mxfp4 = [each for each in weights if isinstance(each, Mxfp4)]
    if len(mxfp4) == len(weights):
        blocks, scales = ([each.blocks for each in mxfp4], [each.scales for each in mxfp4])
        return Mxfp4(torch.cat(blocks), torch.cat(scales))
    return None


def _joined_groups(weights: Sequence[Grouped]) -> Grouped | None:
    kinds = {(each.bits, each.group_size, each.places is None) for each in weights}
    if len(kinds) > 1 or any(each.shape[0] % INT4_ROWS for each in weights):
        return None
    if not all(each.is_kept for each in weights):
        return None
    values, scales, offsets = (
        torch.cat([getattr(each, part) for each in weights])
        for part in ("values", "scales", "offsets")
    )
    return Grouped(values, scales, offsets, weights[0].bits)


def _joined_nf4(weights: Sequence[Nf4]) -> Nf4 | None:
    """Blocks lie along the input: rows of several layers stand one after the other."""
    first = weights[0]
    kinds = {(each.kind, each.block_size, each.shape[1]) for each in weights}
    if len(kinds) > 1 or first.shape[1] % first.block_size:
        return None
    packed = torch.cat([each.packed for each in weights])
    scales = torch.cat([each.scales for each in weights])
    shape = (sum(each.shape[0] for each in weights), first.shape[1])
    return Nf4(packed, scales, shape, first.block_size, first.kind)


def _pieces(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(weight, max(1, PIECE_VALUES // weight.shape[1]))


def _rounded(
    weight: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales and the least weights of the groups of some rows."""
    groups = weight.float().view(weight.shape[0], -1, group_size)
    least, most = torch.aminmax(groups, dim=-1)
    scales = ((most - least) / 15).clamp(min=1e-9)
    values = (groups - least[..., None]).div_(scales[..., None]).round_().clamp_(0, 15)
    return values.flatten(1).to(torch.uint8), scales, least
