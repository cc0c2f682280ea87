"""A linear layer of 4 bits a weight in groups that share a scale.

It computes by torch's own kernel, on a processor or on a GPU that computes in bf16; the numbers are
kept exactly, scales and rows are rounded to bf16. `error` is measured against the dense weight, on
the device, when a layer is made. The kernel of a GPU is for few rows: for many the weight is
unpacked, UNPACKED_AT_ONCE values at a time, and multiplied by the library for matrices.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from localspec.formats.bitsandbytes_layers import UNPACKED_AT_ONCE
from localspec.weights.linear import FEW_ROWS, QuantisedLinear, bytes_of, taken
from localspec.weights.stored import INT4_ROWS, Grouped
from localspec.weights.tiles import (
    TILE,
    TILE_ROWS,
    TILES,
    nibble_order,
    rows_of_blocks,
    unpacked_numbers,
)

CPU = torch.device("cpu")
MIDDLE = 8  # the number that the kernels take for zero
MOST_REPACKING_ERROR = 0.05  # of a layer's output, by its norm: rounded scales are near 0.002
PACKED_AT_ONCE = 2**20  # numbers that are laid out at once, 4 bytes each


class Int4Linear(QuantisedLinear):
    """Rows of any precision, computed in bf16: in fp32 the kernel takes 20 to 40 times as long on a
    processor without AVX-512.

    packed: as the device's kernel reads it. scales_and_zeros: [groups, out, 2] bf16.
    error: how far its output lies from the dense layer's, by their norm, for a row of noise."""

    def __init__(
        self,
        packed: torch.Tensor,
        scales_and_zeros: torch.Tensor,
        in_features: int,
        bias: torch.Tensor | None,
    ) -> None:
        self.group_size = in_features // scales_and_zeros.shape[0]
        self.error = 0.0
        self.weight_bytes = bytes_of(packed, scales_and_zeros, bias)
        self.has_invariant_rows = packed.device.type == "cpu"
        self._packed, self._scales_and_zeros, self._bias = packed, scales_and_zeros, bias
        kernels: Any = torch.ops.aten
        on_card: Any = kernels._weight_int4pack_mm
        on_cpu: Any = kernels._weight_int4pack_mm_for_cpu
        self._kernel = on_cpu if self.has_invariant_rows else on_card
        self._unpacks = not self.has_invariant_rows

    @classmethod
    def of_weight(
        cls,
        weight: Grouped,
        bias: torch.Tensor | None,
        device: torch.device = CPU,
        is_measured: bool = True,
    ) -> Int4Linear:
        """is_measured: `error` is; else it is 0. Raises RuntimeError where the device has no kernel
        for it."""
        layer = cls(*packed_parts(weight, device), weight.shape[1], bias)
        layer.error = layer.measured(weight) if is_measured else 0.0
        return layer

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        is_wide = self._unpacks and rows.shape[0] > FEW_ROWS
        product = self._wide_product(rows) if is_wide else self._product(rows)
        return product if self._bias is None else product + self._bias

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        given = rows.bfloat16().contiguous()
        product: torch.Tensor = self._kernel(
            given, self._packed, self.group_size, self._scales_and_zeros
        )
        return product.to(rows.dtype)

    def _wide_product(self, rows: torch.Tensor) -> torch.Tensor:
        """The product with the unpacked weight, as many outputs at a time as fit the bound."""
        step = max(1, UNPACKED_AT_ONCE // (TILE_ROWS * rows.shape[1]))  # tiles
        parts = list[torch.Tensor]()
        for start in range(0, self._packed.shape[0], step):
            tiles = self._packed[start : start + step]
            outputs = slice(TILE_ROWS * start, TILE_ROWS * (start + tiles.shape[0]))
            scales_and_zeros = self._scales_and_zeros[:, outputs]
            weight = unpacked_values(tiles, scales_and_zeros, rows.dtype)
            parts.append(F.linear(rows, weight))
        return torch.cat(parts, -1)

    def of_outputs(self, places: torch.Tensor) -> Int4Linear:
        """See Linear."""
        num_in = self.group_size * self._scales_and_zeros.shape[0]
        num_rows = INT4_ROWS if self._packed.device.type == "cpu" else TILE_ROWS
        pack = partial(_packed, lowest=0, device=self._packed.device)
        numbers = rows_of_blocks(self._packed, places, (num_rows, num_in), pack)
        scales_and_zeros = self._scales_and_zeros[:, places]
        layer = Int4Linear(pack(numbers), scales_and_zeros, num_in, taken(self._bias, places))
        layer.error = self.error
        return layer

    @torch.inference_mode()
    def measured(self, weight: Grouped) -> float:
        """Return how far the layer's output lies off from that of `weight`, see `error`. On the
        host the dense weight is made in pieces."""
        noise = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0))
        step = max(1, PACKED_AT_ONCE // weight.shape[1])
        starts = range(0, weight.shape[0], step)
        pieces = (weight.rows(slice(start, start + step)).dense() for start in starts)
        wanted = torch.cat([noise @ piece.T for piece in pieces], -1)
        product = self._product(noise.to(self._packed.device)).cpu()
        return float((product - wanted).norm() / wanted.norm().clamp(min=1e-9))


def packed_parts(weight: Grouped, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed numbers, and the scales and zeros, as Int4Linear takes them."""
    lowest = 0 if int(weight.values.min()) >= 0 else -MIDDLE  # signed numbers are shifted
    # The kernel computes (number - MIDDLE) * scale + what a number of MIDDLE stands for.
    middles = (MIDDLE + lowest) * weight.scales + weight.offsets
    both = torch.stack((weight.scales, middles), -1)  # [out, groups, 2]
    scales_and_zeros = both.transpose(0, 1).contiguous().bfloat16().to(device)
    return _packed(weight.values, lowest, device), scales_and_zeros


def unpacked_values(
    packed: torch.Tensor, scales_and_zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight, [out, in], of tiles as a GPU holds them. scales_and_zeros: of these
    outputs, [groups, out, 2]."""
    numbers = unpacked_numbers(packed, _order_on(packed.device, _tiles_of(packed)))
    scales, middles = scales_and_zeros.transpose(0, 1).unbind(-1)
    groups = numbers.view(*scales.shape, -1).to(dtype).sub_(MIDDLE)  # in place, for it is large
    return groups.mul_(scales[..., None].to(dtype)).add_(middles[..., None].to(dtype)).flatten(1)


def _packed(values: torch.Tensor, lowest: int, device: torch.device) -> torch.Tensor:
    """values: [out, in]; less `lowest` they lie between 0 and 15. Laid out in pieces:
    the operators take numbers of 4 bytes."""
    step = max(1, PACKED_AT_ONCE // values.shape[1] // INT4_ROWS) * INT4_ROWS
    pieces = ((piece - lowest).int() for piece in torch.split(values, step))
    if device.type == "cpu":
        on_cpu: Any = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        return torch.cat([on_cpu(piece.contiguous(), 1) for piece in pieces])
    tiles = next(count for count in TILES if values.shape[1] % (count * TILE) == 0)
    return torch.cat([_packed_on_card(piece, device, tiles) for piece in pieces])


def _packed_on_card(numbers: torch.Tensor, device: torch.device, tiles: int) -> torch.Tensor:
    pack: Any = torch.ops.aten._convert_weight_to_int4pack
    packed: torch.Tensor = pack(pairs_of(numbers).to(device), tiles)
    return packed


def pairs_of(numbers: torch.Tensor) -> torch.Tensor:
    """Two in a byte, the first in its high half, [out, in / 2]. numbers: [out, in], 0 to 15."""
    return (numbers[:, ::2] << 4 | numbers[:, 1::2]).byte()


def _tiles_of(packed: torch.Tensor) -> int:
    """How many tiles of inputs a packed weight puts together."""
    return 2 * packed.shape[-1]


@cache
def _order_on(device: torch.device, tiles: int) -> torch.Tensor:
    pack = partial(_packed_on_card, device=device, tiles=tiles)
    return nibble_order(pack, (TILE_ROWS, TILE * tiles))


@cache
def has_kernel(device: torch.device) -> bool:
    """Return True if layers of 4 bits in groups can be computed here: on a GPU a small one is
    tried."""
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    noise = torch.randn(INT4_ROWS, 128, generator=torch.Generator().manual_seed(0))
    try:
        tried = Int4Linear.of_weight(Grouped.rounded(noise, 64), None, device)
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError):
        return False
    return tried.error <= MOST_REPACKING_ERROR  # NaN is not
