"""Calibration measures what it says, may be stopped, and leaves nothing behind."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import MAX_DRAFT_TOKENS, WIDTHS, Costs
from localspec.core import decoding
from localspec.core.decoding import DraftPlan, Outcome, Proposal, chain
from localspec.engine import calibrate as calibration
from localspec.engine import engine as loop
from localspec.engine import sampling
from localspec.engine.calibrate import calibrate, steady_ms
from localspec.engine.engine import Engine
from localspec.engine.sampling import perturbed
from tests.kit.tiny import TableModel

VOCAB = 40


class Clock:
    """Seconds that pass only while somebody sleeps, so that no other program changes them."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


CLOCK = Clock()
sleep = CLOCK.sleep


@pytest.fixture(autouse=True)
def timed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "perf_counter", CLOCK)
    monkeypatch.setattr(loop, "perf_counter", CLOCK)


class Timed(TableModel):
    """Takes 1 ms and 0.5 ms for each token after the first."""

    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        if num_logits is None:
            sleep(0.001 + 0.0005 * (len(tokens) - 1))
        return super().forward(tokens, parents, num_logits)


class TimedDrafter:
    name = "timed"
    shapes_itself = False
    block_length = None
    memory_bytes = 0

    def signal(self, sequence: decoding.Sequence) -> str:
        return "s"

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        sleep(0.002 * plan.num_draft_tokens)
        return chain((5,) * plan.num_draft_tokens)

    def observe(self, sequence: decoding.Sequence, outcome: Outcome) -> None:
        pass


def set_up(capacity: int) -> tuple[Engine, Controller]:
    target: Any = Timed(lambda context: torch.zeros(VOCAB), VOCAB, capacity)
    drafters: dict[str, Any] = {"timed": TimedDrafter()}
    return Engine(target, drafters), Controller(drafters, Costs(), Acceptance(), Costs())


def curve_of(controller: Controller, bucket: int) -> list[float]:
    prices = controller.costs_at(bucket).at(100)
    assert prices is not None
    return prices.rounds("timed", steps_a_token=1.0)[0]


def test_costs_are_those_of_the_machine() -> None:
    engine, controller = set_up(capacity=300)
    phrases = list(calibrate(engine, controller))
    assert any("timed" in phrase for phrase in phrases)
    curve = curve_of(controller, 0)
    assert len(curve) == MAX_DRAFT_TOKENS + 1
    assert curve[0] >= 1.0
    assert curve[15] - curve[0] >= 15 * 2.4  # 2 ms of drafting and 0.5 ms of width a token
    assert controller.costs.is_measured


def test_a_draft_is_timed_after_a_forward_of_the_target_as_in_a_round() -> None:
    engine, controller = set_up(capacity=300)
    seen: list[int] = []
    target: Any = engine.target

    class Counting(TimedDrafter):
        def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
            seen.append(target.num_forwards)
            assert target.cache.tokens == sequence.tokens[:-1]
            return super().propose(sequence, plan)

    engine.drafters["timed"] = Counting()  # type: ignore[index]
    list(calibrate(engine, controller))
    assert len(seen) > 5 and len(set(seen)) == len(seen)


def test_choosing_tokens_with_noise_is_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> torch.Tensor:
        sleep(0.004)
        return perturbed(*arguments)

    monkeypatch.setattr(sampling, "perturbed", slow)
    engine, controller = set_up(capacity=300)
    list(calibrate(engine, controller))
    greedy, sampled = curve_of(controller, 0), curve_of(controller, 3)
    assert sampled[0] - greedy[0] >= 3.0 and sampled[4] - greedy[4] >= 3.0


def test_calibration_leaves_the_cache_empty_and_nothing_learnt() -> None:
    engine, controller = set_up(capacity=300)
    list(calibrate(engine, controller))
    assert engine.target.cache.length == 0
    assert controller.acceptance.snapshot() == Acceptance().snapshot()


def test_a_stopped_calibration_keeps_what_it_measured_and_empties_the_cache() -> None:
    engine, controller = set_up(capacity=300)
    phrases: Any = calibrate(engine, controller)
    next(each for each in phrases if "forwards" not in each)
    phrases.close()
    assert controller.costs.is_measured
    assert engine.target.cache.length == 0


def test_a_small_context_is_measured_too() -> None:
    engine, controller = set_up(capacity=64)
    list(calibrate(engine, controller))
    assert controller.costs.is_measured


