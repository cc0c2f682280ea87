"""The tune-up on backends whose speeds are written down: what it measures and what it says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from localspec.chat.tune_up import (
    PROMPTS,
    TEMPERATURES,
    TuneUp,
    TuneUpRun,
    in_words,
    one_of_each_family,
    tune_up,
)
from localspec.core.backend import Chunk, Description, DrafterStatus, Request
from localspec.core.decoding import OFF, Step
from localspec.core.errors import LocalspecError
from localspec.core.turn_stats import TurnStats
from tests.kit.fakes import FakeBackend

KINDS = tuple(sample.kind for sample in PROMPTS)


@dataclass
class Timed(FakeBackend):
    """Rounds take what `speeds` says, on a clock of its own; nothing really waits."""

    speeds: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # (drafter, kind): ms a token
    silent: tuple[str, ...] = ()  # drafters that never propose
    now_s: float = 0.0
    names: tuple[str, ...] = ("draft_model", "ngram")

    def describe(self) -> Description:
        drafters = tuple(DrafterStatus(name, True, "ready") for name in self.names)
        return replace(
            super().describe(), drafters=(*drafters, DrafterStatus("self_quant", False, "no"))
        )

    def _generate(
        self, request: Request, cancel: threading.Event, num_prompt_tokens: int
    ) -> Iterator[Chunk]:
        kind = next(s.kind for s in PROMPTS if s.text == request.messages[-1].content)
        pace_ms = self.speeds.get((request.drafter, kind), 20.0)
        gamma = 0 if request.drafter in (OFF, *self.silent) else request.num_draft_tokens or 0
        stats = TurnStats(num_prompt_tokens)
        yield Chunk("prefill", stats)
        while stats.num_output_tokens < request.max_tokens and not cancel.is_set():
            self.now_s += 2 * pace_ms / 1000.0
            drafter = request.drafter if gamma else OFF
            stats = stats.plus(Step(drafter, gamma, min(1, gamma), 2, 0.0, 2 * pace_ms, 10))
            yield Chunk("decode", stats)
        yield Chunk("done", stats, finish_reason="length")


def measured(backend: Timed, budget_s: float = 10.0) -> TuneUp:
    return tune_up(backend, threading.Event(), lambda found: None, budget_s, lambda: backend.now_s)


SPEEDS = {
    ("draft_model", "code"): 10.0,
    ("draft_model", "stories"): 25.0,
    ("draft_model", "chat"): 20.0,
    ("ngram", "code"): 40.0,
}


def test_each_available_drafter_is_tried_beside_plain_on_every_kind_and_temperature() -> None:
    backend = Timed(speeds=SPEEDS)
    found = measured(backend)
    assert found.is_complete and found.num_planned == len(PROMPTS) * len(TEMPERATURES) * 4
    assert {(run.kind, run.temperature, run.drafter) for run in found.runs} == {
        (kind, temperature, drafter)
        for kind in KINDS for temperature in TEMPERATURES
        for drafter in (OFF, "draft_model", "ngram")
    }  # fmt: skip
    assert "self_quant" not in found.drafters
    order = [run.drafter for run in found.runs]
    assert order == [OFF, "draft_model", "ngram", OFF] * (len(order) // 4), "plain on both sides"
    assert found.gain("draft_model", "code") == 2.0
    assert found.gain("draft_model", "stories") == 0.8


def test_it_takes_about_as_long_as_it_may() -> None:
    backend = Timed(speeds=SPEEDS)
    measured(backend, budget_s=10.0)
    assert 5.0 < backend.now_s < 12.0


def test_a_slow_machine_measures_few_tokens_rather_than_none() -> None:
    found = measured(Timed(speeds={(OFF, kind): 900.0 for kind in KINDS}), budget_s=1.0)
    assert found.is_complete and min(run.num_tokens for run in found.runs) >= 8


def test_the_words_say_where_it_wins_where_it_loses_and_what_follows() -> None:
    said = in_words(measured(Timed(speeds=SPEEDS)))
    assert said == (
        "The small model: 2.0x faster than without drafting on code, as fast on chat, 1.2x slower "
        "on stories."
    )


def test_when_no_drafter_is_faster_the_text_says_so() -> None:
    slow = {(name, kind): 25.0 for name in ("draft_model", "ngram") for kind in KINDS}
    said = in_words(measured(Timed(speeds=slow)))
    assert (
        said.startswith("No drafter is faster here")
        and "1.2x slower than without drafting on" in said
        and "stays off" in said
    )
    assert "x faster" not in said


def test_a_drafter_that_proposed_nothing_has_no_gain() -> None:
    found = measured(Timed(speeds=SPEEDS, silent=("ngram",)))
    assert found.gain("ngram") is None and found.gain("draft_model") is not None
    silent = measured(Timed(silent=("draft_model", "ngram")))
    assert "had anything to propose" in in_words(silent)


def test_without_a_drafter_only_plain_is_measured() -> None:
    found = measured(Timed(names=()))
    assert found.drafters == () and found.tokens_per_second(OFF) == 50.0
    assert "no drafter" in in_words(found)


def test_what_was_measured_before_it_was_skipped_is_the_result() -> None:
    backend, cancel = Timed(speeds=SPEEDS), threading.Event()
    seen: list[TuneUp] = []

    def report(found: TuneUp) -> None:
        seen.append(found)
        if len(found.runs) == 4:
            cancel.set()

    found = tune_up(backend, cancel, report, 10.0, lambda: backend.now_s)
    assert len(found.runs) == 4 and not found.is_complete and seen[-1] == found
    said = in_words(found)
    assert "cancelled after 4 of 24" in said and "what was learnt is kept" in said
    assert "2.0x faster than without drafting on code" in said


def test_skipped_at_once_nothing_is_claimed() -> None:
    cancel = threading.Event()
    cancel.set()
    found = tune_up(Timed(), cancel, lambda found: None)
    assert found.runs == () and "Nothing was measured" in in_words(found)


def test_a_fault_of_the_engine_ends_it_and_what_was_measured_before_stays() -> None:
    @dataclass
    class Fails(Timed):
        def _generate(self, request: Request, *given: Any) -> Iterator[Chunk]:
            for chunk in super()._generate(request, *given):
                is_late = len(self.requests) == 4 and chunk.phase == "done"
                yield replace(chunk, error="Memory ran out.") if is_late else chunk

    seen: list[TuneUp] = []
    backend = Fails(speeds=SPEEDS)
    with pytest.raises(LocalspecError, match="Memory ran out"):
        tune_up(backend, threading.Event(), seen.append, 1e6, lambda: backend.now_s)
    assert len(seen[-1].runs) == 2  # the first request only warms up


def test_one_drafter_of_each_family_is_tried() -> None:
    names = ("ngram", "lookahead", "draft_model", "draft_tree", "early_exit", "medusa", "own")
    assert one_of_each_family(names) == ["ngram", "draft_model", "early_exit", "medusa", "own"]
    assert one_of_each_family(()) == []


def test_a_machine_that_slows_down_meanwhile_is_not_held_against_the_drafter() -> None:
    """Plain before and after stand for the time between them; a restless machine is named."""
    runs = (
        TuneUpRun("code", 0.0, OFF, 10, 100.0, 0),
        TuneUpRun("code", 0.0, "draft_model", 10, 100.0, 5),
        TuneUpRun("code", 0.0, OFF, 10, 300.0, 0),
    )
    found = TuneUp(runs, 3)
    assert found.gain("draft_model", "code") == 2.0 and found.plain_drift == 3.0
    assert "changed by 200 %" in in_words(found)
    calm = TuneUp((*runs[:2], runs[0]), 3)
    assert calm.plain_drift == 1.0 and "Another program" not in in_words(calm)


def test_a_gain_is_a_ratio_of_sums() -> None:
    runs = (
        TuneUpRun("code", 0.0, OFF, 10, 100.0, 0),
        TuneUpRun("code", 0.7, OFF, 10, 200.0, 0),
        TuneUpRun("code", 0.0, "draft_model", 30, 150.0, 5),  # twice as fast
        TuneUpRun("code", 0.7, "draft_model", 10, 200.0, 5),  # as fast
    )
    found = TuneUp(runs, 4)
    assert found.gain("draft_model", "code", 0.0) == 2.0
    assert found.gain("draft_model", "code", 0.7) == 1.0
    assert found.gain("draft_model", "code") == (30 * 10 + 10 * 20) / 350


def test_a_drafter_without_its_plain_twin_has_no_gain() -> None:
    runs = (TuneUpRun("code", 0.0, "draft_model", 30, 150.0, 5),)
    assert TuneUp(runs, 4).gain("draft_model") is None
