"""What every mixer is: the part of a block in which a token reads those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from localspec.weights.linear import Linear


def halves_swapped(rows: torch.Tensor) -> torch.Tensor:
    """(x1, x2) -> (x2, x1), of halves."""
    return torch.roll(rows, rows.shape[-1] // 2, -1)


def pairs_swapped(rows: torch.Tensor) -> torch.Tensor:
    """(x1, x2, x3, x4, ...) -> (x2, x1, x4, x3, ...)."""
    return rows.reshape(*rows.shape[:-1], -1, 2).flip(-1).flatten(-2)


# Cosines and sines of the positions of n rows, [n, 1, rotated] each.
Table = tuple[torch.Tensor, torch.Tensor]
Swap = Callable[[torch.Tensor], torch.Tensor]
# The attention of one layer: queries [n, heads, head_dim], keys then values
# [n, 2 * kv_heads, head_dim] -> [n, heads * head_dim].
LayerAttend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Mixer(Protocol):
    """The part of a block in which a token reads those before it: `Attention`, or a
    `forward.delta_net.DeltaNet`."""

    @property
    def output(self) -> Linear: ...

    @property
    def linears(self) -> tuple[Linear, ...]: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kind(self) -> tuple[object, ...]:
        """In what its kernels differ from those of other mixers with linear layers like its."""
        ...

    def with_linears(self, change: Callable[[Linear], Linear]) -> Mixer: ...

    def mix(
        self, rows: torch.Tensor, tables: Sequence[Table], swapped: Swap, attend: LayerAttend
    ) -> torch.Tensor: ...
