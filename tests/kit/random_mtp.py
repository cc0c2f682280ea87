"""A multi-token-prediction module that fits a tiny target and has learnt a little of what it
writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localspec.training.recipe import make_recipe
from tests.kit.heads import batch_of, random_texts, teacher_of, train

NUM_STEPS = 20


def write_random(folder: Path, target: Any) -> None:
    length = min(16, target.cache.shape.capacity - 1)
    texts = random_texts(target.vocab_size, 1, 8, length)
    teacher = teacher_of(target)
    recipe = make_recipe("mtp", teacher, {"num_heads": 2, "ffn_size": 64, "num_steps": 2}, 0)
    train(recipe, teacher, batch_of(target, texts), NUM_STEPS)
    recipe.save(folder)
