"""Convolutions along a block, before and after each part of a layer, as in DFlash2.

The taps of a row are a base of each number and a coefficient of each group of numbers, which a
product of the row gives. Rows before the block count as zero, so context is never convolved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from localspec.core.errors import ModelError
from localspec.forward.block import FeedForward
from localspec.forward.mixer import LayerAttend, Mixer, Swap, Table
from localspec.weights.linear import Linear


@dataclass(frozen=True)
class Convolution:
    """Of a part's input and of its output. base: [2, taps, d]. projection: [2 * taps * groups, d].
    group_size: numbers of a row that share a coefficient."""

    base: torch.Tensor
    projection: Linear
    group_size: int

    @property
    def weight_bytes(self) -> int:
        return self.base.nbytes + self.projection.weight_bytes

    def coefficients(self, rows: torch.Tensor) -> torch.Tensor:
        """Return those of both sides: [n, d] -> [n, 2 * taps * groups]."""
        return self.projection(rows)

    def __call__(self, rows: torch.Tensor, coefficients: torch.Tensor, side: int) -> torch.Tensor:
        """Return the rows of a part's input (side 0) or output (1), [n, d]. coefficients: of the
        part's input."""
        num_taps, width = self.base.shape[1:]
        taps = coefficients.view(rows.shape[0], 2, num_taps, -1)[:, side]  # [n, taps, groups]
        groups = taps.shape[-1]
        base = self.base[side].view(num_taps, groups, -1)
        result = torch.zeros_like(rows).view(rows.shape[0], groups, -1)
        for tap in range(num_taps):
            earlier = F.pad(rows, (0, 0, tap, 0))[: rows.shape[0]].view(result.shape)
            result = result + (base[tap] + taps[:, tap, :, None]) * earlier
        return result.reshape(rows.shape[0], width)


@dataclass(frozen=True)
class ConvolvedLinear:
    """The last product of a part; it reads rows with the coefficients behind them."""

    inner: Linear
    convolution: Convolution
    num_coefficients: int
    has_invariant_rows = False

    @property
    def weight_bytes(self) -> int:
        return self.inner.weight_bytes + self.convolution.weight_bytes

    @property
    def reads_host(self) -> bool:
        return self.inner.reads_host

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        parts = [rows.shape[1] - self.num_coefficients, self.num_coefficients]
        seen, coefficients = torch.split(rows, parts, dim=1)
        return self.convolution(self.inner(seen), coefficients, side=1)

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)

    def dense(self) -> nn.Linear | None:
        return None

    def of_outputs(self, places: torch.Tensor) -> Linear:
        raise ModelError("No copy of a drafter is made.")


@dataclass(frozen=True)
class ConvolvedMixer:
    """A mixer whose rows are convolved before and after it."""

    inner: Mixer
    convolution: Convolution
    output: ConvolvedLinear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.inner.linears, self.convolution.projection)

    @property
    def weight_bytes(self) -> int:
        return self.inner.weight_bytes + self.convolution.weight_bytes

    @property
    def kind(self) -> tuple[object, ...]:
        return self.inner.kind

    def with_linears(self, change: Callable[[Linear], Linear]) -> Mixer:
        raise ModelError("No copy of a drafter is made.")

    def mix(
        self, rows: torch.Tensor, tables: Sequence[Table], swapped: Swap, attend: LayerAttend
    ) -> torch.Tensor:
        """See Mixer."""
        coefficients = self.convolution.coefficients(rows)
        read = self.convolution(rows, coefficients, side=0)
        return torch.cat((self.inner.mix(read, tables, swapped, attend), coefficients), dim=1)


@dataclass(frozen=True)
class ConvolvedFeedForward:
    """A feed-forward part whose rows are convolved before and after it."""

    inner: FeedForward
    convolution: Convolution

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.inner.linears, self.convolution.projection)

    @property
    def reads_host(self) -> bool:
        return self.inner.reads_host

    def with_linears(self, change: Callable[[Linear], Linear]) -> FeedForward:
        raise ModelError("No copy of a drafter is made.")

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        coefficients = self.convolution.coefficients(rows)
        result = self.inner(self.convolution(rows, coefficients, side=0))
        return self.convolution(result, coefficients, side=1)

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)


def convolved_mixer(inner: Mixer, convolution: Convolution) -> Mixer:
    """Return a mixer with a convolution before and after it."""
    sides, num_taps, width = convolution.base.shape
    size = sides * num_taps * (width // convolution.group_size)
    return ConvolvedMixer(inner, convolution, ConvolvedLinear(inner.output, convolution, size))
