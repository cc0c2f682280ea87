"""Training a multi-token-prediction module: what it is asked, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localspec.drafters.mtp import MtpDrafter
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
    random_texts,
    rates,
    teacher_of,
    train,
    written_by,
)
from tests.kit.tiny import VOCAB_SIZE, Plans, play, tiny_llama, with_cache

STARTS = ((5, 9, 12, 5, 9), (30, 7, 5, 9, 2), (1, 2, 44, 4, 5))
SMALL = {"num_heads": 2, "ffn_size": 64, "num_steps": 2}
SIZE = 8


def target() -> Decoder:
    return with_cache(tiny_llama())


def counting() -> HeadRecipe:
    """A module without attention or feed-forward that adds one to the token embedded."""
    recipe = make_recipe(
        "mtp", identity_teacher(SIZE), {"num_heads": 1, "ffn_size": 4, "num_steps": 3}, 0
    )
    with torch.no_grad():
        for name in ("output", "down", "input"):
            recipe.module[name].weight.zero_()
        recipe.module["input"].weight[:, SIZE:] = torch.eye(SIZE).roll(1, 0)
    return recipe


def test_each_step_is_asked_for_the_token_after_the_one_embedded() -> None:
    teacher, batch = identity_teacher(SIZE), counting_batch(SIZE, 7)
    assert rates(counting().acceptance(teacher, batch)) == [1.0] * 5
    fresh = make_recipe("mtp", teacher, {"num_heads": 1, "ffn_size": 4}, 0)
    assert max(rates(fresh.acceptance(teacher, batch))) < 1.0
    assert bool(counting().loss(teacher, batch) < 0.1 * fresh.loss(teacher, batch))


def test_step_s_is_counted_where_a_draft_of_that_length_can_be() -> None:
    """Of a text of n predicted tokens, a draft's token s has n - 1 - s places."""
    tried = [
        tried for _, tried in counting().acceptance(identity_teacher(SIZE), counting_batch(SIZE, 7))
    ]
    assert tried == [6.0, 5.0, 4.0, 3.0, 2.0]


def test_weights_of_zero_are_neither_learnt_from_nor_counted() -> None:
    teacher, batch, recipe = identity_teacher(SIZE), counting_batch(SIZE, 7), counting()
    quiet = TaughtBatch(batch.tokens, torch.zeros(1, 7), batch.features)
    assert bool(recipe.loss(teacher, quiet) == 0.0)
    assert [tried for _, tried in recipe.acceptance(teacher, quiet)] == [0.0] * 5


def test_a_draft_ends_where_the_text_goes_another_way_than_the_target() -> None:
    """What the target would say after its own choice is not in the batch then."""
    teacher, batch, recipe = identity_teacher(SIZE), counting_batch(SIZE, 7), counting()
    features = batch.features[LAST].clone()
    # The target says 5 where the text goes on with 4; the module says 4 and is wrong there.
    features[0, 3] = torch.eye(SIZE)[5]
    found = recipe.acceptance(teacher, TaughtBatch(batch.tokens, batch.weights, {LAST: features}))
    assert found[0] == (5.0, 6.0)
    assert found[1][1] == 4.0, "drafts that reached the odd place were given up there"


def test_later_steps_teach_too() -> None:
    """A loss of one step leaves the module's own states untried; one of two does not."""
    model, text = target(), random_texts(VOCAB_SIZE, 3, 4, 12)
    teacher, batch = teacher_of(model), batch_of(model, text)
    one, two = (make_recipe("mtp", teacher, SMALL | {"num_steps": count}, 0) for count in (1, 2))
    assert not torch.allclose(one.loss(teacher, batch), two.loss(teacher, batch))


def accepted(model: Decoder, folder: Path) -> int:
    """Draft tokens accepted over a few greedy turns."""
    drafter = MtpDrafter.build(Parts(model, heads={"mtp": folder}))
    policy = Plans(("mtp", 3))
    for start in STARTS:
        play(Engine(model, {"mtp": drafter}), start, policy, 40)
    return sum(step.num_accepted_tokens for step in policy.steps)


@pytest.mark.slow  # trains
def test_training_raises_held_out_acceptance_and_what_the_drafter_gets(tmp_path: Path) -> None:
    model = target()
    teacher, recipe = teacher_of(model), make_recipe("mtp", teacher_of(model), SMALL, 0)
    learnt = batch_of(model, written_by(model, 1, 24, 24))
    held_out = batch_of(model, written_by(model, 2, 24, 24))
    recipe.save(tmp_path / "fresh")
    before = recipe.acceptance(teacher, held_out)
    train(recipe, teacher, learnt, 40)
    recipe.save(tmp_path / "trained")
    after = recipe.acceptance(teacher, held_out)
    assert rates(after)[0] > rates(before)[0] + 0.1
    assert after[1][0] > before[1][0], "the second token of a draft is accepted more often"
    assert accepted(model, tmp_path / "trained") > accepted(target(), tmp_path / "fresh")
