"""Plays one policy through a world, round by round, with a clock of its own.

The real controller and its policies are driven through their public interface (plan,
observe, with real Sequence, Step and Verdict); drafters are stand-ins that read the world. Time is
what the world's costs say, so every policy meets the same text at the same prices and a
difference is the policy's alone. The controller sees each round's time disturbed by JITTER, by the
same numbers for every policy. Host time does not depend on the load of this machine: the calls of
functions in what the policy is asked (plan, keep_drafting, observe) are counted, CALL_US each.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from cProfile import Profile
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from random import Random
from typing import Any

import torch

from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import MAX_DRAFT_TOKENS, Costs
from localspec.controller.hindsight import WrittenReply, judge
from localspec.controller.policy import policy_of
from localspec.core.decoding import (
    OFF,
    Drafter,
    DraftPlan,
    Outcome,
    Policy,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    Verdict,
    chain,
)
from localspec.core.filling import Fill, Filler, Filling, filled
from localspec.engine.noise import GumbelNoise
from tests.worlds.world import Stretch, Track, World

RIGHT, WRONG, END = 1, 0, 2  # the only tokens there are; END: of text
NO_LOGITS = torch.empty(0)  # a world has none
JITTER = 0.03  # spread of a measured round around its cost
NUM_DISTURBANCES = 8192  # Disturbances of a game: they repeat after half as many tokens.
# The time of one call of a function, in microseconds. Planning took 0.2 to 0.3 a call in a row, and
# 0.6 to 1.2 where 64 MB were read before each round, as a forward pass reads weights.
CALL_US = 0.5


@dataclass(frozen=True)
class Played:
    """What a policy made of a world. host_us: the mean time of a round in the policy, by the calls
    that it makes; None where they were not counted."""

    num_tokens: int
    ms: float
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_probes: int
    host_us: float | None

    @property
    def tokens_per_second(self) -> float:
        return 1000.0 * self.num_tokens / self.ms


class WorldDrafter:
    """A drafter that says what the world has it say."""

    memory_bytes = 0
    shapes_itself = False
    block_length = None

    def __init__(self, name: str, track: Track) -> None:
        self.name = name
        self._track = track
        self._offset = 0  # from a place in the sequence to a place in the text
        self._end = 0

    def begin(self, turn: Stretch) -> None:
        self._offset, self._end = turn.start - turn.prompt_length, turn.start + turn.length

    def signal(self, sequence: Sequence) -> Hashable:
        return self._track.signals[self._place(sequence)]

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        place = self._place(sequence)
        if self._track.signals[place] is None:
            return Proposal()
        end = min(self._end, place + plan.num_draft_tokens)
        confidences = self._track.confidences
        if confidences is None:
            return chain(self._guess(place, end))
        said = confidences[place:end]
        if plan.keep_drafting is not None:
            asked = enumerate(said)
            stop = next((i for i, c in asked if not plan.keep_drafting(i, c)), len(said) - 1)
            said = said[: stop + 1]
        return chain(self._guess(place, place + len(said)), said)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Nothing to learn."""

    def _place(self, sequence: Sequence) -> int:
        return len(sequence.tokens) + self._offset

    def _guess(self, start: int, end: int) -> tuple[int, ...]:
        if self._track.reach is not None:
            right = self._track.num_right(start, end - start)
            return (RIGHT,) * right + (WRONG,) * (end - start - right)
        return tuple(RIGHT if each else WRONG for each in self._track.is_right[start:end])


class WorldLookup(WorldDrafter):
    """A lookup of the world, which may go on where the chain of another drafter ends."""

    def fill(self, sequence: Sequence, proposal: Proposal, filling: Filling) -> Fill:
        track, start = self._track, self._place(sequence) + len(proposal.tokens)
        end = min(self._end, start + MAX_DRAFT_TOKENS)
        if start >= end or track.signals[start] is None or track.confidences is None:
            return Fill(self.name, None, Proposal())
        followers = zip(self._guess(start, end), track.confidences[start:end], strict=True)
        return Fill(self.name, track.signals[start], filling.paid(proposal, followers))


class FixedArm:
    """One drafter at one length, with nothing to learn."""

    def __init__(self, drafter: str, length: int) -> None:
        self._plan = DraftPlan(drafter, length)

    def plan(self, sequence: Sequence) -> DraftPlan:
        return self._plan

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        pass


