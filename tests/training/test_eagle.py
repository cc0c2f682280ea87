"""EAGLE's recipe: what is trained is what drafts, and a few steps make it agree with the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.decoding import SamplingParams
from localspec.drafters.eagle import EagleDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.forward.decoder import run_together
from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.eagle_files import read_eagle
from localspec.forward.heads.files import TargetSizes
from localspec.forward.passes import Rows
from localspec.training.eagle import read_layers
from localspec.training.recipe import HeadRecipe, make_recipe
from localspec.training.target import TaughtBatch, Teacher
from localspec.training.unrolled import visible
from tests.kit.heads import rates, teacher_of, train, written_by
from tests.kit.tiny import Plans, play, tiny_llama, with_cache

OPTIONS = {"num_heads": 4, "ffn_size": 64, "num_steps": 3}
LENGTH = 16


def target_and_batch(seed: int = 1, count: int = 4, num_layers: int = 4) -> tuple[Any, TaughtBatch]:
    target = with_cache(tiny_llama(num_layers=num_layers))
    texts, layers = written_by(target, seed, count, LENGTH), read_layers(num_layers)
    found: dict[int, list[Any]] = {layer: [] for layer in layers}
    for text in texts:
        (made,) = run_together([Rows(target, text[:-1])], layers)
        target.cache.rollback(0)
        for layer in layers:
            found[layer].append(made.hidden[layer].tolist())
    features = {layer: torch.tensor(rows) for layer, rows in found.items()}
    return target, TaughtBatch(torch.tensor(texts), torch.ones(count, LENGTH - 1), features)


def rounded(recipe: HeadRecipe) -> HeadRecipe:
    """With weights that a file holds exactly."""
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.copy_((weight + 0.05 * torch.randn_like(weight)).bfloat16())
    return recipe


def test_what_is_trained_is_what_drafts(tmp_path: Path) -> None:
    """Every row of every step equals the row that drafting makes at its place, from the folder."""
    torch.manual_seed(3)
    target, batch = target_and_batch()
    teacher = teacher_of(target)
    recipe = rounded(make_recipe("eagle", teacher, OPTIONS, 0))
    recipe.save(tmp_path)
    head = AutoregressiveHead(read_eagle(tmp_path, target), 64)
    features, text = target.follow(head.layers), batch.tokens[0].tolist()
    target.forward(text[:-1])
    with torch.no_grad():
        outputs = recipe.states.outputs(teacher, batch, 4)
        said = teacher.head(recipe.states.network.leave(outputs[2][0, 8:9]))
    for start in (0, 1, 6):  # a draft after pair `start`
        pairs = text[: start + 2]
        head.reuse(pairs)
        hidden = head.read(pairs, features).forward()
        for step, output in enumerate(outputs):
            place = start + step
            assert torch.allclose(hidden[0], output[0, place], atol=1e-4), (start, step)
            if (start, step) == (6, 2):
                assert torch.allclose(head.logits(hidden).forward(), said, atol=1e-3)
            open_row = torch.zeros(1, step + 1, dtype=torch.bool)
            hidden = head.branch([text[place + 2]], hidden, [place + 1], open_row).forward()


def test_a_row_of_the_third_step_sees_text_before_its_draft_and_one_row_a_step() -> None:
    seen = visible(5, 3, torch.device("cpu")).view(5, 3, 5)
    text, first, second = seen[4].tolist()
    assert text == [True, True, True, False, False]
    assert first == [False, False, False, True, False]
    assert second == [False, False, False, False, True]


def test_a_lesson_of_one_step_is_plain_causal_attention() -> None:
    assert torch.equal(visible(4, 1, torch.device("cpu")), torch.ones(4, 4).tril().bool())


@pytest.mark.slow  # trains
def test_training_raises_held_out_acceptance_and_what_the_drafter_gets(tmp_path: Path) -> None:
    target, batch = target_and_batch(5, 32, num_layers=1)
    _, held_out = target_and_batch(6, 48, num_layers=1)
    teacher = teacher_of(target)
    recipe = make_recipe("eagle", teacher, OPTIONS, 0)
    recipe.save(tmp_path / "fresh")
    before = recipe.acceptance(teacher, held_out)
    train(recipe, teacher, batch, 40)
    recipe.save(tmp_path / "trained")
    after = recipe.acceptance(teacher, held_out)
    assert rates(after)[0] > rates(before)[0] + 0.2
    assert after[1][0] > 1.5 * before[1][0], "second guesses that hold"
    assert accepted(target, tmp_path / "trained") > accepted(target, tmp_path / "fresh") + 0.3


def accepted(target: Any, folder: Path) -> float:
    """Tokens a round, over replies to prompts that no batch had."""
    drafter = EagleDrafter.build(Parts(target, heads={"eagle": folder}))
    engine, policy = Engine(target, {"eagle": drafter}), Plans(("eagle", 4))
    for prompt in written_by(target, 9, 6, 6):
        play(engine, tuple(prompt), policy, 20, SamplingParams(1.0, seed=3))
    return sum(step.num_accepted_tokens for step in policy.steps) / len(policy.steps)


def test_training_does_not_touch_the_target() -> None:
    target, batch = target_and_batch()
    before = target.embed([0, 1]).clone(), target.head(target.embed([0, 1])).clone()
    recipe = make_recipe("eagle", teacher_of(target), OPTIONS, 0)
    train(recipe, teacher_of(target), batch, 2)
    assert torch.equal(before[0], target.embed([0, 1]))
    assert torch.equal(before[1], target.head(target.embed([0, 1])))


def test_every_weight_learns() -> None:
    target, batch = target_and_batch()
    recipe = make_recipe("eagle", teacher_of(target), OPTIONS, 0)
    recipe.loss(teacher_of(target), batch).backward()
    silent = [
        name
        for name, weight in recipe.module.named_parameters()
        if weight.grad is None or not bool(weight.grad.abs().sum() > 0)
    ]
    assert silent == []


def test_tokens_without_weight_teach_nothing() -> None:
    """Filling at the end of a row, whatever stands there."""
    target, batch = target_and_batch()
    weights = batch.weights.clone()
    weights[:, -5:] = 0.0
    other = batch.tokens.clone()
    other[:, -5:] = 0
    features = {layer: rows.clone() for layer, rows in batch.features.items()}
    for rows in features.values():
        rows[:, -4:] = 7.0  # of the filling; the row before it predicts none of it
    teacher, recipe = teacher_of(target), make_recipe("eagle", teacher_of(target), OPTIONS, 0)
    one = recipe.loss(teacher, TaughtBatch(batch.tokens, weights, batch.features))
    filled = TaughtBatch(other, weights, features)
    assert torch.allclose(one, recipe.loss(teacher, filled), atol=1e-5)
    full = recipe.acceptance(teacher, TaughtBatch(batch.tokens, weights, batch.features))
    assert full == recipe.acceptance(teacher, filled)


@pytest.mark.slow  # trains
def test_acceptance_counts_a_place_only_where_the_guesses_before_held() -> None:
    """Against the same count made place by place."""
    target, batch = target_and_batch(5, 12)
    teacher = teacher_of(target)
    recipe = make_recipe("eagle", teacher, OPTIONS, 0)
    train(recipe, teacher, batch, 15)
    found = recipe.acceptance(teacher, batch)
    with torch.no_grad():
        outputs = recipe.states.outputs(teacher, batch, len(found))
        guesses = [teacher.head(recipe.states.network.leave(o)).argmax(-1) for o in outputs]
        choices = teacher.head(batch.features[LAST]).argmax(-1)
    wanted = [[0, 0] for _ in found]
    for row in range(batch.tokens.shape[0]):
        for start in range(LENGTH - 2):
            for step in range(len(found)):
                place = start + step  # the guess is of token place + 2
                if place > LENGTH - 3:
                    break
                wanted[step][1] += 1
                if guesses[step][row, place] != choices[row, place + 1]:
                    break
                wanted[step][0] += 1
                if choices[row, place + 1] != batch.tokens[row, place + 2]:
                    break  # the text went elsewhere
    assert found == [(float(hit), float(tried)) for hit, tried in wanted]
    assert found[1][0] > 0


def test_a_saved_head_has_the_size_it_may_have(tmp_path: Path) -> None:
    """Under 3 MB for a target of the demo's size."""

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, 256)

    recipe = make_recipe("eagle", Teacher(TargetSizes(256, 6144, 12), rows, rows), {}, 0)
    recipe.save(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3_000_000


def test_the_registry_makes_it_and_the_seed_decides_its_start() -> None:
    target, _ = target_and_batch()
    starts = [make_recipe("eagle", teacher_of(target), OPTIONS, seed) for seed in (1, 1, 2)]
    one, same, other = (next(iter(r.module.state_dict().values())) for r in starts)
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(12, (3, 6, LAST)), (4, (1, 2, LAST)), (2, (0, LAST)), (1, (LAST,))]
)
def test_a_low_a_middle_and_the_last_layer_are_read(
    num_layers: int, layers: tuple[int, ...]
) -> None:
    assert read_layers(num_layers) == layers
