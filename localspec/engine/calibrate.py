"""Measures on this machine what the controller's costs are made of.

Contract: runs real rounds of the real engine, greedy and sampled, with a stand-in that proposes
as many tokens as the wanted width, at two context lengths, and times each drafter's own `propose`.
Every cell is the median of REPEATS rounds after one warm-up. Yields a phrase before each
measurement, so that the caller can show it or stop; what was measured stays, and is not measured
again in this run. Leaves the cache empty.

Not here: the table (costs), refinement while running (controller).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from localspec.core import (
    DraftPlan,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    chain,
)
from localspec.engine.acceptance import temperature_bucket
from localspec.engine.controller import Controller
from localspec.engine.costs import WIDTHS
from localspec.engine.engine import Engine
from localspec.forward.model import LanguageModel

REPEATS = 5
SHORT_CONTEXT = 128
LONG_CONTEXT = 1024
KINDS = {SamplingParams(): "greedy", SamplingParams(temperature=0.7): "sampled"}
DRAFTED = 4  # draft tokens in one timed `propose`


class StandIn:
    """A drafter that proposes any tokens: what a round costs does not depend on which."""

    name = "stand-in"
    shapes_itself = False
    memory_bytes = 0

    def signal(self, sequence: Sequence) -> str:
        return self.name

    def prepare(self, sequence: Sequence) -> None:
        pass

    def foresee(self, sequence: Sequence) -> tuple[int, ...]:
        return ()

    def __init__(self, target: LanguageModel) -> None:
        # Drawn tokens bring the rows they were drawn from, and judging those takes time.
        size = target.vocab_size
        self._rows = torch.full((max(WIDTHS), size), 1.0 / size, device=target.device)

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        count = plan.num_draft_tokens
        is_drawn = sequence.sampling.temperature > 0.0 and count > 0
        tokens = tuple(1 + i % 7 for i in range(count))
        return chain(tokens, self._rows[:count] if is_drawn else None)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        pass


@dataclass
class _AtWidth:
    """A policy that always plans one width and keeps what it cost."""

    width: int
    verify_ms: list[float]

    def plan(self, sequence: Sequence) -> DraftPlan:
        return DraftPlan(StandIn.name, self.width - 1)

    def candidates(self, sequence: Sequence) -> tuple[str, ...]:
        return ()

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        self.verify_ms.append(outcome.step.verify_ms)


def calibrate(engine: Engine, controller: Controller) -> Iterator[str]:
    """Fill controller.costs; yields what is measured next."""
    try:
        yield from _measurements(engine, controller)
    finally:
        engine.target.cache.rollback(0)


def _measurements(engine: Engine, controller: Controller) -> Iterator[str]:
    capacity = engine.target.cache.shape.capacity
    stage = Engine(engine.target, {StandIn.name: StandIn(engine.target)})
    for context in sorted({min(c, capacity // 2) for c in (SHORT_CONTEXT, LONG_CONTEXT)}):
        for sampling, kind in KINDS.items():
            bucket = temperature_bucket(sampling.temperature)
            costs, place = controller.costs_at(bucket), f"{context} tokens of context, {kind}"
            # Rejected drafts leave one token a round; drawn ones may be taken, one a round more.
            fitting = [w for w in WIDTHS if context + (REPEATS + 2) * w <= capacity]
            for width in _ends_first(fitting):
                if costs.is_fresh(width, context):
                    continue
                yield f"measuring {width} tokens at once, {place}"
                costs.set_verify(width, context, _verify_ms(stage, width, context, sampling))
            for name in engine.drafters:
                if costs.is_fresh(name, context):
                    continue
                yield f"measuring {name}, {place}"
                sequence = made_up_text(context, sampling)
                stage.prefill(sequence, threading.Event())
                costs.set_draft_step(name, context, _draft_step_ms(engine, name, sequence))


def _ends_first(widths: list[int]) -> list[int]:
    """A message that comes between two measurements finds what lies between the ends priced by
    both, and nothing beyond them."""
    return [*widths[:1], *widths[-1:], *widths[1:-1]] if len(widths) > 1 else widths


def made_up_text(context: int, sampling: SamplingParams) -> Sequence:
    """A made-up text of `context` tokens and a root; no end-of-text can end it."""
    rng = torch.Generator().manual_seed(0)
    prompt = tuple(1 + (7 * i) % 31 for i in range(context + 1))
    return Sequence(prompt, sampling, 10_000, frozenset(), rng)


def _verify_ms(stage: Engine, width: int, context: int, sampling: SamplingParams) -> float:
    policy = _AtWidth(width, [])
    sequence = made_up_text(context, sampling)
    stage.prefill(sequence, threading.Event())
    rounds = stage.decode(sequence, policy, threading.Event())
    for _ in range(REPEATS + 1):
        next(rounds)
    rounds.close()
    return median(policy.verify_ms[1:])


def _draft_step_ms(engine: Engine, name: str, sequence: Sequence) -> float:
    """Median cost of one step of the drafter's `propose`, the drafter already caught up."""
    drafter = engine.drafters[name]
    plan = DraftPlan(name, DRAFTED)
    times = []
    for _ in range(REPEATS + 1):
        engine.target.cache.rollback(len(sequence.tokens) - 1)
        started = perf_counter()
        proposal = drafter.propose(sequence, plan)
        elapsed_ms = 1000.0 * (perf_counter() - started)
        times.append(elapsed_ms / max(1, proposal.num_draft_steps))
    engine.target.cache.rollback(len(sequence.tokens) - 1)
    return median(times[1:])
