"""The clock around forwards, and the host time of a round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localspec.bench import host_time as module
from localspec.bench.arms import parse_arms
from localspec.bench.cases import Case
from localspec.bench.host_time import (
    forwards_clocked,
    host_ms_of_rounds,
    host_time,
    models_of,
)
from localspec.bench.runs import BenchEngine
from tests.bench.tiny_bench import tiny_bench

CASES = [Case("a", "chat", (3, 9, 14, 27, 5), 0), Case("b", "chat", (4, 4, 8, 4, 4, 8), 1)]


@pytest.fixture
def bench() -> BenchEngine:
    return tiny_bench()


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Model:
    """A model whose forward takes two seconds, and asks another one first."""

    def __init__(self, clock: Clock, inner: Model | None = None) -> None:
        self._clock = clock
        self._inner = inner

    def forward(self, tokens: list[int]) -> int:
        if self._inner is not None:
            self._inner.forward(tokens)
        self._clock.now_s += 2.0
        return len(tokens)


def test_the_time_inside_forwards_is_counted_and_nothing_else() -> None:
    clock = Clock()
    model: Any = Model(clock)
    with forwards_clocked([model, model], clock) as spent:
        assert model.forward([1, 2, 3]) == 3
        clock.now_s += 100.0
        model.forward([1])
    assert spent.total_s == 4.0


def test_a_forward_within_a_forward_is_counted_once() -> None:
    clock = Clock()
    inner = Model(clock)
    outer: Any = Model(clock, inner)
    with forwards_clocked([outer, inner], clock) as spent:  # type: ignore[list-item]
        outer.forward([1])
    assert spent.total_s == 4.0


def test_afterwards_the_models_are_as_before_even_after_an_error() -> None:
    model: Any = Model(Clock())
    with pytest.raises(RuntimeError), forwards_clocked([model]):
        raise RuntimeError("stop")
    assert "forward" not in vars(model)
    own = vars(model)["forward"] = lambda tokens: 7
    with forwards_clocked([model]):
        assert model.forward([1]) == 7
    assert vars(model)["forward"] is own


def test_running_several_sequences_counts_as_a_forward_too() -> None:
    class Batched(Model):
        def run(self, segments: list[list[int]]) -> list[int]:
            return [self.forward(tokens) for tokens in segments]

    clock = Clock()
    model: Any = Batched(clock)
    with forwards_clocked([model], clock) as spent:
        assert model.run([[1], [2, 3]]) == [1, 2]
    assert spent.total_s == 4.0 and vars(model).keys() == {"_clock", "_inner"}


def test_every_model_that_runs_is_clocked(bench: BenchEngine) -> None:
    draft: Any = bench.engine.drafters["draft_model"]
    assert models_of(bench) == [bench.engine.target, draft.model]


def test_host_time_leaves_out_what_the_models_take(
    bench: BenchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, target = Clock(), bench.engine.target
    quick = target.forward

    def slow(*arguments: Any, **named: Any) -> torch.Tensor:
        clock.now_s += 5.0
        return quick(*arguments, **named)

    def tick() -> float:
        clock.now_s += 0.001  # whatever the host does takes one tick
        return clock.now_s

    monkeypatch.setattr(module, "perf_counter", tick)
    monkeypatch.setattr(target, "forward", slow)
    clocked = forwards_clocked
    monkeypatch.setattr(module, "forwards_clocked", lambda models: clocked(models, tick))
    (arm,) = parse_arms(("off",))
    found = host_ms_of_rounds(bench, bench.controller, arm, CASES[0], 0.0, 8)
    assert len(found) == 8
    assert all(0.0 < ms < 10.0 for ms in found), "5000 ms a round were inside the forward"


def test_host_time_is_listed_by_arm_and_temperature(bench: BenchEngine) -> None:
    arms = parse_arms(("draft_model@2", "auto"))
    found = host_time(bench, CASES, arms, (0.0, 0.7), max_tokens=8)
    names = [(each["arm"], each["temperature"]) for each in found]
    arms_in_order = ("off", "auto", "draft_model@2")
    assert names == [(arm, t) for arm in arms_in_order for t in (0.0, 0.7)]
    assert all(each["host_ms_per_round"] > 0 and each["num_rounds"] > 0 for each in found)


def test_arms_beyond_the_time_limit_stay_unmeasured(bench: BenchEngine) -> None:
    assert host_time(bench, CASES, parse_arms(("auto",)), (0.0,), limit_s=-1.0) == []


def test_measuring_host_time_teaches_nobody(bench: BenchEngine) -> None:
    host_time(bench, CASES, parse_arms(("draft_model@2",)), (0.0,), max_tokens=8)
    assert bench.controller.acceptance.num_rounds("draft_model", "model", 0) == 0


def test_without_prompts_there_is_no_host_time(bench: BenchEngine) -> None:
    assert host_time(bench, [], parse_arms(()), (0.0,)) == []