def readers_of(world: World) -> dict[str, WorldDrafter]:
    """The world's drafters that have a price."""
    return {
        name: (WorldLookup if name in world.lookups else WorldDrafter)(name, world.tracks[name])
        for name in world.priced
    }


def controller_of(world: World, readers: Mapping[str, WorldDrafter]) -> Controller:
    """A controller that has measured this machine and learnt nothing else."""
    believed = world.costs if world.believed is None else world.believed
    costs = Costs.restored(believed)
    return Controller(dict(readers), costs, Acceptance(), shipped=world.shipped)


def play_fixed(world: World, drafter: str, length: int) -> Played:
    readers = readers_of(world)
    game = Game(world, readers, Random(0))
    for turn in world.turns:
        game.turn(turn, FixedArm(drafter, length))
    return game.result()


def play_adaptive(
    world: World,
    requested: str,
    seed: int,
    charges_host: bool = False,
    reviews: bool = False,
) -> Played:
    """requested: AUTO, or a drafter whose length the controller chooses. charges_host: whether
    planning and learning are counted, and added to the rounds. reviews: whether the drafters that
    drafted little of a turn are judged by it in hindsight, which takes no time here."""
    readers = readers_of(world)
    controller = controller_of(world, readers)
    game = Game(world, readers, Random(seed), charges_host)
    for turn in world.turns:
        num_before = len(game.steps)
        policy = policy_of(controller, game.sampling, requested, None, kind=turn.workload)
        written = game.turn(turn, policy)
        if reviews:
            review(controller, readers, written, turn.workload, game.steps[num_before:])
    return game.result()


def review(
    controller: Controller,
    readers: Mapping[str, WorldDrafter],
    written: Sequence,
    kind: str,
    steps: list[Step],
) -> None:
    """Teach what each drafter would have had accepted of this turn, as the backend does it."""
    if written.tokens[-1] == END:  # a world has no place for it: it comes with the last token
        written.tokens.pop()
    rounds_at = defaultdict[str, set[int]](set)
    for step in steps:
        rounds_at[step.drafter].add(step.context_length)
    reply = WrittenReply(written, kind, _within_reach, rounds_at)
    for reader in readers.values():
        judge(controller, reader, reply)


def _within_reach(plan: DraftPlan, sequence: Sequence) -> DraftPlan:
    return plan.shortened(max(0, sequence.num_remaining - 1))


