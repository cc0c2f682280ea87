"""What drafts already, judged on the rows that a new result is judged on.

Contract: `judged` gives a Rival for a folder, with what held-out rows say of it or why they could
not be asked. A rival that no chat could draft with either stands in nobody's way; one that could
not be judged and yet may be in use does, for nothing in use is replaced on a guess.

Not here: which folders are rivals, and what becomes of the new result (run, errand).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError, MemoryShortage, ModelError
from localspec.forward.fingerprint import require_trained_for
from localspec.forward.heads.files import CONFIG
from localspec.training.draft import DraftRecipe, loaded_draft
from localspec.training.judging import Judgement
from localspec.training.recipe import Recipe, load_recipe
from localspec.training.target import Target
from localspec.training.train_loop import Run

DIGITS = 4  # of tokens a round: finer is rounding


@dataclass(frozen=True)
class Rival:
    """judgement: None where it could not be judged, with why in reason. is_usable: whether a chat
    may draft with it."""

    folder: Path
    judgement: Judgement | None
    reason: str = ""
    is_usable: bool = True

    def stays_before(self, other: Judgement) -> bool:
        """Whether it is better than the other, or may be."""
        if self.judgement is None:
            return self.is_usable
        own, others = self.judgement.expected_tokens, other.expected_tokens
        return round(own, DIGITS) > round(others, DIGITS)

    def as_dict(self) -> dict[str, Any]:
        acceptance = None if self.judgement is None else self.judgement.acceptance
        return {"folder": str(self.folder), "acceptance": acceptance, "reason": self.reason}


def judged(kind: str, folder: Path, run: Run, make_room: Callable[[Path], None]) -> Rival:
    """A head or draft on the run's held-out rows. make_room: raises MemoryShortage where the
    memory does not hold a draft."""
    if kind != "draft" and _is_published(folder):
        return Rival(folder, None, "Training does not read its format.")
    try:
        if kind == "draft":
            make_room(folder)
        recipe = _loaded(kind, folder, run.target)
        return Rival(folder, run.held_out_of(recipe))
    except (MemoryShortage, RuntimeError, MemoryError) as error:
        return Rival(folder, None, str(error).splitlines()[0] if str(error) else "No memory.")
    except LocalspecError as error:
        return Rival(folder, None, str(error), is_usable=not isinstance(error, ModelError))


def _loaded(kind: str, folder: Path, target: Target) -> Recipe:
    """Raises ModelError, MemoryShortage."""
    if kind == "draft":
        return DraftRecipe(loaded_draft(folder, target), target)
    require_trained_for(folder, target.folder)
    recipe = load_recipe(kind, target.teacher(), folder)
    recipe.module.to(target.device)
    return recipe


def _is_published(folder: Path) -> bool:
    """Whether a head is in its authors' own format, or came with the target."""
    return not (folder / CONFIG).is_file() and (folder / "config.json").is_file()
