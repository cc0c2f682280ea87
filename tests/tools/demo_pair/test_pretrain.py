"""Training lowers the loss, resumes exactly, and its parts do what they say."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from localspec.training.train_loop import Schedule
from tools.demo_pair.corpus import CorpusError, PackPlan, pack, read_rows
from tools.demo_pair.decoder import hidden_with_exit, llama_config, new_decoder
from tools.demo_pair.packs import BatchStream, Pack, PackedBatch, TextSource
from tools.demo_pair.pretrain import (
    ExitLayers,
    PretrainRun,
    PretrainSettings,
    early_exit_loss,
    train_run,
    weighted_loss,
)

EXITS = ExitLayers(exits=(1,), weight=0.5, dropout=0.0)
DEVICE = torch.device("cpu")


@pytest.fixture
def chats(tokenizer: Tokenizer, tmp_path: Path) -> Pack:
    """A pack of generated dialogues in rows of 64."""
    plan = PackPlan(64, 16_000, {"generated": 1.0}, 0.0, (100, 200), seed=3)
    pack(tokenizer, {}, plan, tmp_path / "pack")
    return Pack(tmp_path / "pack")


def new_run(chats: Pack, folder: Path, num_steps: int) -> PretrainRun:
    """Make a run of a tiny fp32 decoder with a fixed number of steps."""
    model = new_decoder(llama_config(420, 2, 32, 64, 2, context_length=256), 1)
    stream = BatchStream([TextSource(chats, 1.0, 1.0)], 512, 1, DEVICE)
    return PretrainRun(model, stream, PretrainSettings(Schedule(6e-3, num_steps=num_steps), folder))


def silent(_: str) -> None:
    """Drop a report."""


@pytest.mark.slow  # trains
def test_a_tiny_model_learns(chats: Pack, tmp_path: Path) -> None:
    losses = train_run(new_run(chats, tmp_path / "run", 60), weighted_loss, silent)
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert first > 5.5  # ln 420 = 6.04: an untrained model guesses
    assert last < first - 1.5


@pytest.mark.slow
def test_resuming_gives_the_losses_of_an_uninterrupted_run(chats: Pack, tmp_path: Path) -> None:
    whole = new_run(chats, tmp_path / "whole", 12)
    expected = [whole.step(weighted_loss) for _ in range(12)]
    begun = new_run(chats, tmp_path / "parts", 12)
    losses = [begun.step(weighted_loss) for _ in range(6)]
    begun.save()
    continued = new_run(chats, tmp_path / "parts", 12)
    assert continued.resume()
    losses += [continued.step(weighted_loss) for _ in range(6)]
    assert losses == expected


def test_a_crash_while_writing_keeps_the_old_checkpoint(
    chats: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(chats, tmp_path / "run", 12)
    run.step(weighted_loss)
    run.save()

    def broken(content: object, path: Path) -> None:
        path.write_bytes(b"half a checkpoint")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        run.save()
    assert new_run(chats, tmp_path / "run", 12).resume()


def test_unweighted_tokens_do_not_change_the_loss(chats: Pack, tmp_path: Path) -> None:
    run = new_run(chats, tmp_path / "run", 12)
    batch = chats.rows([0, 1], DEVICE)
    silenced = batch.weights.clone()
    silenced[1] = 0.0
    alone = chats.rows([0], DEVICE)
    both = weighted_loss(run.model, type(batch)(batch.tokens, silenced))
    assert torch.allclose(both, weighted_loss(run.model, alone), atol=1e-5)


def test_the_rate_warms_up_holds_and_decays() -> None:
    schedule = Schedule(1.0, num_steps=100, warmup_fraction=0.1, decay_fraction=0.2)
    rates = [schedule.rate(schedule.progress(step, 0.0)) for step in range(101)]
    assert rates[0] < 0.05
    assert rates[20] == rates[79] == 1.0
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] < 0.05
    assert not schedule.is_decaying(0.79)
    assert schedule.is_decaying(0.81)


def test_shares_of_tokens_are_kept_when_packing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = {
        "tldr": [{"source": "tldr", "text": f"list the files {n}" * 5} for n in range(50)],
        "factbook": [{"source": "factbook", "text": f"a river {n} " * 40} for n in range(50)],
    }
    plan = PackPlan(64, 12_000, {"tldr": 3.0, "factbook": 1.0}, 0.0, (100, 200), seed=3)
    pack(tokenizer, rows, plan, tmp_path)
    texts = [tokenizer.decode(row.tolist()) for row in np.load(tmp_path / "tokens.npy")]
    listed = sum(text.count("files") * 9 for text in texts)
    rivers = sum(text.count("river") * 4 for text in texts)
    assert 0.6 < listed / (listed + rivers) < 0.95


def test_a_missing_corpus_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"absent\.jsonl\.xz"):
        read_rows([tmp_path / "absent.jsonl.xz"])


def test_batches_continue_where_the_state_says(chats: Pack) -> None:
    stream = BatchStream([TextSource(chats, 1.0, 1.0)], 512, Random(4).randrange(100), DEVICE)
    stream.next(False)
    state = stream.state()
    expected = stream.next(False).tokens
    other = BatchStream([TextSource(chats, 1.0, 1.0)], 512, 0, DEVICE)
    other.load_state(state)
    assert torch.equal(other.next(False).tokens, expected)


def batch(number: int = 0) -> PackedBatch:
    tokens = torch.arange(3 * 17).view(3, 17) % 420
    return PackedBatch(tokens, torch.ones(3, 16), number)


def test_the_loss_is_that_of_all_layers_and_a_share_of_the_exits(decoder: LlamaForCausalLM) -> None:
    whole = weighted_loss(decoder, batch())
    lower = new_decoder(llama_config(420, 1, 32, 64, 2, context_length=256), 1)
    lower.load_state_dict(decoder.state_dict(), strict=False)
    expected = whole + 0.5 * weighted_loss(lower, batch())
    assert torch.allclose(early_exit_loss(EXITS)(decoder, batch()), expected, atol=1e-5)


def test_what_is_left_out_depends_on_the_batch_alone_and_grows_with_depth() -> None:
    plan = ExitLayers(dropout=0.5)
    drawn = [plan.skipped(number, 12) for number in range(400)]
    assert drawn == [plan.skipped(number, 12) for number in range(400)]
    counts = [sum(layer in each for each in drawn) for layer in range(12)]
    assert counts[0] == 0 and 0 < counts[5] < counts[11]
    assert abs(counts[11] / 400 - 0.5) < 0.1


def test_exits_take_turns() -> None:
    plan = ExitLayers(exits=(2, 4))
    assert [plan.exit_of(number) for number in range(4)] == [2, 4, 2, 4]


def test_a_layer_that_is_left_out_gets_no_update(chats: Pack, tmp_path: Path) -> None:
    run = new_run(chats, tmp_path / "run", 8)
    before = {name: p.clone() for name, p in run.model.named_parameters()}

    def without_the_last(model: LlamaForCausalLM, one: PackedBatch) -> torch.Tensor:
        last, _ = hidden_with_exit(model, one.tokens[:, :-1], 1, frozenset({1}))
        return last.square().mean()

    run.step(without_the_last)
    moved = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and not any(name.startswith("model.layers.1.") for name in moved)
    assert any(name.startswith("model.layers.0.") for name in moved)


def test_a_run_that_gets_no_better_goes_over_to_its_decay(chats: Pack, tmp_path: Path) -> None:
    run = new_run(chats, tmp_path / "run", 4)
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
