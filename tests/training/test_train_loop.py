"""The loop goes on exactly where it stopped, keeps the best, and knows when to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from localspec.core.errors import NumericsError
from localspec.forward.features import LAST
from localspec.training.judging import Judgement
from localspec.training.rows import SplitRows, TokenRow
from localspec.training.target import Target, TaughtBatch, Teacher
from localspec.training.train_loop import LoopSettings, Schedule, TrainLoop
from tests.training.runs import Said


class Linear:
    """A recipe of one matrix: guess the token after next from the last state."""

    kind, layers = "linear", (0,)

    def __init__(self, figures: list[float] | None = None) -> None:
        torch.manual_seed(3)
        self.module: nn.Module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.1))
        self.figures = figures

    def loss(self, teacher: Teacher, batch: TaughtBatch) -> Tensor:
        logits = teacher.head(self.module(batch.features[LAST]))
        wanted, weights = batch.tokens[:, 1:], batch.weights
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
        return (losses * weights).sum() / weights.sum()

    def acceptance(self, teacher: Teacher, batch: TaughtBatch) -> list[tuple[float, float]]:
        return [(self.figures.pop(0) if self.figures else 0.5, 1.0)]

    def save(self, folder: Path) -> None:
        raise AssertionError("the loop saves nothing")


@pytest.fixture(scope="module")
def rows() -> SplitRows:
    rng = np.random.default_rng(1)
    made = [
        TokenRow(rng.integers(4, 400, n + 1).astype(np.int32), np.ones(n, dtype=np.float32))
        for n in rng.integers(5, 30, 40)
    ]
    return SplitRows(tuple(made[:36]), tuple(made[36:]))


def new_run(
    target: Target, rows: SplitRows, folder: Path, said: Said, recipe: Linear, **changes: Any
) -> TrainLoop:
    usual: dict[str, Any] = {"tokens_per_batch": 128, "tokens_at_once": 64}
    schedule = changes.pop("schedule", Schedule(1e-3, num_steps=20))
    settings = LoopSettings(schedule, folder, **(usual | changes))
    return TrainLoop(recipe, target, rows, settings, {"kind": "linear"}, said)


@pytest.mark.slow
def test_a_resumed_run_repeats_the_losses_of_a_whole_one(
    loaded_target: Target, rows: SplitRows, tmp_path: Path, said: Said
) -> None:
    whole = new_run(loaded_target, rows, tmp_path / "whole", said, Linear())
    expected = [whole.step() for _ in range(16)]
    begun = new_run(loaded_target, rows, tmp_path / "parts", said, Linear())
    losses = [begun.step() for _ in range(7)]
    begun.judge()
    begun.save()
    continued = new_run(loaded_target, rows, tmp_path / "parts", said, Linear())
    assert continued.resume() and vars(continued.progress) == vars(begun.progress)
    losses += [continued.step() for _ in range(9)]
    assert losses == expected
    assert whole.progress.epoch >= 1, "the order of a second epoch is repeated as well"


def test_parts_of_a_batch_add_up_to_the_whole(
    loaded_target: Target, rows: SplitRows, tmp_path: Path, said: Said
) -> None:
    gradients = []
    for at_once in (30, 4096):
        recipe = Linear()
        run = new_run(loaded_target, rows, tmp_path, said, recipe, tokens_at_once=at_once)
        recipe.module.eval()  # no dropout, which would differ
        run.backward(rows.train[:6])
        gradients.append(recipe.module[0].weight.grad.clone())  # type: ignore[index]
    assert gradients[0].norm() > 0.0
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-7)


def test_the_best_weights_are_those_that_remain(
    loaded_target: Target, rows: SplitRows, tmp_path: Path, said: Said
) -> None:
    recipe = Linear(figures=[0.1, 0.9, 0.2, 0.3, 0.3, 0.3])
    schedule = Schedule(1e-2, num_steps=5)
    run = new_run(
        loaded_target,
        rows,
        tmp_path,
        said,
        recipe,
        schedule=schedule,
        judge_share=0.2,
        tokens_at_once=999,
    )
    kept: list[Tensor] = []
    whole = run.judge

    def judge() -> None:
        whole()
        kept.append(recipe.module[0].weight.detach().clone())  # type: ignore[index]

    run.judge = judge  # type: ignore[method-assign]
    assert run.train().acceptance == (0.9,)
    assert torch.equal(recipe.module[0].weight, kept[1])  # type: ignore[index]
    assert not torch.equal(kept[1], kept[-1])


def test_a_run_that_gets_no_better_lowers_its_rate_and_then_ends(
    loaded_target: Target, rows: SplitRows, tmp_path: Path, said: Said
) -> None:
    recipe = Linear(figures=[0.9, *[0.1] * 100])
    schedule = Schedule(1e-3, num_steps=1000)
    run = new_run(
        loaded_target,
        rows,
        tmp_path,
        said,
        recipe,
        schedule=schedule,
        judge_share=0.005,
        patience=2,
        tokens_at_once=999,
    )
    run.train()
    assert run.progress.step < 40
    lowered = next(i for i, line in enumerate(said) if "the rate decays" in line)
    ended = next(i for i, line in enumerate(said) if "ends here" in line)
    assert lowered < ended


def test_a_loss_that_is_no_number_is_said_and_the_checkpoint_stays(
    loaded_target: Target, rows: SplitRows, tmp_path: Path, said: Said
) -> None:
    recipe = Linear()
    run = new_run(loaded_target, rows, tmp_path, said, recipe)
    run.step()
    run.save()
    whole = run.path.read_bytes()
    with torch.no_grad():
        recipe.module[0].weight.fill_(float("nan"))  # type: ignore[index]
    with pytest.raises(NumericsError, match="lower --rate"):
        run.step()
    assert run.path.read_bytes() == whole


@pytest.mark.slow
def test_the_target_is_never_trained(
    loaded_target: Target, rows: SplitRows, tmp_path: Path, said: Said
) -> None:
    before = {name: t.clone() for name, t in loaded_target.module.state_dict().items()}
    new_run(loaded_target, rows, tmp_path, said, Linear()).train()
    assert all(
        torch.equal(t, before[name]) for name, t in loaded_target.module.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in loaded_target.module.parameters())


def test_features_are_the_states_that_a_cache_would_hold(
    loaded_target: Target, rows: SplitRows
) -> None:
    batch = loaded_target.taught(rows.train[:3], (0, 2))
    assert set(batch.features) == {0, 2, LAST}
    alone = rows.train[0]
    tokens = torch.from_numpy(alone.tokens[:-1].astype(np.int64))[None]
    with torch.no_grad():
        output = loaded_target.module(input_ids=tokens, output_hidden_states=True)
    place = len(alone)
    assert torch.allclose(batch.features[0][0, :place], output.hidden_states[1][0], atol=1e-4)
    assert torch.allclose(batch.features[LAST][0, :place], output.hidden_states[-1][0], atol=1e-4)
    logits = loaded_target.teacher().head(batch.features[LAST][:1, :place])
    assert torch.allclose(logits, output.logits, atol=1e-3)


def test_expected_tokens_are_the_products_along_the_chain() -> None:
    assert Judgement((0.5, 0.5), 1.0).expected_tokens == pytest.approx(1.75)
    assert Judgement((), 1.0).expected_tokens == 1.0
