"""What drafts are accepted is measured on the models asked for and can start another's chat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localspec.bench.cases import Case
from localspec.controller.acceptance import Acceptance
from localspec.controller.shipped_acceptance import read_accepted
from localspec.core.backend import Message
from localspec.core.decoding import Sequence
from localspec.core.errors import ConfigError, LocalspecError, StoreError
from localspec.core.options import LoadOptions
from localspec.training.accepted import AcceptedSettings, measure_accepted
from localspec.training.prompt_files import TrainingPrompt
from tests.kit.tiny_bench import captured_engine, tiny_bench
from tests.kit.tracing import TracingPool

CASE = Case("a", "chat", (5, 9, 5, 9, 5), seed=7)
ASKED = TrainingPrompt("one", (Message("user", "Say it again: one two three one two three"),))


def settings(target: Path, out: Path, *prompts: TrainingPrompt) -> AcceptedSettings:
    load = LoadOptions(model=str(target), dtype="float32", context=256, home=out.parent)
    return AcceptedSettings(load, prompts, (0.0,), 8, out)


@pytest.mark.slow  # loads every drafter of a target
def test_every_drafter_is_measured_and_the_file_can_be_read(
    target_folder: Path, tmp_path: Path
) -> None:
    out, said = tmp_path / "new" / "accepted.json", list[str]()
    origin, measured = measure_accepted(settings(target_folder, out, ASKED), said.append)
    assert origin.num_prompts == 1 and {"ngram", "lookahead"} <= set(measured)
    found, why = read_accepted(out, origin.marks)
    assert why is None and found is not None
    learnt = Acceptance.restored(found)
    assert learnt.is_known(0) and not learnt.is_known(2)
    assert any(line.startswith("ngram: 1 prompts at T 0") for line in said)


@pytest.mark.slow
def test_drafts_are_measured_captured(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = TracingPool()
    bench = tiny_bench(captured_engine(pool))
    bench = replace(bench, machine={"target": "tiny", "draft": None})
    monkeypatch.setattr("localspec.training.accepted.bench_engine_of", lambda *_: bench)
    monkeypatch.setattr("localspec.training.accepted._cases", lambda *_: [CASE])
    monkeypatch.setattr("localspec.training.accepted.calibrate", lambda engine, _: engine.capture())
    measure_accepted(settings(target_folder, tmp_path / "accepted.json", ASKED), lambda _: None)
    num_compared = pool.num_captures
    assert pool.num_replays > num_compared + 2


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")

    def loads(*_: object) -> Sequence:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("localspec.training.accepted.open_local_backend", loads)
    with pytest.raises(StoreError, match=r"cannot be written .*another --out"):
        measure_accepted(settings(tmp_path, tmp_path / "file" / "below.json", ASKED), print)


@pytest.mark.parametrize("temperatures", [(float("nan"),), (0.0, 9.0), (), (1.0, 1.0)])
def test_temperatures_are_looked_at_before_anything_is_measured(
    temperatures: tuple[float, ...], tmp_path: Path
) -> None:
    with pytest.raises(LocalspecError, match="temperature"):
        AcceptedSettings(LoadOptions(), (ASKED,), temperatures, 8, tmp_path / "accepted.json")


@pytest.mark.slow
def test_prompts_that_do_not_fit_are_named(target_folder: Path, tmp_path: Path) -> None:
    long = TrainingPrompt("long", (Message("user", "word " * 2000),))
    with pytest.raises(ConfigError, match="None of 1 prompts fits the context of 256 tokens"):
        measure_accepted(settings(target_folder, tmp_path / "accepted.json", long), lambda _: None)
