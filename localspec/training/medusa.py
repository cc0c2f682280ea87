"""Trains Medusa heads: each predicts the target several places ahead, from one hidden state.

Contract: the trained weights are those of forward.heads.medusa, run by its own `head_states`. The
loss of head k is the cross-entropy with the target's distribution k places later, smaller for
later heads; the target's output head is shared and frozen. Weights start at zero, so that every
head first predicts what the target predicts next.
Source: Medusa-1 (arXiv 2401.10774, section 2.2), with the target's distribution as the labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes, read_head, write_head
from localspec.forward.heads.medusa import (
    KIND,
    MAX_HEADS,
    MAX_LAYERS,
    head_states,
    read_counts,
    shapes,
)
from localspec.training.recipe import fill, saved_weights, within
from localspec.training.target import Lesson, Teacher

NUM_HEADS, NUM_LAYERS = 4, 1
LOSS_DECAY = 0.8  # weight of a head's loss relative to the head before it


class MedusaWeights(nn.Module):
    """weight: [K, L, d, d]. bias: [K, L, d]."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int) -> None:
        super().__init__()
        wanted = shapes(num_heads, num_layers, hidden_size)
        self.weight = nn.Parameter(torch.zeros(wanted["weight"]))
        self.bias = nn.Parameter(torch.zeros(wanted["bias"]))


@dataclass(frozen=True)
class MedusaRecipe:
    """The heads while they are trained."""

    kind: str
    layers: tuple[int, ...]
    module: MedusaWeights
    sizes: TargetSizes

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        total, sum_of_shares = lesson.features[LAST].new_zeros(()), 0.0
        for ahead, states in self._states(lesson):
            weights = lesson.weights[:, ahead:]
            wanted = weights > 0
            with torch.no_grad():
                own = teacher.head(lesson.features[LAST][:, ahead:][wanted])  # [N, V]
                target = torch.softmax(own, dim=-1)
            logits = teacher.head(states[wanted])  # [N, V]
            losses = functional.cross_entropy(logits, target, reduction="none")  # [N]
            share, counted = LOSS_DECAY ** (ahead - 1), weights[wanted]
            total = total + share * (losses * counted).sum() / counted.sum().clamp_min(1e-6)
            sum_of_shares += share
        return total / max(sum_of_shares, 1e-6)

    @torch.no_grad()
    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        """As Recipe.acceptance. A position is tried only where the text agrees with all earlier
        draft tokens: elsewhere the target's choice was made after other tokens."""
        choice = teacher.head(lesson.features[LAST]).argmax(-1)  # [B, n], of tokens[:, 1:]
        follows = choice == lesson.tokens[:, 1:]
        alive, found = torch.ones_like(follows), list[tuple[float, float]]()
        for ahead, states in self._states(lesson):
            alive = alive[:, : states.shape[1]]
            tried = lesson.weights[:, ahead:] * alive
            hits = teacher.head(states).argmax(-1) == choice[:, ahead:]
            found.append((float((tried * hits).sum()), float(tried.sum())))
            alive = alive & hits & follows[:, ahead:]
        return found + [(0.0, 0.0)] * (self.module.weight.shape[0] - len(found))

    def save(self, folder: Path) -> None:
        num_heads, num_layers = self.module.weight.shape[:2]
        settings = {"num_heads": num_heads, "num_layers": num_layers}
        write_head(folder, KIND, self.sizes, settings, saved_weights(self.module))

    def _states(self, lesson: Lesson) -> Iterator[tuple[int, Tensor]]:
        """k and the output states [B, n - k, d] of each head k that the lesson is long enough for:
        row i predicts token i + 1 + k."""
        rows = lesson.features[LAST]
        batch, length, size = rows.shape
        states = head_states(self.module.weight, self.module.bias, rows.reshape(-1, size))
        for ahead, made in enumerate(states.view(-1, batch, length, size), 1):
            if ahead < length:
                yield ahead, made[:, : length - ahead]


def counts(options: dict[str, int]) -> tuple[int, int]:
    """Number of heads, and of layers in each. Raises ConfigError for more than can be read."""
    return (
        within("--num-heads", options.get("num_heads", NUM_HEADS), MAX_HEADS),
        within("--layers", options.get("num_layers", NUM_LAYERS), MAX_LAYERS),
    )


def num_weights(sizes: TargetSizes, options: dict[str, int]) -> int:
    return sum(map(math.prod, shapes(*counts(options), sizes.hidden_size).values()))


def make(teacher: Teacher, options: dict[str, int], seed: int) -> MedusaRecipe:
    """options: num_heads, num_layers. seed: unused, as the weights start at zero."""
    module = MedusaWeights(*counts(options), teacher.sizes.hidden_size)
    return MedusaRecipe(KIND, (LAST,), module, teacher.sizes)


def load(teacher: Teacher, folder: Path) -> MedusaRecipe:
    """Saved heads. Raises ModelError."""
    files = read_head(folder, KIND, teacher.sizes)
    read = read_counts(folder, files.settings, "num_heads", "num_layers")
    module = MedusaWeights(*read, teacher.sizes.hidden_size)
    fill(module, files, folder.name)
    return MedusaRecipe(KIND, (LAST,), module, teacher.sizes)
