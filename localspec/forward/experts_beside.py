"""A mixture of experts beside a dense part, over the same rows.

In Gemma 4 26B-A4B both parts have norms of their own before and after; the router reads the rows
under a third norm. In Qwen3.5-35B-A3B the dense part is an expert that every row goes through.
Source: Gemma 4, Qwen3.5, and the modelling files of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from localspec.forward.activations import sigmoid
from localspec.forward.block import FeedForward, Mixture, Norm
from localspec.weights.linear import Linear


@dataclass(frozen=True)
class Normed:
    """A part of a layer between two norms."""

    before: Norm
    after: Norm


@dataclass(frozen=True)
class ExpertsBeside:
    """The sum of both parts: [n, d] to [n, d], of rows without a norm. router_norm: of rows that
    the router reads, which are then multiplied by router_scale."""

    dense: FeedForward
    dense_norms: Normed
    experts: Mixture
    expert_norms: Normed
    router_norm: Norm
    router_scale: float

    @property
    def reads_host(self) -> bool:
        return self.experts.reads_host

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.dense.linears, *self.experts.linears)

    def with_linears(self, change: Callable[[Linear], Linear]) -> ExpertsBeside:
        """Raises ModelError: no copy of a mixture is made."""
        self.experts.with_linears(change)
        raise AssertionError("a mixture has refused")

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        dense = self.dense_norms.after(self.dense(self.dense_norms.before(rows)))
        routed = self.router_norm(rows) * self.router_scale
        mixed = self.experts.mixed(self.expert_norms.before(rows), routed)
        return dense + self.expert_norms.after(mixed)


@dataclass(frozen=True)
class SharedExpert:
    """Experts, and one that every row goes through, times the sigmoid of a gate. gate: [d] fp32; a
    row's sum with it does not depend on the other rows."""

    experts: Mixture
    shared: FeedForward
    gate: torch.Tensor

    @property
    def reads_host(self) -> bool:
        return self.experts.reads_host

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.experts.linears, *self.shared.linears)

    def with_linears(self, change: Callable[[Linear], Linear]) -> SharedExpert:
        """Raises ModelError: no copy of a mixture is made."""
        self.experts.with_linears(change)
        raise AssertionError("a mixture has refused")

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        opened = (rows * self.gate).sum(-1, keepdim=True)  # [n, 1]
        share = sigmoid(opened).to(rows.dtype)
        return self.experts(rows) + share * self.shared(rows)
