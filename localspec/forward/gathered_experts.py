"""A mixture on a GPU: the chosen experts are taken from stacks by index, without the host.

The experts of a row are one feed-forward part: their outputs of gate and up stand side by side, and
`down` sums over the inputs of all of them. Each row of a few is computed by itself, so every shape
is fixed, a graph can hold the step, and a row has the same bits whatever runs beside it. A prompt,
which no graph holds, goes through some experts at a time, as many as may be unpacked at once, each
with the rows that chose it: the host then waits once a layer, for the number of rows of each. With
shapes of fixed size every expert would compute every row, 32 times the work where 8 of 256 are
chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from localspec.forward.router import Router, no_copy
from localspec.weights.linear import FEW_ROWS, Linear
from localspec.weights.stacks import Stack


@dataclass(frozen=True)
class GatheredExperts:
    """gate_up, down: the products of all experts. activation: outputs of gate and up, [n, 2 f], to
    [n, f]. gate_up_bias, down_bias: [experts, 2 f] and [experts, d]."""

    router: Router
    gate_up: Stack
    down: Stack
    activation: Callable[[torch.Tensor], torch.Tensor]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    reads_host = False  # in steps, which graphs hold

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router.linear, self.gate_up, self.down)

    def with_linears(self, change: Callable[[Linear], Linear]) -> GatheredExperts:
        """Raises ModelError: no copy of a mixture is made."""
        raise no_copy()

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mixed(rows, rows)

    def mixed(self, rows: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """See Mixture."""
        shares, chosen = self.router(routed)
        if rows.shape[0] > FEW_ROWS:
            return self._by_experts(rows, shares, chosen)
        by_row = zip(torch.split(rows, 1), shares, chosen, strict=True)
        return torch.cat([self._one_row(row, share, experts) for row, share, experts in by_row])

    def _one_row(
        self, row: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """row: [1, d]. shares, experts: [k]. Returns [1, d]."""
        inner = self.gate_up.chosen(experts)(row).view(experts.shape[0], -1)  # [k, 2 f]
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias.index_select(0, experts)
        inner = self.activation(inner) * shares[:, None]
        result = self.down.chosen(experts)(inner.view(1, -1))
        if self.down_bias is not None:
            result = result + shares[None] @ self.down_bias.index_select(0, experts)
        return result

    def _by_experts(
        self, rows: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """As `mixed`: some experts at a time, those with the most rows first, each with as many
        rows as the first of them. A row's sum is in the order of its shares."""
        order = chosen.flatten().argsort(stable=True)
        numbers = torch.arange(self.gate_up.num_experts, device=rows.device)
        counts, experts = (chosen.view(-1, 1) == numbers).sum(0).sort(descending=True, stable=True)
        of_experts = torch.searchsorted(chosen.flatten()[order], experts)  # their first places
        outputs = rows.new_zeros(order.shape[0] + 1, rows.shape[1])  # the last takes what fills up
        step = min(self.gate_up.num_at_once, self.down.num_at_once)
        for start, most in enumerate(counts.tolist()):  # the host waits
            if most == 0 or start % step:
                continue
            some = slice(start, start + step)
            ranks = torch.arange(most, device=rows.device)
            is_filled = ranks < counts[some, None]  # [k, most]
            places = order[(of_experts[some, None] + ranks).clamp(max=order.shape[0] - 1)]
            made = self._products(rows[places // chosen.shape[1]], experts[some])
            at = places.where(is_filled, order.shape[0])
            outputs.index_copy_(0, at.flatten(), made.flatten(0, 1))
        by_row = outputs[:-1].view(*chosen.shape, -1)
        return (by_row * shares[..., None]).sum(1)

    def _products(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """What each of some experts makes of its own rows, [k, n, d]. rows: [k, n, d]."""
        inner = self.gate_up.products(rows, experts)
        if self.gate_up_bias is not None:
            inner = inner + self.gate_up_bias.index_select(0, experts)[:, None]
        result = self.down.products(self.activation(inner), experts)
        if self.down_bias is not None:
            result = result + self.down_bias.index_select(0, experts)[:, None]
        return result
