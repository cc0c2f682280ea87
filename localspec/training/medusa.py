"""Teach Medusa heads to predict the target several places ahead, from one state.

Contract: the trained weights are those of forward.heads.medusa and are run by its `head_states`.
Head k's loss is the cross-entropy with the target's own distribution k places later, less for
heads further ahead; the target's output head is shared and frozen. Weights start at zero: every
head then says what the target says next, and moves away from there.

Not here: the loop, where lessons come from (frame, collect).
Source: Medusa-1 (arXiv 2401.10774, section 2.2), with the target's distribution for its tokens.
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
from localspec.training.recipe import Lesson, Teacher, fill, halved
from localspec.training.shape import within

NUM_HEADS, NUM_LAYERS = 4, 1
FADING = 0.8  # of the loss, from one head to the next


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

    @property
    def num_heads(self) -> int:
        return self.module.weight.shape[0]

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        total, weighed = lesson.features[LAST].new_zeros(()), 0.0
        for ahead, states in self._states(lesson):
            weights = lesson.weights[:, ahead:]
            wanted = weights > 0
            with torch.no_grad():
                said = teacher.head(lesson.features[LAST][:, ahead:][wanted])  # [N, V]
                target = torch.softmax(said, dim=-1)
            logits = teacher.head(states[wanted])  # [N, V]
            missed = functional.cross_entropy(logits, target, reduction="none")  # [N]
            share = FADING ** (ahead - 1)
            counted = weights[wanted]
            total = total + share * (missed * counted).sum() / counted.sum().clamp_min(1e-6)
            weighed += share
        return total / max(weighed, 1e-6)

    @torch.no_grad()
    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        """A guess is tried where the text follows all earlier ones: elsewhere the target's
        choice, made after the text, would not be the choice after them."""
        choice = teacher.head(lesson.features[LAST]).argmax(-1)  # [B, n], of tokens[:, 1:]
        follows = choice == lesson.tokens[:, 1:]
        alive, found = torch.ones_like(follows), list[tuple[float, float]]()
        for ahead, states in self._states(lesson):
            alive = alive[:, : states.shape[1]]
            tried = lesson.weights[:, ahead:] * alive
            hits = teacher.head(states).argmax(-1) == choice[:, ahead:]
            found.append((float((tried * hits).sum()), float(tried.sum())))
            alive = alive & hits & follows[:, ahead:]
        return found + [(0.0, 0.0)] * (self.num_heads - len(found))

    def save(self, folder: Path) -> None:
        num_heads, num_layers = self.module.weight.shape[:2]
        settings = {"num_heads": num_heads, "num_layers": num_layers}
        write_head(folder, KIND, self.sizes, settings, halved(self.module))

    def _states(self, lesson: Lesson) -> Iterator[tuple[int, Tensor]]:
        """For each head k that the lesson is long enough for, k and its output states
        [B, n - k, d]: row i predicts token i + 1 + k."""
        rows = lesson.features[LAST]
        batch, length, size = rows.shape
        states = head_states(self.module.weight, self.module.bias, rows.reshape(-1, size))
        for ahead, made in enumerate(states.view(-1, batch, length, size), 1):
            if ahead < length:
                yield ahead, made[:, : length - ahead]


def counts(options: dict[str, int]) -> tuple[int, int]:
    """How many heads, of how many layers each. Raises ConfigError for more than can be read."""
    return (
        within("--heads", options.get("num_heads", NUM_HEADS), MAX_HEADS),
        within("--layers", options.get("num_layers", NUM_LAYERS), MAX_LAYERS),
    )


def num_weights(sizes: TargetSizes, options: dict[str, int]) -> int:
    """See recipe.num_weights."""
    return sum(map(math.prod, shapes(*counts(options), sizes.hidden_size).values()))


def make(teacher: Teacher, options: dict[str, int], seed: int) -> MedusaRecipe:
    """options: num_heads, num_layers. Nothing is drawn: the weights start at zero."""
    module = MedusaWeights(*counts(options), teacher.sizes.hidden_size)
    return MedusaRecipe(KIND, (LAST,), module, teacher.sizes)


def loaded(teacher: Teacher, folder: Path) -> MedusaRecipe:
    """Heads as they were saved. Raises ModelError."""
    files = read_head(folder, KIND, teacher.sizes)
    counts = read_counts(folder, files.settings, "num_heads", "num_layers")
    module = MedusaWeights(*counts, teacher.sizes.hidden_size)
    fill(module, files, folder.name)
    return MedusaRecipe(KIND, (LAST,), module, teacher.sizes)
