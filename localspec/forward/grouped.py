"""Weights of few bits in groups that share a scale, and a linear layer that keeps them.

Contract: `Grouped` is what a published layout stands for: whole numbers with a scale and an offset
for each group of inputs. `Int4Linear` keeps four of their bits and computes by torch's own
kernel, on a processor or on a GPU that computes in bf16; the numbers are kept exactly, scales and
rows are rounded to bf16. `error` is measured against the dense weight, on the device, when a layer
is made.

Not here: reading layouts (unpack), which layers of a copy are quantised (quantise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from localspec.formats.stored import GROUP_SIZES
from localspec.forward.layer_parts import joined_bias

CPU = torch.device("cpu")
MIDDLE = 8  # the number that the kernels take for zero
ROWS = 64  # whole blocks of outputs in the layouts of all processors and GPUs
TILE, TILES = 16, (8, 4, 2)  # inputs in a tile of the layout for GPUs; tiles that it puts together
MOST_REPACKING_ERROR = 0.05  # of a layer's output, by its norm: rounded scales are near 0.002


@dataclass(frozen=True)
class Grouped:
    """A weight is value * scale + offset. values: [out, in] whole numbers. scales, offsets:
    [out, groups] fp32. bits: of a value. places: [in], the group of each input; None where groups
    follow one another."""

    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bits: int
    places: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for parts that do not belong together."""
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
        """Of 4 bits: the nearest of 16 even steps from the least to the largest of each group.
        weight: [out, in]."""
        groups = weight.float().view(weight.shape[0], -1, group_size)
        least = groups.amin(-1)
        scales = ((groups.amax(-1) - least) / 15).clamp(min=1e-9)
        values = ((groups - least[..., None]) / scales[..., None]).round().clamp(0, 15)
        return cls(values.flatten(1).to(torch.uint8), scales, least, 4)

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def is_kept(self) -> bool:
        """Whether Int4Linear takes it."""
        in_a_row = self.places is None or torch.equal(self.places.long(), self._in_a_row())
        return self.bits == 4 and self.group_size in GROUP_SIZES and in_a_row

    def dense(self) -> torch.Tensor:
        """[out, in] fp32."""
        if self.places is None:  # in a tenth of the time that it takes to look up each scale
            groups = self.values.reshape(*self.scales.shape, self.group_size).float()
            return (groups * self.scales[..., None] + self.offsets[..., None]).flatten(1)
        places = self.places.long()
        made = self.values.float() * self.scales[:, places] + self.offsets[:, places]
        return made.contiguous()

    def rows(self, order: torch.Tensor | slice) -> Grouped:
        """With its outputs in another order."""
        parts = (self.values[order], self.scales[order], self.offsets[order])
        return Grouped(*parts, self.bits, self.places)

    def _in_a_row(self) -> torch.Tensor:
        return torch.arange(self.values.shape[1]) // self.group_size


class Int4Linear(nn.Module):
    """Rows of any precision, computed in bf16: in fp32 the kernel takes 20 to 40 times as long on a
    processor without AVX-512.

    packed: as the device's kernel reads it. scales_and_zeros: [groups, out, 2] bf16.
    error: how far its output lies from the dense layer's, by their norm, for a row of noise."""

    TENSORS = ("packed", "scales_and_zeros")

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor

    def __init__(
        self,
        packed: torch.Tensor,
        scales_and_zeros: torch.Tensor,
        in_features: int,
        bias: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, scales_and_zeros.shape[1]
        self.group_size = in_features // scales_and_zeros.shape[0]
        self.register_buffer("packed", packed)
        self.register_buffer("scales_and_zeros", scales_and_zeros)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.error = 0.0
        kernels: Any = torch.ops.aten
        self.has_invariant_rows = packed.device.type == "cpu"
        on_card: Any = kernels._weight_int4pack_mm
        on_cpu: Any = kernels._weight_int4pack_mm_for_cpu
        self._product = on_cpu if self.has_invariant_rows else on_card

    @classmethod
    def of_weight(
        cls, weight: Grouped, bias: torch.Tensor | None, device: torch.device = CPU
    ) -> Int4Linear:
        """Raises RuntimeError where the device has no kernel for it."""
        lowest = 0 if int(weight.values.min()) >= 0 else -MIDDLE  # signed numbers are shifted
        # The kernel computes (number - MIDDLE) * scale + what a number of MIDDLE stands for.
        middles = (MIDDLE + lowest) * weight.scales + weight.offsets
        both = torch.stack((weight.scales, middles), -1)  # [out, groups, 2]
        scales_and_zeros = both.transpose(0, 1).contiguous().bfloat16().to(device)
        packed = _packed((weight.values - lowest).int(), device)
        made = cls(packed, scales_and_zeros, weight.values.shape[1], bias)
        made.error = made._measured(weight)
        return made

    @classmethod
    def side_by_side(cls, layers: Sequence[Any]) -> Sequence[Any]:
        """Layers of one input as one, where their weights can stand one after the other."""
        sizes = {each.group_size if type(each) is cls else 0 for each in layers}
        if (
            len(layers) == 1
            or len(sizes) > 1
            or 0 in sizes
            or any(each.out_features % ROWS for each in layers)
        ):
            return layers
        packed = torch.cat([each.packed for each in layers])
        scales_and_zeros = torch.cat([each.scales_and_zeros for each in layers], 1)
        return [cls(packed, scales_and_zeros, layers[0].in_features, joined_bias(layers))]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, self.in_features).bfloat16().contiguous()
        made: torch.Tensor = self._product(
            flat, self.packed, self.group_size, self.scales_and_zeros
        )
        made = made.to(rows.dtype).view(*rows.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias

    @torch.inference_mode()
    def _measured(self, weight: Grouped) -> float:
        noise = torch.randn(1, self.in_features, generator=torch.Generator().manual_seed(0))
        wanted = noise @ weight.dense().T
        found = self(noise.to(self.packed.device)).cpu()
        found = found - (0.0 if self.bias is None else self.bias.cpu().float())
        return float((found - wanted).norm() / wanted.norm().clamp(min=1e-9))


def _packed(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """numbers: [out, in] from 0 to 15, on the host."""
    kernels: Any = torch.ops.aten
    if device.type == "cpu":
        made: torch.Tensor = kernels._convert_weight_to_int4pack_for_cpu(numbers.contiguous(), 1)
        return made
    tiles = next(count for count in TILES if numbers.shape[1] % (count * TILE) == 0)
    made = kernels._convert_weight_to_int4pack(pairs_of(numbers).to(device), tiles)
    return made


def pairs_of(numbers: torch.Tensor) -> torch.Tensor:
    """Two in a byte, the first in its high half, [out, in / 2]. numbers: [out, in], 0 to 15."""
    return (numbers[:, ::2] << 4 | numbers[:, 1::2]).byte()


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether layers of 4 bits in groups can be computed here: on a GPU a small one is tried."""
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    noise = torch.randn(ROWS, 2 * ROWS, generator=torch.Generator().manual_seed(0))
    try:
        tried = Int4Linear.of_weight(Grouped.rounded(noise, ROWS), None, device)
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError):
        return False
    return tried.error <= MOST_REPACKING_ERROR  # NaN is not
