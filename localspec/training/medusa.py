"""Trains Medusa heads: each predicts the target several places ahead, from one hidden state.

Contract: the trained weights are those of forward.heads.medusa, run by its own `head_states`; loss
and acceptance are those of `head_recipe`, with less weight for later heads. Weights start at zero,
so that every head first predicts what the target predicts next.
Source: Medusa-1 (arXiv 2401.10774, section 2.2), with the target's distribution as the labels.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes, read_head
from localspec.forward.heads.medusa import (
    KIND,
    MAX_HEADS,
    MAX_LAYERS,
    head_states,
    read_counts,
    shapes,
)
from localspec.training.head_recipe import HeadRecipe
from localspec.training.recipe import fill, within
from localspec.training.target import Lesson, Teacher

NUM_HEADS, NUM_LAYERS = 4, 1
LOSS_DECAY = 0.8


class MedusaWeights(nn.Module):
    """weight: [K, L, d, d]. bias: [K, L, d]."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        wanted = shapes(num_heads, num_layers, hidden_size)
        self.weight = nn.Parameter(torch.zeros(wanted["weight"]))
        self.bias = nn.Parameter(torch.zeros(wanted["bias"]))

    def states(self, teacher: Teacher, lesson: Lesson, num_steps: int) -> list[Tensor]:
        """The `states` of a HeadRecipe. Head s (from 0) predicts token i + 2 + s from row i, so its
        rows are moved s places later."""
        rows = lesson.features[LAST]  # [B, n, d]
        made = head_states(self.weight, self.bias, rows.flatten(0, 1)).view(-1, *rows.shape)
        length = rows.shape[1]
        return [
            functional.pad(states[:, : max(0, length - step)], (0, 0, min(step, length), 0))
            for step, states in enumerate(made[:num_steps])
        ]


def counts(options: dict[str, int]) -> tuple[int, int]:
    """Number of heads, and of layers in each. Raises ConfigError for more than can be read."""
    return (
        within("--num-heads", options.get("num_heads", NUM_HEADS), MAX_HEADS),
        within("--layers", options.get("num_layers", NUM_LAYERS), MAX_LAYERS),
    )


def num_weights(sizes: TargetSizes, options: dict[str, int]) -> int:
    return sum(map(math.prod, shapes(*counts(options), sizes.hidden_size).values()))


def make(teacher: Teacher, options: dict[str, int], seed: int) -> HeadRecipe:
    """options: num_heads, num_layers. seed: unused, as the weights start at zero."""
    return _recipe(teacher.sizes, *counts(options))


def load(teacher: Teacher, folder: Path) -> HeadRecipe:
    """Saved heads. Raises ModelError."""
    files = read_head(folder, KIND, teacher.sizes)
    recipe = _recipe(teacher.sizes, *read_counts(folder, files.settings, "num_heads", "num_layers"))
    fill(recipe.module, files, folder.name)
    return recipe


def _recipe(sizes: TargetSizes, num_heads: int, num_layers: int) -> HeadRecipe:
    module = MedusaWeights(num_heads, num_layers, sizes.hidden_size)
    settings = {"num_heads": num_heads, "num_layers": num_layers}
    return HeadRecipe(
        KIND,
        (LAST,),
        module,
        sizes,
        settings,
        module.states,
        num_steps=num_heads,
        num_judged=num_heads,
        decay=LOSS_DECAY,
    )
