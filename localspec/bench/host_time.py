"""The host time of a round: what it takes outside the models.

Contract: planning, sampling, verification, rollback and learning count; forwards do not. It is
measured in passes of its own, since the clock costs time: for the length of a pass it shadows the
methods CLOCKED of the loaded models, and waits for a GPU inside them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import monotonic, perf_counter
from typing import Any, Protocol, runtime_checkable

import torch

from localspec.bench.arms import Arm
from localspec.bench.cases import Case
from localspec.bench.runs import BenchEngine, own_controller, prefilled_turn
from localspec.core import AUTO, OFF
from localspec.engine.controller import Controller
from localspec.forward.model import LanguageModel

NUM_CASES = 2
MAX_TOKENS = 32
LIMIT_S = 8.0  # arms that are not reached by then stay unmeasured
CLOCKED = ("forward", "run")  # what a model computes in; run: several sequences at once


@runtime_checkable
class HoldsModel(Protocol):
    """A drafter that drafts with a model of its own."""

    model: LanguageModel


@dataclass
class ForwardTime:
    """Seconds inside forwards so far. depth: forwards under way, since one may call another."""

    total_s: float = 0.0
    depth: int = 0


@contextmanager
def forwards_clocked(
    models: Iterable[LanguageModel], now: Callable[[], float] = perf_counter
) -> Iterator[ForwardTime]:
    """Count the time inside these models until the block ends."""
    spent = ForwardTime()
    calls = dict.fromkeys(
        (model, name) for model in models for name in CLOCKED if hasattr(model, name)
    )
    before = {(model, name): vars(model).get(name) for model, name in calls}
    for model, name in calls:
        vars(model)[name] = _clocked(getattr(model, name), spent, now)
    try:
        yield spent
    finally:
        for (model, name), own in before.items():
            if own is None:
                del vars(model)[name]
            else:
                vars(model)[name] = own


def _clocked(
    forward: Callable[..., Any], spent: ForwardTime, now: Callable[[], float]
) -> Callable[..., Any]:
    def timed(*arguments: Any, **named: Any) -> Any:
        spent.depth += 1
        started = now()
        try:
            result = forward(*arguments, **named)
            if torch.cuda.is_initialized():  # a GPU has only been asked so far
                torch.cuda.synchronize()
            return result
        finally:
            spent.depth -= 1
            if spent.depth == 0:
                spent.total_s += now() - started

    return timed


def models_of(bench: BenchEngine) -> list[LanguageModel]:
    """The target and what its drafters draft with."""
    drafters = bench.engine.drafters.values()
    return [bench.engine.target, *(each.model for each in drafters if isinstance(each, HoldsModel))]


def host_time(
    bench: BenchEngine,
    cases: Sequence[Case],
    arms: Sequence[Arm],
    temperatures: Sequence[float],
    max_tokens: int = MAX_TOKENS,
    limit_s: float = LIMIT_S,
) -> list[dict[str, Any]]:
    """Median host ms of a round, by arm and temperature. Of NUM_CASES cases all but the first,
    which warms up, are counted. An arm that was not reached within limit_s is not listed."""
    started, found = monotonic(), list[dict[str, Any]]()
    # `off` and `auto` first, fixed lengths last: the time may not suffice for all.
    ordered = sorted(arms, key=lambda arm: (arm.drafter not in (OFF, AUTO), "@" in arm.name))
    for arm in ordered:
        for temperature in temperatures:
            if monotonic() - started > limit_s:
                return found
            controller = own_controller(bench)
            by_case = [
                host_ms_of_rounds(
                    bench, controller, arm, case, temperature, min(MAX_TOKENS, max_tokens)
                )
                for case in cases[:NUM_CASES]
            ]
            rounds = [ms for each in (by_case[1:] or by_case) for ms in each]
            if rounds:
                found.append(
                    {
                        "arm": arm.name,
                        "temperature": temperature,
                        "host_ms_per_round": median(rounds),
                        "num_rounds": len(rounds),
                    }
                )
    return found


def host_ms_of_rounds(
    bench: BenchEngine,
    controller: Controller,
    arm: Arm,
    case: Case,
    temperature: float,
    max_tokens: int,
) -> list[float]:
    """Host time of each round of one reply, in ms."""
    ready = prefilled_turn(
        bench, controller, arm.drafter, arm.num_draft_tokens, case, case.sampling(temperature),
        max_tokens,
    )  # fmt: skip
    found = list[float]()
    with forwards_clocked(models_of(bench)) as spent:
        started, inside_s = perf_counter(), 0.0
        for _ in bench.engine.decode(ready.turn, ready.policy, threading.Event()):
            ended = perf_counter()
            found.append(1000.0 * (ended - started - (spent.total_s - inside_s)))
            started, inside_s = perf_counter(), spent.total_s
    return found
