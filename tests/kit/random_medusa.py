"""Medusa heads that fit a tiny target and have learnt a little of what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localspec.training.recipe import make_recipe
from tests.kit.heads import batch_of, teacher_of, train, written_by

NUM_STEPS = 25


def write_random(folder: Path, target: Any) -> None:
    length = min(24, target.cache.shape.capacity - 1)
    texts = written_by(target, 1, 5, length)
    teacher = teacher_of(target)
    recipe = make_recipe("medusa", teacher, {"num_heads": 3}, 0)
    train(recipe, teacher, batch_of(target, texts), NUM_STEPS)
    recipe.save(folder)
