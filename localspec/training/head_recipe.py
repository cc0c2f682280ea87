"""The recipe that all heads share: loss and held-out acceptance by draft position, and saving.

Contract: `states` computes the rows that the target's output head reads, [B, n, d] for each draft
position s (from 0): row i predicts token i + 2 as token s of a draft that starts at i - s, so the
first s rows belong to no draft. The loss is the cross-entropy with the target's distribution, the
target's embedding and output head are shared and frozen. `acceptance_by_position` is the measure of
draft models too.

Not here: how the rows are made (medusa; unrolled with eagle and mtp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes, write_head
from localspec.training.recipe import saved_weights
from localspec.training.target import Lesson, Teacher

States = Callable[[Teacher, Lesson, int], Sequence[Tensor]]


@dataclass(frozen=True)
class HeadRecipe:
    """A head while it is trained. settings: of head.json. num_steps: draft positions in the loss.
    num_judged: draft positions in the acceptance. decay: weight of a position in the loss relative
    to the one before."""

    kind: str
    layers: tuple[int, ...]
    module: nn.Module
    sizes: TargetSizes
    settings: Mapping[str, Any]
    states: States
    num_steps: int
    num_judged: int
    decay: float = 1.0

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        steps = self.states(teacher, lesson, self.num_steps)
        return loss_by_position(teacher, lesson, steps, self.decay)

    @torch.no_grad()
    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        choice = teacher.head(lesson.features[LAST]).argmax(-1)[:, 1:]  # [B, n - 1], of token i + 2
        steps = self.states(teacher, lesson, self.num_judged)
        hits = (teacher.head(rows[:, :-1]).argmax(-1) == choice for rows in steps)
        follows = choice == lesson.tokens[:, 2:]
        return acceptance_by_position(hits, follows, lesson.weights[:, 1:])

    def save(self, folder: Path) -> None:
        write_head(folder, self.kind, self.sizes, self.settings, saved_weights(self.module))


def loss_by_position(
    teacher: Teacher, lesson: Lesson, steps: Sequence[Tensor], decay: float
) -> Tensor:
    """Cross-entropy with the target's distribution, mean over the draft positions."""
    weights = lesson.weights[:, 1:]  # of token i + 2
    wanted = weights > 0
    with torch.no_grad():
        target = torch.softmax(teacher.head(lesson.features[LAST][:, 1:][wanted]), -1)  # [N, V]
    total, sum_of_shares = target.new_zeros(()), 0.0
    for step, rows in enumerate(steps):
        counted = weights.clone()
        counted[:, :step] = 0.0
        counted = counted[wanted]  # [N]
        logits = teacher.head(rows[:, :-1][wanted])  # [N, V]
        losses = functional.cross_entropy(logits, target, reduction="none")
        share = decay**step
        total = total + share * (losses * counted).sum() / counted.sum().clamp_min(1e-6)
        sum_of_shares += share
    return total / sum_of_shares


def acceptance_by_position(
    hits: Iterable[Tensor], follows: Tensor, weights: Tensor
) -> list[tuple[float, float]]:
    """As Recipe.acceptance, over [B, m] predicted places. hits: for each draft position, where its
    token is the target's choice. follows: where the text is the target's choice. A position is
    tried only where the text agrees with all earlier draft tokens: elsewhere the target's choice
    was made after other tokens."""
    alive, found = torch.ones_like(follows), list[tuple[float, float]]()
    for step, hit in enumerate(hits):
        alive[:, :step] = False
        tried = weights * alive
        found.append((float((tried * hit).sum()), float(tried.sum())))
        # A place without weight was not tried, so no draft continues from it.
        alive = functional.pad(((tried > 0) & hit & follows)[:, :-1], (1, 0))
    return found
