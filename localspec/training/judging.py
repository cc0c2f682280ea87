"""What held-out answers say of a draft or a head, and of those that are already in use.

Contract: pure measurement; weights and target stay as they are. A new result is compared with its
rivals, what drafts already, on the same held-out rows. A rival that no chat could use does not
count; one that could not be measured and may be in use stays, so that nothing in use is replaced
without a comparison.

Not here: which folders are rivals and where the new result goes (run), whether it is offered
(registration).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from localspec.core.errors import LocalspecError, MemoryShortage, ModelError
from localspec.core.speculation import expected_tokens
from localspec.formats.fingerprint import require_trained_for
from localspec.formats.head_folder import is_published
from localspec.loading.fitting import refuse_shortage
from localspec.loading.placement import Place
from localspec.training.draft import DraftRecipe, load_draft
from localspec.training.recipe import Recipe, load_recipe
from localspec.training.rows import TokenRow, make_batches
from localspec.training.target import Target

DIGITS = 4  # of expected tokens a round; finer differences are rounding


@dataclass(frozen=True)
class Judgement:
    """acceptance: of each draft position, given that all before it were accepted. loss: the
    mean."""

    acceptance: tuple[float, ...]
    loss: float

    @classmethod
    def of(cls, row: dict[str, Any]) -> Judgement:
        """From the plain data of a checkpoint."""
        return cls(tuple(row["acceptance"]), float(row["loss"]))

    @property
    def expected_tokens(self) -> float:
        """Of a round with every position drafted."""
        return expected_tokens(self.acceptance, len(self.acceptance))

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is better: the expected tokens, then the loss."""
        return (round(self.expected_tokens, DIGITS), -self.loss)


@torch.no_grad()
def judge(
    recipe: Recipe, target: Target, rows: Sequence[TokenRow], tokens_at_once: int
) -> Judgement:
    """Loss and acceptance over rows, by weight."""
    recipe.module.eval()
    teacher, loss, weight, sums = target.teacher(), 0.0, 0.0, list[list[float]]()
    for part in make_batches(rows, tokens_at_once, Random(0)):
        batch = target.taught(part, recipe.layers)
        part_weight = float(batch.weights.sum())
        loss += float(recipe.loss(teacher, batch)) * part_weight
        weight += part_weight
        for place, (accepted, tried) in enumerate(recipe.acceptance(teacher, batch)):
            if place == len(sums):
                sums.append([0.0, 0.0])
            sums[place][0] += accepted
            sums[place][1] += tried
    rates = tuple(accepted / tried if tried > 0.0 else 0.0 for accepted, tried in sums)
    return Judgement(rates, loss / max(weight, 1e-6))


@dataclass(frozen=True)
class Rival:
    """judgement: None where it could not be measured, with why in reason. is_usable: whether a
    chat may draft with it."""

    folder: Path
    judgement: Judgement | None
    reason: str = ""
    is_usable: bool = True

    def stays_before(self, other: Judgement) -> bool:
        """Whether it is better than the other, or may be."""
        if self.judgement is None:
            return self.is_usable
        return self.judgement.rank[0] > other.rank[0]

    def as_dict(self) -> dict[str, Any]:
        acceptance = None if self.judgement is None else self.judgement.acceptance
        return {"folder": str(self.folder), "acceptance": acceptance, "reason": self.reason}


def judge_rival(
    kind: str,
    folder: Path,
    target: Target,
    place: Place,
    measure: Callable[[Recipe], Judgement],
) -> Rival:
    """Measure the draft or head in a folder, with the target loaded at `place`."""
    if kind != "draft" and is_published(folder):
        return Rival(folder, None, "Training does not read its format.")
    try:
        if kind == "draft":
            refuse_shortage(folder, replace(place, bits=None, dtype=torch.float32))
        return Rival(folder, measure(_load(kind, folder, target)))
    except (MemoryShortage, RuntimeError, MemoryError) as error:
        return Rival(folder, None, str(error).splitlines()[0] if str(error) else "No memory.")
    except LocalspecError as error:
        return Rival(folder, None, str(error), is_usable=not isinstance(error, ModelError))


def _load(kind: str, folder: Path, target: Target) -> Recipe:
    """Raises ModelError, MemoryShortage."""
    if kind == "draft":
        return DraftRecipe(load_draft(folder, target), target)
    require_trained_for(folder, target.folder)
    recipe = load_recipe(kind, target.teacher(), folder)
    recipe.module.to(target.device)
    return recipe
