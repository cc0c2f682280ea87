"""Exits and dropout in training, growing a model, and giving up early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from localspec.errors import ModelError
from localspec.training.schedule import Schedule
from tests.tools.demo_pair.test_pretrain import chats as chats  # the fixture
from tests.tools.demo_pair.test_pretrain import new_run
from tools.demo_pair.decoder import Decoder, ModelShape
from tools.demo_pair.distil import start_draft
from tools.demo_pair.export import export_model, load_exported, widened
from tools.demo_pair.packs import Batch
from tools.demo_pair.pretrain import EarlyExit, early_exit_loss, weighted_loss

PLAN = EarlyExit(exits=(1,), weight=0.5, dropout=0.0)


def batch(number: int = 0) -> Batch:
    tokens = torch.arange(3 * 17).view(3, 17) % 420
    return Batch(tokens, torch.ones(3, 16), number)


def test_the_loss_is_that_of_all_layers_and_a_share_of_the_exits(decoder: Decoder) -> None:
    whole = weighted_loss(decoder, batch())
    lower = Decoder(ModelShape(420, 1, 32, 64, 2, context_length=256))
    lower.load_state_dict(decoder.state_dict(), strict=False)
    expected = whole + 0.5 * weighted_loss(lower, batch())
    assert torch.allclose(early_exit_loss(PLAN)(decoder, batch()), expected, atol=1e-5)


def test_what_is_left_out_depends_on_the_batch_alone_and_grows_with_depth() -> None:
    plan = EarlyExit(dropout=0.5)
    drawn = [plan.skipped(number, 12) for number in range(400)]
    assert drawn == [plan.skipped(number, 12) for number in range(400)]
    counts = [sum(layer in each for each in drawn) for layer in range(12)]
    assert counts[0] == 0 and 0 < counts[5] < counts[11]
    assert abs(counts[11] / 400 - 0.5) < 0.1


def test_exits_take_turns() -> None:
    plan = EarlyExit(exits=(2, 4))
    assert [plan.exit_of(number) for number in range(4)] == [2, 4, 2, 4]


def test_a_layer_that_is_left_out_gets_no_update(chats: object, tmp_path: Path) -> None:
    run = new_run(chats, tmp_path / "run", 8)  # type: ignore[arg-type]
    before = {name: p.clone() for name, p in run.model.named_parameters()}

    def without_the_last(model: Decoder, one: Batch) -> torch.Tensor:
        last, _ = model.hidden_with_exit(one.tokens[:, :-1], 1, frozenset({1}))
        return last.square().mean()

    run.step(without_the_last)
    moved = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and not any(name.startswith("blocks.1.") for name in moved)
    assert any(name.startswith("blocks.0.") for name in moved)


def test_a_wider_model_computes_the_same_and_its_new_units_can_learn(decoder: Decoder) -> None:
    tokens = torch.arange(24).view(2, 12)
    wide = widened(decoder, 96, seed=1)
    assert torch.allclose(wide(tokens), decoder(tokens), atol=1e-5)
    weighted_loss(wide, batch()).backward()
    gradient = wide.blocks[0].down.weight.grad
    assert gradient is not None and bool((gradient[:, 64:] != 0).any())


def test_a_model_cannot_be_made_narrower(decoder: Decoder) -> None:
    with pytest.raises(ModelError, match="cannot shrink"):
        widened(decoder, 32, seed=1)


def test_an_exported_model_comes_back(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_model(decoder, tokenizer, tmp_path / "model", torch.float32)
    again = load_exported(tmp_path / "model")
    assert all(torch.equal(p, q) for p, q in zip(
        again.state_dict().values(), decoder.state_dict().values(), strict=True
    ))  # fmt: skip


def test_a_model_of_another_kind_is_refused(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    export_model(decoder, tokenizer, tmp_path / "model", torch.float32)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    with pytest.raises(ModelError, match="not a model of the kind"):
        load_exported(tmp_path / "model")


def test_a_draft_of_the_same_widths_starts_as_the_targets_first_layers(decoder: Decoder) -> None:
    draft = Decoder(ModelShape(420, 1, 32, 64, 2, context_length=256))
    start_draft(draft, decoder, seed=3)
    tokens = torch.arange(10)[None]
    _, left = decoder.hidden_with_exit(tokens, 1, frozenset())
    assert torch.allclose(draft.hidden(tokens)[0], left, atol=1e-6)


def test_a_run_that_gets_no_better_goes_over_to_its_decay(chats: object, tmp_path: Path) -> None:
    run = new_run(chats, tmp_path / "run", 4)  # type: ignore[arg-type]
    schedule = Schedule(1e-3, minutes=10.0, decay_fraction=0.4)
    run.settings = type(run.settings)(schedule, tmp_path / "run", patience=2)
    run.progress.trained_seconds = 60.0
    for loss in (3.0, 2.9, 2.95):
        run.judge(loss)
    assert run.done() == pytest.approx(0.1) and run.progress.best_loss == 2.9
    run.judge(2.91)
    assert run.done() == pytest.approx(0.6) and schedule.rate(run.done()) == pytest.approx(1e-3)
    run.judge(2.92)
    assert run.done() == pytest.approx(0.6), "what was skipped once is not skipped again"