@pytest.mark.slow
def test_a_reply_between_two_measurements_changes_nothing_of_what_is_measured() -> None:
    engine, controller = set_up(capacity=300)
    reply = engine.start((5, 6, 7), decoding.SamplingParams(), 4, frozenset())
    found = dict[str, None]()
    for phrase in calibrate(engine, controller):
        found[phrase] = None
        engine.prefill(reply, threading.Event())
    assert list(found) == list(dict.fromkeys(calibrate(*set_up(capacity=300))))
    assert list(calibrate(engine, controller)) == [], "all is measured"


@pytest.mark.slow
def test_a_restored_table_is_measured_anew() -> None:
    engine, controller = set_up(capacity=300)
    whole = list(calibrate(engine, controller))
    again = Controller(controller.drafters, Costs(), Acceptance(), Costs())
    assert again.restore(controller.snapshot())
    assert list(calibrate(engine, again)) == whole


def test_where_rounds_scatter_the_faster_half_counts() -> None:
    batches = iter(
        ([9.0, 2.0, 30.0, 2.1, 14.0], [2.2, 40.0, 2.0, 2.1, 8.0], [2.3, 2.0, 50.0, 9.0, 2.2])
    )
    assert steady_ms(lambda: next(batches)) < 2.4
    quiet = iter(([2.4, 2.0, 2.2, 2.1, 2.3],))
    assert steady_ms(lambda: next(quiet)) == 2.2, "in quiet it is the median, and no more are run"


@pytest.mark.parametrize("disturbed", [range(8, 14), range(20, 32)])
def test_other_programs_do_not_change_what_widths_cost_beside_each_other(
    monkeypatch: pytest.MonkeyPatch, disturbed: range
) -> None:
    """Six replies in a row were said to be 27 to 92 times as fast as plain decoding."""
    true_ms = {1: 2.4, 2: 2.5, 4: 2.8, 8: 3.4, 16: 5.0}
    clock = itertools.count()

    def widths_ms(stage: Any, widths: Any, context: int, sampling: Any) -> list[float]:
        return [true_ms[width] * (40.0 if next(clock) in disturbed else 1.0) for width in widths]

    monkeypatch.setattr(calibration, "widths_ms", widths_ms)
    monkeypatch.setattr(calibration, "QUICKLY_S", 0.0)
    engine, controller = set_up(capacity=300)
    list(calibrate(engine, controller))
    found = {width: controller.costs.verify_ms(width, 128) for width in true_ms}
    assert found == pytest.approx(true_ms)


def test_widths_measured_under_any_load_cost_the_same_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load comes and goes within seconds, and all widths meet it."""
    loads = Random(3)

    def widths_ms(stage: Any, widths: Any, context: int, sampling: Any) -> list[float]:
        load = loads.uniform(1.0, 4.0)
        return [load * (3.0 + 0.2 * width) for width in widths]

    monkeypatch.setattr(calibration, "widths_ms", widths_ms)
    engine, controller = set_up(capacity=300)
    list(calibrate(engine, controller))
    plain_ms = controller.costs.plain_ms(128)
    assert plain_ms is not None
    for width in WIDTHS:
        share = (controller.costs.verify_ms(width, 128) or 0.0) / plain_ms
        assert share == pytest.approx((3.0 + 0.2 * width) / 3.2, rel=0.01)


def test_one_row_costs_no_more_than_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain round was measured at 41 ms beside 15 ms for four tokens, on a busy machine; replies
    were then said to have gained twice as much as they had."""
    measured_ms = {1: 41.0, 2: 18.0, 4: 15.0, 8: 20.0, 16: 21.0}

    def widths_ms(stage: Any, widths: Any, context: int, sampling: Any) -> list[float]:
        return [measured_ms[each] for each in widths]

    monkeypatch.setattr(calibration, "widths_ms", widths_ms)
    engine, controller = set_up(capacity=300)
    list(calibrate(engine, controller))
    found = {width: controller.costs.verify_ms(width, 128) for width in measured_ms}
    assert found == pytest.approx({**measured_ms, 1: 15.0})


def test_what_reading_takes_is_measured_apart_from_a_step() -> None:
    class Reads(TimedDrafter):
        num_read = 0

        def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
            missed, self.num_read = len(sequence.tokens) - self.num_read, len(sequence.tokens)
            sleep(0.0005 * max(0, missed))
            return super().propose(sequence, plan)

    engine, controller = set_up(capacity=300)
    drafters: dict[str, Any] = {"timed": Reads()}
    engine.drafters = controller.drafters = drafters
    list(calibrate(engine, controller))
    assert controller.catch_up.ms("timed", 100, step_ms=2.0) == pytest.approx(50.0, rel=0.5)
    assert controller.costs.draft_ms("timed", 1, 100) == pytest.approx(2.0, rel=0.5)
