"""Training Medusa heads: what each head is asked, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localspec.drafters.medusa import MedusaDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.training.recipe import HeadRecipe, make_recipe
from localspec.training.target import TaughtBatch
from tests.kit.heads import (
    batch_of,
    counting_batch,
    identity_teacher,
    rates,
    teacher_of,
    train,
    written_by,
)
from tests.kit.tiny import Plans, play, tiny_llama, with_cache

STARTS = ((5, 9, 12, 5, 9), (3, 7, 5, 9, 2), (1, 2, 14, 4, 5))
SIZE = 6


def target() -> Decoder:
    """Of few tokens and a text that the state tells something of two tokens ahead."""
    return with_cache(tiny_llama(vocab_size=16, later=0.3))


def shifting() -> HeadRecipe:
    """Head k, given the state that says x, says x + k: right about a text that counts up."""
    recipe = make_recipe("medusa", identity_teacher(SIZE), {"num_heads": 3}, 0)
    with torch.no_grad():
        for head in range(3):
            onward = torch.eye(SIZE).roll(head + 1, 0)
            recipe.module.weight[head, 0] = 40.0 * onward
    return recipe


def test_head_k_is_asked_for_the_token_k_places_after_the_root() -> None:
    teacher, batch = identity_teacher(SIZE), counting_batch(SIZE, 6)
    assert rates(shifting().acceptance(teacher, batch)) == [1.0, 1.0, 1.0]
    assert rates(
        make_recipe("medusa", teacher, {"num_heads": 3}, 0).acceptance(teacher, batch)
    ) == [0.0, 0.0, 0.0]
    fresh = make_recipe("medusa", teacher, {"num_heads": 3}, 0).loss(teacher, batch)
    assert bool(shifting().loss(teacher, batch) < 0.1 * fresh)


def test_a_position_is_tried_only_where_all_before_agreed() -> None:
    teacher, batch = identity_teacher(SIZE), counting_batch(SIZE, 6)
    recipe = shifting()
    with torch.no_grad():
        recipe.module.weight[1] = 0.0  # the second head is wrong everywhere
    tried = [tried for _, tried in recipe.acceptance(teacher, batch)]
    assert tried == [5.0, 4.0, 0.0]


def test_a_later_head_counts_less() -> None:
    teacher, batch, losses = identity_teacher(SIZE), counting_batch(SIZE, 6), list[float]()
    for wrong in range(3):
        recipe = shifting()
        with torch.no_grad():
            recipe.module.weight[wrong] = 0.0
            losses.append(float(recipe.loss(teacher, batch)))
    assert losses[1] == pytest.approx(0.8 * losses[0], rel=0.02)
    assert losses[2] == pytest.approx(0.8 * losses[1], rel=0.02)


def test_weights_of_zero_are_not_learnt_from_nor_counted() -> None:
    teacher, batch = identity_teacher(SIZE), counting_batch(SIZE, 6)
    half = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    recipe = make_recipe("medusa", teacher, {"num_heads": 3}, 0)
    quiet = TaughtBatch(batch.tokens, half, batch.features)
    assert [tried for _, tried in recipe.acceptance(teacher, quiet)] == [1.0, 0.0, 0.0]
    garbled = TaughtBatch(batch.tokens, half, {LAST: batch.features[LAST].clone()})
    garbled.features[LAST][:, 2:] = 5.0
    assert torch.equal(recipe.loss(teacher, quiet), recipe.loss(teacher, garbled))
    nothing = TaughtBatch(batch.tokens, torch.zeros(1, 6), batch.features)
    assert bool(recipe.loss(teacher, nothing) == 0.0)


def test_a_lesson_shorter_than_the_heads_reach_is_taken() -> None:
    teacher, batch = identity_teacher(SIZE), counting_batch(SIZE, 2)
    recipe = make_recipe("medusa", teacher, {"num_heads": 3}, 0)
    assert recipe.loss(teacher, batch).isfinite()
    assert [tried for _, tried in recipe.acceptance(teacher, batch)] == [1.0, 0.0, 0.0]


def accepted(model: Decoder, folder: Path) -> int:
    """Draft tokens accepted over a few greedy turns."""
    drafter = MedusaDrafter.build(Parts(model, heads={"medusa": folder}))
    policy = Plans(("medusa", 4))
    for start in STARTS:
        play(Engine(model, {"medusa": drafter}), start, policy, 40)
    return sum(step.num_accepted_tokens for step in policy.steps)


@pytest.mark.slow  # trains
def test_training_raises_held_out_acceptance_and_what_the_drafter_gets(tmp_path: Path) -> None:
    model = target()
    teacher, recipe = (
        teacher_of(model),
        make_recipe("medusa", teacher_of(model), {"num_heads": 3}, 0),
    )
    learnt = batch_of(model, written_by(model, 1, 48, 24))
    held_out = batch_of(model, written_by(model, 2, 48, 24))
    recipe.save(tmp_path / "fresh")
    before, loss = recipe.acceptance(teacher, held_out), recipe.loss(teacher, held_out)
    train(recipe, teacher, learnt, 60)
    recipe.save(tmp_path / "trained")
    after = recipe.acceptance(teacher, held_out)
    for head in range(3):  # more is accepted at every position
        assert after[head][0] > before[head][0]
    assert bool(recipe.loss(teacher, held_out) < loss)
    assert accepted(model, tmp_path / "trained") > accepted(target(), tmp_path / "fresh")
