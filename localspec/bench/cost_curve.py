"""What a round costs by the number of tokens it checks, measured on this machine.

Contract: real rounds of the real engine, greedy, with a stand-in that drafts as many tokens as
the wanted width. The widths take turns, so that a machine that slows down slows all alike;
`relative` is the median of ratios to a plain step of the same cycle. Costs of drafting are those
the controller measured, absent where it did not. JSON data; the cache is empty afterwards.

Not here: the controller's own table (engine.calibrate, engine.costs).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import median
from time import monotonic
from typing import Any

from localspec.bench.stage import Stage
from localspec.core import DraftPlan, Outcome, SamplingParams
from localspec.core import Sequence as Turn
from localspec.engine.calibrate import StandIn, made_up_text
from localspec.engine.engine import Engine

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
CONTEXTS = (128, 1024)
MIN_CYCLES, MAX_CYCLES = 3, 9
LIMIT_S = 4.0  # at one context; no cycle beyond MIN_CYCLES is begun after it


class WidthsInTurn:
    """A policy that plans each width once and notes what its round cost."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths
        self.verify_ms: list[float] = []

    def plan(self, sequence: Turn) -> DraftPlan:
        return DraftPlan(StandIn.name, self._widths[len(self.verify_ms)] - 1)

    def candidates(self, sequence: Turn) -> tuple[str, ...]:
        return ()

    def observe(self, sequence: Turn, outcome: Outcome) -> None:
        self.verify_ms.append(outcome.step.verify_ms)


def cost_curve(
    stage: Stage, widths: Sequence[int] = WIDTHS, contexts: Sequence[int] = CONTEXTS
) -> dict[str, Any]:
    """The curve at each context that fits, and each drafter's step against a plain one."""
    capacity = stage.engine.target.cache.shape.capacity
    bare = Engine(stage.engine.target, {StandIn.name: StandIn(stage.engine.target)})
    curves = {
        str(context): _curve(bare, widths, context)
        for context in contexts
        # Every token of a round may be accepted, so a cycle needs room for all.
        if context + sum(widths) + 2 <= capacity
    }
    stage.engine.target.cache.rollback(0)
    return {"by_context": curves, "draft": _draft_steps(stage, contexts[0], curves)}


def _curve(engine: Engine, widths: Sequence[int], context: int) -> dict[str, Any]:
    started, cycles = monotonic(), list[list[float]]()
    _cycle(engine, widths, context)  # the first of each width pays for its set-up
    while len(cycles) < MIN_CYCLES or (
        len(cycles) < MAX_CYCLES and monotonic() - started < LIMIT_S
    ):
        cycles.append(_cycle(engine, widths, context))
    by_width = list(zip(*cycles, strict=True))
    relative = [
        median(ms / plain for ms, plain in zip(times, by_width[0], strict=True))
        for times in by_width
    ]
    return {
        "widths": list(widths),
        "num_cycles": len(cycles),
        "verify_ms": [median(times) for times in by_width],
        "relative": relative,
    }


def _cycle(engine: Engine, widths: Sequence[int], context: int) -> list[float]:
    """One round of each width, in ms, after a made-up text of `context` tokens."""
    sequence = made_up_text(context, SamplingParams())
    engine.prefill(sequence, threading.Event())  # all but the first find it in the cache
    policy = WidthsInTurn(widths)
    rounds = engine.decode(sequence, policy, threading.Event())
    for _ in widths:
        next(rounds)
    rounds.close()
    return policy.verify_ms


def _draft_steps(stage: Stage, context: int, curves: dict[str, Any]) -> dict[str, Any]:
    """Each drafter's cost of one drafted token, in ms and in plain steps, None where unknown."""
    costs, curve = stage.controller.costs, curves.get(str(context))
    found = dict[str, Any]()
    for name in stage.engine.drafters:
        step_ms = costs.draft_ms(name, 1, context)
        relative = step_ms / curve["verify_ms"][0] if curve and step_ms is not None else None
        found[name] = {"step_ms": step_ms, "relative": relative}
    return found
