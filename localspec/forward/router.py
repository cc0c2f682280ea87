"""Chooses the experts of a mixture for each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localspec.core.errors import ModelError
from localspec.weights.linear import Linear


@dataclass(frozen=True)
class Router:
    """Rates all experts and chooses `num_chosen` of them. is_normalised: whether the shares of a
    row add up to 1. scales: a factor of the share of each expert, [experts]."""

    linear: Linear
    num_chosen: int
    is_normalised: bool
    scales: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shares of the chosen experts in the precision of rows, and their numbers, both
        [n, num_chosen]. rows: [n, d]."""
        rated = torch.softmax(self.linear(rows), -1, torch.float32)
        shares, chosen = rated.topk(self.num_chosen)
        if self.is_normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        if self.scales is not None:
            shares = shares * self.scales[chosen]
        return shares.to(rows.dtype), chosen


def no_copy() -> ModelError:
    return ModelError(
        "A copy of a mixture would hold every expert, of which a token reads a few only: it would "
        "take the memory and save little time. A draft model would do."
    )
