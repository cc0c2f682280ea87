"""Trains Medusa heads: each predicts the target several places ahead, from one hidden state.

Contract: the trained weights are those of forward.heads.medusa, run by its own `head_states`; loss
and acceptance are those of `recipe`, with less weight for later heads. Weights start at zero, so
that every head first predicts what the target predicts next.
Source: Medusa-1 (arXiv 2401.10774, section 2.2), with the target's distribution as the labels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.forward.features import LAST
from localspec.forward.heads.files import HeadSettings, TargetSizes
from localspec.forward.heads.medusa import (
    KIND,
    MAX_HEADS,
    MAX_LAYERS,
    head_states,
    read_counts,
    shapes,
)
from localspec.training.recipe import HeadPlan, States, within
from localspec.training.target import TaughtBatch, Teacher

NUM_HEADS, NUM_LAYERS = 4, 1
LOSS_DECAY = 0.8


class MedusaWeights(nn.Module):
    """weight: [K, L, d, d]. bias: [K, L, d]."""

    def __init__(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(wanted["weight"]))
        self.bias = nn.Parameter(torch.zeros(wanted["bias"]))

    def states(self, teacher: Teacher, batch: TaughtBatch, num_steps: int) -> list[Tensor]:
        """The `states` of a HeadRecipe. Head s (from 0) predicts token i + 2 + s from row i, so its
        rows are moved s places later."""
        rows = batch.features[LAST]  # [B, n, d]
        made = head_states(self.weight, self.bias, rows.flatten(0, 1)).view(-1, *rows.shape)
        length = rows.shape[1]
        return [
            functional.pad(states[:, : max(0, length - step)], (0, 0, min(step, length), 0))
            for step, states in enumerate(made[:num_steps])
        ]


def plan(sizes: TargetSizes, options: Mapping[str, int]) -> HeadPlan:
    """options: num_heads, num_layers. Raises ConfigError for more than can be read."""
    num_heads = within("--num-heads", options.get("num_heads", NUM_HEADS), MAX_HEADS)
    num_layers = within("--layers", options.get("num_layers", NUM_LAYERS), MAX_LAYERS)
    return _plan(sizes, num_heads, num_layers)


def read_plan(settings: HeadSettings, sizes: TargetSizes) -> HeadPlan:
    """Raises ModelError."""
    return _plan(sizes, *read_counts(settings))


def _plan(sizes: TargetSizes, num_heads: int, num_layers: int) -> HeadPlan:
    wanted = shapes(num_heads, num_layers, sizes.hidden_size)

    def build(_: torch.Generator) -> tuple[nn.Module, States]:
        module = MedusaWeights(wanted)
        return module, module.states

    settings = {"num_heads": num_heads, "num_layers": num_layers}
    return HeadPlan(KIND, (LAST,), settings, wanted, build, num_heads, num_heads, LOSS_DECAY)