class _Watch:
    """Counts the calls of functions in what it is asked to call. is_on: False counts nothing."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._clock = count()  # advances at each call and at each return
        self._profile = Profile(timer=self._clock.__next__, timeunit=1)
        self._num_events = 0

    @property
    def ms(self) -> float:
        return self._num_events / 2 * CALL_US / 1000.0

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if not self._is_on:
            return call(*arguments)
        before = next(self._clock)
        self._profile.enable()
        try:
            return call(*arguments)
        finally:
            self._profile.disable()
            self._num_events += next(self._clock) - before - 1


class Game:
    """One policy's way through a world. steps, reasons: of the rounds so far."""

    def __init__(
        self,
        world: World,
        drafters: Mapping[str, Drafter],
        random: Random,
        charges_host: bool = False,
        jitter: float = JITTER,
    ) -> None:
        self.steps = list[Step]()
        self.reasons = list[str]()
        self._drafters = drafters
        self._disturbances = [random.gauss(1.0, jitter) for _ in range(NUM_DISTURBANCES)]
        self._world = world
        self._place = 0  # in the text
        self._end = sys.maxsize  # where the turn ends
        self._read: dict[str, int] = {}  # tokens of the turn that each drafter has read
        self._watch = _Watch(charges_host)
        self._truth = Costs.restored(world.costs)
        self._noise = GumbelNoise(0, 1, torch.device("cpu"))  # no model asks for it
        self.sampling = SamplingParams(temperature=world.temperature)
        self._ms = 0.0

    def turn(self, turn: Stretch, policy: Policy) -> Sequence:
        """Play a turn; return what was written."""
        # No two prompts begin alike: what a drafter has read of one is of no use for another.
        prompt = (END + 1 + turn.start, *(RIGHT,) * (turn.prompt_length - 1))
        max_tokens = self._world.max_tokens or turn.length
        sequence = Sequence(prompt, self.sampling, max_tokens, frozenset({END}), self._noise)
        self._end = turn.start + turn.length
        for drafter in self._drafters.values():
            if isinstance(drafter, WorldDrafter):
                drafter.begin(turn)
        self._place = turn.start
        self._read.clear()
        while sequence.finish_reason is None:
            self.round(sequence, policy)
        return sequence

    def result(self) -> Played:
        steps, host_ms = self.steps, self._watch.ms
        return Played(
            num_tokens=sum(step.num_output_tokens for step in steps),
            ms=self._ms + host_ms,
            num_rounds=len(steps),
            num_draft_tokens=sum(step.num_draft_tokens for step in steps),
            num_accepted_tokens=sum(step.num_accepted_tokens for step in steps),
            num_probes=sum(step.is_probe for step in steps),
            host_us=1000.0 * host_ms / len(steps) if host_ms else None,
        )

    def round(self, sequence: Sequence, policy: Policy) -> None:
        """As the engine does it."""
        context = len(sequence.tokens) - 1
        watch, before_ms = self._watch, self._watch.ms
        plan = watch.timed(policy.plan, sequence)
        plan = _within_reach(plan, sequence)
        if plan.keep_drafting is not None:
            plan = replace(plan, keep_drafting=partial(watch.timed, plan.keep_drafting))
        proposal = Proposal()
        if plan.drafter != OFF and plan.num_draft_tokens > 0:
            proposal = self._drafters[plan.drafter].propose(sequence, plan)
        filling = plan.filling
        if filling is not None and proposal.confidences:
            lookup = self._drafters[filling.drafter]
            assert isinstance(lookup, Filler)
            proposal = filled(proposal, plan.drafter, lookup.fill(sequence, proposal, filling))
        tokens = proposal.tokens
        accepted = next((i for i, token in enumerate(tokens) if token == WRONG), len(tokens))
        is_whole = self._place + accepted + 1 >= self._end
        kept = sequence.append(
            [RIGHT] * min(accepted + 1, self._end - self._place) + [END] * is_whole
        )
        plan_ms = watch.ms - before_ms
        step = self._step(plan, proposal, accepted, len(kept), context, plan_ms)
        verdict = Verdict(tuple(range(accepted)), RIGHT)
        outcome = Outcome(step, proposal, verdict, NO_LOGITS)
        watch.timed(policy.observe, sequence, outcome)
        self._place += len(kept)
        self.steps.append(step)
        self.reasons.append(plan.reason)

    def _step(
        self, plan: DraftPlan, proposal: Proposal, accepted: int, num_output: int, context: int,
        plan_ms: float,
    ) -> Step:  # fmt: skip
        count = len(proposal.tokens)
        verify_ms = self._truth.verify_ms(count + 1, context)
        num_steps = proposal.num_draft_steps
        draft_ms = self._draft_ms(plan.drafter, num_steps, context) if count else 0.0
        assert verify_ms is not None and draft_ms is not None, "every reader has a price"
        slowness = self._world.slowness(self._place)
        verify_ms, draft_ms = verify_ms * slowness, draft_ms * slowness
        self._ms += verify_ms + draft_ms
        return Step(
            drafter=plan.drafter if count else OFF,
            num_draft_tokens=count,
            num_accepted_tokens=accepted,
            num_output_tokens=num_output,
            draft_ms=self._disturbed(draft_ms, 2 * self._place),
            verify_ms=self._disturbed(verify_ms, 2 * self._place + 1),
            context_length=context,
            is_probe=plan.is_probe and (count > 0 or plan.drafter == OFF),
            signal=plan.signal,
            policy_ms=plan_ms,
        )

    def _draft_ms(self, drafter: str, num_steps: int, context: int) -> float | None:
        """With reading the tokens since the drafter drafted last."""
        num_missed = context + 1 - self._read.get(drafter, 0)
        self._read[drafter] = context + 1
        return self._truth.draft_ms(drafter, num_steps + self._world.catch_up * num_missed, context)

    def _disturbed(self, ms: float, index: int) -> float:
        """Return the time as measured: every policy meets the same disturbance at a place."""
        return ms * max(0.5, self._disturbances[index % NUM_DISTURBANCES])
