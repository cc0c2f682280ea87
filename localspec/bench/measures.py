"""What is measured apart from the comparison: host time, the cost curve, bandwidth.

Contract: these passes run alone, apart from the paired runs, since measuring costs time itself.
Host time is the time of a round outside the models: planning, sampling, verification, rollback,
learning. The clock shadows CLOCKED on the loaded models for the length of a pass, and waits for
a GPU inside it. `extras` gathers everything as JSON data for `latency.with_extras`. The target's
cache is empty afterwards.

Not here: the runs (stage), readings of the machine (gauges), the report (latency, report).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from localspec.bench.arms import Arm, parse_arms
from localspec.bench.cost_curve import cost_curve
from localspec.bench.gauges import read_bandwidth
from localspec.bench.stage import Case, Stage, begin, own_controller
from localspec.core import AUTO, OFF
from localspec.forward.model import LanguageModel
from localspec.machine.plans import FULL_PRECISIONS
from localspec.machine.shapes import FULL_BYTES, ModelShape, Precision, shape_from_folder

if TYPE_CHECKING:  # suite calls this module
    from localspec.bench.suite import BenchSettings
    from localspec.engine.controller import Controller

HOST_CASES = 2
HOST_TOKENS = 32
HOST_LIMIT_S = 8.0  # arms that are not reached by then stay unmeasured
CLOCKED = ("forward", "run")  # what a model computes in; run: several sequences at once
QUANTISED: Mapping[str, Precision] = {"4-bit": "4-bit", "8-bit": "8-bit"}


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
            if torch.cuda.is_initialized():  # a GPU is only asked so far
                torch.cuda.synchronize()
            return result
        finally:
            spent.depth -= 1
            if spent.depth == 0:
                spent.total_s += now() - started

    return timed


def models_of(stage: Stage) -> list[LanguageModel]:
    """The target and what its drafters draft with."""
    drafters = stage.engine.drafters.values()
    return [stage.engine.target, *(each.model for each in drafters if isinstance(each, HoldsModel))]


def host_ms_of_rounds(
    stage: Stage, controller: Controller, arm: Arm, case: Case, temperature: float, max_tokens: int
) -> list[float]:
    """Host time of each round of one reply, in ms."""
    sampling = case.sampling(temperature)
    begun = begin(stage, controller, arm.drafter, arm.num_draft_tokens, case, sampling, max_tokens)
    found = list[float]()
    with forwards_clocked(models_of(stage)) as spent:
        started, inside_s = perf_counter(), 0.0
        for _ in stage.engine.decode(begun.turn, begun.policy, threading.Event()):
            ended = perf_counter()
            found.append(1000.0 * (ended - started - (spent.total_s - inside_s)))
            started, inside_s = perf_counter(), spent.total_s
    return found


def host_time(
    stage: Stage,
    cases: Sequence[Case],
    arms: Sequence[Arm],
    temperatures: Sequence[float],
    max_tokens: int = HOST_TOKENS,
    limit_s: float = HOST_LIMIT_S,
) -> list[dict[str, Any]]:
    """Median host ms of a round, by arm and temperature; the first case only warms up when there
    is another. An arm that was not reached within limit_s is not listed."""
    started, found = monotonic(), list[dict[str, Any]]()
    for arm in _by_weight(arms):
        for temperature in temperatures:
            if monotonic() - started > limit_s:
                return found
            controller = own_controller(stage)
            by_case = [
                host_ms_of_rounds(stage, controller, arm, case, temperature, max_tokens)
                for case in cases
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


def _by_weight(arms: Sequence[Arm]) -> list[Arm]:
    """`off` and `auto` first, fixed lengths last: time may not suffice for all."""
    return sorted(arms, key=lambda arm: (arm.drafter not in (OFF, AUTO), arm.name.count("@")))


def own_arms(stage: Stage, names: Sequence[str]) -> list[Arm]:
    """Those of the arms that run in this engine here."""
    known = {OFF, AUTO, *stage.engine.drafters}
    return [arm for arm in parse_arms(names) if arm.drafter in known]


def bytes_per_token(stage: Stage) -> dict[str, float] | None:
    """What one plain step reads: weights, and KV for each token of context. None where the
    target's folder or its precision is not known. Not read: the input embedding table, but for
    one row, unless it is the output head too; and experts that are not chosen."""
    if stage.target_folder is None:
        return None
    cache = stage.engine.target.cache
    shape = shape_from_folder(stage.target_folder)
    # What is not quantised; the cache may be kept in another precision.
    full: Precision = "fp32" if stage.precision == "float32" else "bf16"
    precision = FULL_PRECISIONS.get(stage.precision) or QUANTISED.get(stage.precision)
    if precision is None:
        return None
    return {
        "weight_bytes": float(weight_bytes_read(shape, precision, full)),
        "kv_bytes_per_context_token": cache.kv_bytes / cache.shape.capacity,
    }


def weight_bytes_read(shape: ModelShape, precision: Precision, full: Precision) -> int:
    """Bytes of the weights that one token passes through."""
    held = shape.weight_bytes(precision, full)
    table = 0 if shape.is_tied else shape.vocab_size * shape.hidden_size
    chosen = shape.num_experts_per_token / shape.num_experts if shape.num_experts else 1.0
    resting = int(shape.expert_params * (1.0 - chosen))
    return held - (table + resting) * FULL_BYTES[full]


def extras(
    stage: Stage,
    cases: Sequence[Case],
    settings: BenchSettings,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Cost curve, host time and bandwidth of a loaded stage; some seconds on a small model."""
    report("measuring how fast memory can be read")
    bandwidth = read_bandwidth(stage.engine.target.device)
    report("measuring what a round costs by its width")
    costs = cost_curve(stage)
    report("measuring the host's time of a round")
    arms = own_arms(stage, settings.arms)
    max_tokens = min(HOST_TOKENS, settings.max_tokens)
    host = host_time(stage, cases[:HOST_CASES], arms, settings.temperatures, max_tokens)
    stage.engine.target.cache.rollback(0)
    return {
        "costs": costs,
        "host": host,
        "bandwidth_bytes_per_second": bandwidth,
        "bytes_per_token": bytes_per_token(stage),
    }
