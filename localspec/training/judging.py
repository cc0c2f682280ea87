"""What held-out answers say of a head's weights.

Contract: pure measurement, a forward's worth of rows at a time; the weights and the target stay as
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from localspec.training.recipe import Recipe
from localspec.training.rows import Row, filled, make_batches
from localspec.training.target import Target


@dataclass(frozen=True)
class Judgement:
    """What held-out answers say. acceptance: chance of each draft position, given that all before
    it were accepted; loss: the mean."""

    acceptance: tuple[float, ...]
    loss: float

    @property
    def expected_tokens(self) -> float:
        """Of a round with every position drafted."""
        total, survives = 1.0, 1.0
        for rate in self.acceptance:
            survives *= rate
            total += survives
        return total

    @property
    def rank(self) -> tuple[float, float]:
        return (round(self.expected_tokens, 4), -self.loss)


@torch.no_grad()
def held_out(recipe: Recipe, target: Target, rows: Sequence[Row], tokens_at_once: int) -> Judgement:
    """Loss and acceptance over rows, by weight."""
    teacher, loss, weight, sums = target.teacher(), 0.0, 0.0, list[list[float]]()
    for part in make_batches(rows, tokens_at_once, Random(0)):
        lesson = target.lesson(filled(part), recipe.layers)
        part_weight = float(lesson.weights.sum())
        loss += float(recipe.loss(teacher, lesson)) * part_weight
        weight += part_weight
        for place, (accepted, tried) in enumerate(recipe.acceptance(teacher, lesson)):
            if place == len(sums):
                sums.append([0.0, 0.0])
            sums[place][0] += accepted
            sums[place][1] += tried
    rates = tuple(accepted / tried if tried > 0.0 else 0.0 for accepted, tried in sums)
    return Judgement(rates, loss / max(weight, 1e-6))


def judgement_from(row: dict[str, Any]) -> Judgement:
    """From the plain data of a checkpoint."""
    return Judgement(tuple(row["acceptance"]), float(row["loss"]))
