"""Experts in the host's memory beside a model on a GPU, which does not hold them.

The rows of a layer travel to the processor, which computes their experts with its own kernels, and
the sums travel back. The host waits for the GPU in each such layer, so no graph holds its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from localspec.forward.block import Experts
from localspec.forward.router import no_copy
from localspec.weights.linear import Linear


@dataclass(frozen=True)
class HostExperts:
    """experts: on the processor, their router too. dtype: of the rows there."""

    experts: Experts
    dtype: torch.dtype
    reads_host = True

    @property
    def linears(self) -> tuple[Linear, ...]:
        """None: the model's own device holds no weights of them."""
        return ()

    def with_linears(self, change: Callable[[Linear], Linear]) -> HostExperts:
        """Raises ModelError: no copy of a mixture is made."""
        raise no_copy()

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mixed(rows, rows)

    def mixed(self, rows: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """See Mixture."""
        on_host = rows.to("cpu", self.dtype)
        read = on_host if routed is rows else routed.to("cpu", self.dtype)
        return self.experts.mixed(on_host, read).to(rows.device, rows.dtype)
