"""Measures on this machine what the controller's costs are made of.

Contract: runs real rounds of the real engine, greedy and sampled, with a stand-in that proposes
as many tokens as the wanted width, at two context lengths, and times each drafter's own `propose`.
All widths take turns. Noise makes rounds slower and never faster: the faster half of the turns
counts, and of a drafter's steps where they scatter. Yields a phrase before each second or so of it,
so that the caller can show it, stop, or let a reply run and go on; what was measured stays, and is
not measured again in this run. Leaves the cache empty.

Not here: the table (costs), refinement while running (controller).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from localspec.controller.acceptance import temperature_bucket
from localspec.controller.controller import Controller
from localspec.controller.costs import WIDTHS
from localspec.core.decoding import (
    DraftPlan,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    chain,
)
from localspec.engine.engine import Engine

REPEATS = 5
SHORT_CONTEXT = 128
LONG_CONTEXT = 1024
KINDS = {SamplingParams(): "greedy", SamplingParams(temperature=0.7, seed=0): "sampled"}
DRAFTED = 4  # draft tokens in one timed `propose`
SCATTER = 1.5  # slowest to fastest of REPEATS rounds in quiet, at most
MORE_TIMES = 2  # as many rounds again, where they scatter more
MOST_REPEATS, QUICKLY_S = 20, 0.4  # more turns of the widths than REPEATS, if they take no longer


class StandIn:
    """A drafter that proposes any tokens: what a round costs does not depend on which."""

    name = "stand-in"
    shapes_itself = False
    block_length: int | None = None
    memory_bytes = 0

    def signal(self, sequence: Sequence) -> str:
        return self.name

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        return chain(tuple(1 + i % 7 for i in range(plan.num_draft_tokens)))

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        pass


@dataclass(eq=False)
class _AtWidths:
    """A policy that plans each of these widths once and keeps what it cost."""

    widths: tuple[int, ...]
    verify_ms: list[float]

    def plan(self, sequence: Sequence) -> DraftPlan:
        return DraftPlan(StandIn.name, self.widths[len(self.verify_ms)] - 1)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        self.verify_ms.append(outcome.step.verify_ms)


def calibrate(engine: Engine, controller: Controller) -> Iterator[str]:
    """Fill controller.costs; yields what is captured or measured next. The graphs come first, since
    the costs must be those of the forwards that will run."""
    yield from engine.capture()
    try:
        yield from _measurements(engine, controller)
    finally:
        engine.target.cache.rollback(0)
    yield from engine.capture()  # what a reply asked for that came between


def _measurements(engine: Engine, controller: Controller) -> Iterator[str]:
    capacity = engine.target.cache.shape.capacity
    stage = Engine(engine.target, {StandIn.name: StandIn()})
    for context in sorted({min(c, capacity // 2) for c in (SHORT_CONTEXT, LONG_CONTEXT)}):
        for sampling, kind in KINDS.items():
            bucket = temperature_bucket(sampling.temperature)
            costs, place = controller.costs_at(bucket), f"{context} tokens of context, {kind}"
            widths = WIDTHS if engine.drafters else WIDTHS[:1]
            # Refused drafts leave one token a round; a token that is right by chance one more.
            fitting = [w for w in widths if context + 2 * len(widths) + 2 * w <= capacity]
            if not all(costs.is_fresh(width, context) for width in fitting):
                phrase = f"measuring forwards of the target, {place}"
                yield phrase
                turns = list[list[float]]()
                for turn in width_turns(stage, fitting, context, sampling):
                    turns.append(turn)
                    yield phrase
                for width, ms in verify_ms_of(fitting, turns).items():
                    costs.set_verify(width, context, ms)
            new = [name for name in engine.drafters if not costs.is_fresh(name, context)]
            for name in new:
                yield f"measuring {name}, {place}"
                sequence = made_up_text(stage, context, sampling)
                stage.prefill(sequence, threading.Event())
                step_ms = _draft_step_ms(engine, controller, name, sequence)
                costs.set_draft_step(name, context, step_ms)


def steady_ms(times: Callable[[], list[float]]) -> float:
    """The cost behind what times() gives at a time: the median, of the faster half where they
    scatter."""
    found = times()
    if max(found) <= SCATTER * min(found):
        return median(found)
    found = sorted(sum((times() for _ in range(MORE_TIMES)), found))
    return median(found[: (len(found) + 1) // 2])


def made_up_text(engine: Engine, context: int, sampling: SamplingParams) -> Sequence:
    """A made-up text of `context` tokens and a root; no end-of-text can end it."""
    prompt = tuple(1 + (7 * i) % 31 for i in range(context + 1))
    return engine.start(prompt, sampling, 10_000, frozenset())


def verify_ms_of(widths: list[int], turns: list[list[float]]) -> dict[int, float]:
    """The cost of each width, by `width_turns` of them. One row costs no more than several: what
    says so is noise that the few turns did not share."""
    calm = sorted(turns[1:], key=sum)[: len(turns) // 2]  # the first turn warms up
    found = dict(zip(widths, map(median, zip(*calm, strict=True)), strict=True))
    return {width: min(found.values()) if width == 1 else ms for width, ms in found.items()}


def width_turns(
    stage: Engine, widths: list[int], context: int, sampling: SamplingParams
) -> Iterator[list[float]]:
    """What each width took, in turn after turn of them all. They take turns so that they meet the
    same load: what they cost beside each other is right on a busy machine too. A turn begins with a
    plain round that is not counted, since plain rounds follow each other."""
    started, num_turns = perf_counter(), 0
    while num_turns <= REPEATS or (
        num_turns <= MOST_REPEATS and perf_counter() - started < QUICKLY_S
    ):
        yield widths_ms(stage, (1, *widths), context, sampling)[1:]
        num_turns += 1


def widths_ms(
    stage: Engine, widths: tuple[int, ...], context: int, sampling: SamplingParams
) -> list[float]:
    """What checking each width took, one round after another, after `context` tokens of text.
    stage: an engine whose only drafter is a StandIn."""
    policy = _AtWidths(widths, [])
    sequence = made_up_text(stage, context, sampling)
    stage.prefill(sequence, threading.Event())
    rounds = stage.decode(sequence, policy, threading.Event())
    for _ in widths:
        next(rounds)
    rounds.close()
    return policy.verify_ms


def _draft_step_ms(engine: Engine, controller: Controller, name: str, sequence: Sequence) -> float:
    """Cost of one step of the drafter's `propose` after a forward of the target, as in a round, the
    drafter already caught up: of the demo models a draft takes twice as long as one after another,
    because the target's weights fill the processor's caches. The first `propose` shows what
    catching up takes."""
    drafter, plan = engine.drafters[name], DraftPlan(name, DRAFTED)
    context = len(sequence.tokens) - 1

    def draft() -> tuple[float, int]:
        engine.target.cache.rollback(context)
        engine.target.forward(sequence.tokens[-1:])
        engine.target.cache.rollback(context)
        started = perf_counter()
        proposal = drafter.propose(sequence, plan)
        return 1000.0 * (perf_counter() - started), max(1, proposal.num_draft_steps)

    def step_ms() -> float:
        took_ms, num_steps = draft()
        return took_ms / num_steps

    first_ms, num_steps = draft()  # reads the text, and warms up
    found = steady_ms(lambda: [step_ms() for _ in range(REPEATS)])
    num_missed = controller.catch_up.read(name, sequence, context)
    controller.catch_up.observe(name, num_missed, first_ms - num_steps * found)
    engine.target.cache.rollback(context)
    return found
