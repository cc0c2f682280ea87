"""The learnt state of one target on one machine: costs, acceptance, and the budget of exploring.

Contract: `learn` takes in a finished round, whichever policy planned it; `option` gives the present
estimate of a drafter; `snapshot` and `restore` keep it over restarts as plain data.

Not here: the choice of a round (controller), measuring costs (calibrate).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from localspec.core import (
    Drafter,
    DraftPlan,
    Growth,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    Verdict,
)
from localspec.engine.acceptance import LENIENT, Acceptance, Situation, bucket_of
from localspec.engine.costs import Costs, CostSnapshot
from localspec.engine.options import Option, option_of

STATE_VERSION = 5
READABLE_VERSIONS = (4, 5)  # version 4 says the same and more
EXPLORED = 0.01  # share of the time that exploring may lose
ALLOWANCE = 16.0  # plain rounds that exploring may lose besides where nothing was learnt before
MOST_SAVED = 30.0  # plain rounds that an unspent budget grows to, and that one is overdrawn by
FIRST_PLAIN_LOOK, LAST_PLAIN_LOOK = 32, 512  # drafted rounds before plain decoding is run again
CATCH_UP_GUESS = 0.05  # of a drafter's step, for each token that it has to read
CATCH_UP_RATE = 0.3  # memory of what catching up took: about three times
NEARLY_CAUGHT_UP = 8  # tokens that a draft step takes along
ASKED_MS = 0.01  # a drafter that took less was not asked


class Budget:
    """What exploring may lose, in ms, in one temperature bucket; and when plain decoding is due to
    be run again, since every gain is measured against it."""

    def __init__(self, allowance_ms: float) -> None:
        self.saved_ms = allowance_ms
        self.num_drafted = 0  # rounds since plain decoding was run
        self._look_after = FIRST_PLAIN_LOOK

    def earn(self, time_ms: float, plain_ms: float) -> None:
        earned_ms = min(MOST_SAVED * plain_ms, self.saved_ms + EXPLORED * time_ms)
        self.saved_ms = max(self.saved_ms, earned_ms)

    def charge(self, lost_ms: float, plain_ms: float) -> None:
        """Pay for a round that explored. One that something else disturbed (a suspended machine,
        swapping) may take minutes, which would end all exploring for hours: the debt is limited."""
        self.saved_ms -= max(0.0, lost_ms)
        self.saved_ms = max(self.saved_ms, -MOST_SAVED * plain_ms)

    @property
    def is_plain_due(self) -> bool:
        return self.num_drafted >= self._look_after

    def look_at_plain(self) -> None:
        self.num_drafted, self._look_after = 0, min(LAST_PLAIN_LOOK, 2 * self._look_after)


class CatchUp:
    """What a drafter takes for each token that it has to read, learnt from drafts after a gap."""

    def __init__(self) -> None:
        self._ms_a_token: dict[str, float] = {}

    def ms(self, drafter: str, num_missed: int, step_ms: float) -> float:
        if num_missed <= NEARLY_CAUGHT_UP:
            return 0.0
        return num_missed * self._ms_a_token.get(drafter, CATCH_UP_GUESS * step_ms)

    def observe(self, drafter: str, num_missed: int, extra_ms: float) -> None:
        found = max(0.0, extra_ms) / num_missed
        known = self._ms_a_token.get(drafter, found)
        self._ms_a_token[drafter] = known + CATCH_UP_RATE * (found - known)


class Learnt:
    """The learnt state of one target on one machine."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        costs: Costs,
        acceptance: Acceptance,
        sampled_costs: Costs | None = None,
        elsewhere: Mapping[str, Any] | None = None,
    ) -> None:
        """costs: of greedy rounds. sampled_costs: of rounds that draw, None: the same. elsewhere:
        a snapshot of the acceptance of these very models on another machine, taken up where
        nothing was learnt here. ValueError, KeyError, TypeError for what is no such snapshot."""
        self.drafters = drafters
        self.costs = costs
        self.sampled_costs = costs if sampled_costs is None else sampled_costs
        self.acceptance = acceptance
        self.elsewhere = elsewhere
        self.catch_up = CatchUp()
        self.random = Random(0)
        self.weighing_ms, self.asking_ms = 0.2, 0.02  # that a plan takes; at first a guess
        self.signals: dict[str, set[Hashable]] = {}  # that each drafter ever gave
        self.guesses_cost: set[str] = set()  # drafters that do not guess for nothing
        self._expected = None if elsewhere is None else Acceptance.restored(elsewhere)
        self._budgets: dict[int, Budget] = {}
        self._is_plain_run = False  # the round before was plain decoding and nothing else

    def begin_turn(self) -> None:
        if self._expected is not None:
            self.acceptance.expect(self._expected)
            self._expected = None
        self.acceptance.begin_turn()
        self._is_plain_run = False

    def costs_at(self, bucket: int) -> Costs:
        """The costs of rounds in this temperature bucket: drawing tokens takes time as well."""
        return self.costs if bucket % LENIENT == 0 else self.sampled_costs

    def is_measured(self, sampling: SamplingParams) -> bool:
        """Whether the costs of such rounds are known: greedy ones are measured first."""
        return self.costs_at(bucket_of(sampling)).is_measured

    def lacks_costs(self, sampling: SamplingParams) -> bool:
        """Whether something that such a turn may choose was never measured here."""
        costs = self.costs_at(bucket_of(sampling))
        return not (costs.is_measured and all(map(costs.knows, self.drafters)))

    def plain_ms(self, sequence: Sequence, context: int) -> float | None:
        """One step of plain decoding of this sequence at this context; None until measured."""
        return self.costs_at(bucket_of(sequence.sampling)).plain_ms(context)

    def budget(self, bucket: int, plain_ms: float) -> Budget:
        """With an allowance where nothing was learnt before."""
        if bucket not in self._budgets:
            is_new = not self.acceptance.is_known(bucket)
            self._budgets[bucket] = Budget(ALLOWANCE * plain_ms if is_new else 0.0)
        return self._budgets[bucket]

    def option(
        self,
        name: str,
        signal: Hashable,
        situation: Situation,
        prices: CostSnapshot,
        fixed_length: int | None = None,
        first_length: int | None = None,
    ) -> Option | None:
        """See option_of; None for a drafter whose step was never measured."""
        if name not in prices.step_ms:
            return None
        belief = self.acceptance.estimate(name, signal, situation)
        steps = self.acceptance.steps_a_token(name)
        shapes_itself = self.drafters[name].shapes_itself
        return option_of(
            name, signal, prices, belief, steps, shapes_itself, fixed_length, first_length
        )

    def growth(self, drafter: str, prices: CostSnapshot, bucket: int, rate: float) -> Growth:
        """What a tree of this drafter may spend at the going rate, tokens per ms. A node's price is
        what its place in the forward takes."""
        nodes = tuple(rate * ms for ms in prices.place_ms)
        chance = partial(self.acceptance.chance, drafter, bucket)
        return Growth(chance, nodes, rate * prices.step_ms[drafter], rate * prices.jump_ms)

    def learn(self, situation: Situation, outcome: Outcome, was_caught_up: bool = True) -> None:
        """was_caught_up: whether the drafter had read all before and took its usual time."""
        step, verdict = outcome.step, outcome.verdict
        self.acceptance.tick(situation.kind)
        costs = self.costs_at(situation.bucket)
        if self._shows_its_cost(step, costs):
            costs.observe(step.num_draft_tokens + 1, step.context_length, step.verify_ms)
        if step.num_draft_tokens == 0:
            return
        num_steps = step.num_draft_steps or step.num_draft_tokens
        if was_caught_up:
            costs.observe_draft(step.drafter, num_steps, step.context_length, step.draft_ms)
        accepted = verdict.accepted_length
        self.acceptance.observe(
            step.drafter,
            step.signal,
            situation,
            # Censored where the path ends at a leaf: nothing further was tried.
            accepted + was_tried_beyond(outcome.proposal, verdict),
            accepted,
            num_nodes=step.num_draft_tokens,
            num_steps=num_steps,
        )
        if step.confidences is not None:
            taken = judged(outcome.proposal, verdict)
            self.acceptance.observe_confidences(
                step.drafter, situation.bucket, step.confidences, taken
            )

    def learn_of_nothing(self, situation: Situation, asked: DraftPlan, step: Step) -> None:
        """A drafter was asked and proposed nothing: a round that gave one token and cost the
        asking. (Where there was no room for a draft it was not asked, which takes no time.)"""
        costs = self.costs_at(situation.bucket)
        step_ms = costs.draft_ms(asked.drafter, 1, step.context_length)
        if step.draft_ms >= ASKED_MS and step_ms is not None:
            steps = step.draft_ms / step_ms
            self.acceptance.observe(
                asked.drafter, asked.signal, situation, 0, 0, num_nodes=0.0, num_steps=steps
            )

    def _shows_its_cost(self, step: Step, costs: Costs) -> bool:
        """Whether a round shows what its width costs. The first plain round after a draft takes
        longer than those after it: the target's weights are no longer where a processor's caches
        had them. It shows something only where even so it took less than believed."""
        if step.num_draft_tokens:
            self._is_plain_run = False
            return True
        was_plain, self._is_plain_run = self._is_plain_run, step.draft_ms < ASKED_MS
        if was_plain and self._is_plain_run:
            return True
        believed_ms = costs.plain_ms(step.context_length)
        return believed_ms is not None and step.verify_ms < believed_ms

    def snapshot(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "costs": self.costs.snapshot(),
            "sampled_costs": self.sampled_costs.snapshot(),
            "acceptance": self.acceptance.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Restore a snapshot; False (and nothing changed) when it is not a valid one."""
        try:
            if state["version"] not in READABLE_VERSIONS:
                return False
            costs = Costs.restored(state["costs"])
            sampled_costs = Costs.restored(state["sampled_costs"])
            acceptance = Acceptance.restored(state["acceptance"])
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError):
            return False
        self.costs, self.sampled_costs, self.acceptance = costs, sampled_costs, acceptance
        return True


@dataclass(frozen=True)
class _Guess:
    """What an unused drafter would have proposed. start: length of the sequence then."""

    option: Option
    start: int
    tokens: tuple[int, ...]


class Peek:
    """Scores the guess of a drafter that is not used, where guessing is free, one at a time."""

    def __init__(self, learnt: Learnt, situation: Situation) -> None:
        self._learnt = learnt
        self._situation = situation
        self._held: _Guess | None = None

    def at(self, sequence: Sequence, unused: list[Option]) -> None:
        """Score the guess that is held, if that is decided, and hold the next one."""
        if self._held is not None and not self._is_scored(self._held, sequence):
            return
        self._held, learnt = None, self._learnt
        for option in unused:
            if option.drafter not in learnt.guesses_cost:
                tokens = learnt.drafters[option.drafter].foresee(sequence)
                if tokens:
                    self._held = _Guess(option, len(sequence.tokens), tokens)
                    return
                learnt.guesses_cost.add(option.drafter)

    def _is_scored(self, guess: _Guess, sequence: Sequence) -> bool:
        """Compare what came since with the guess; False while that does not decide it."""
        came = sequence.tokens[guess.start : guess.start + len(guess.tokens)]
        pairs = enumerate(zip(came, guess.tokens, strict=False))
        agreed = next((i for i, (a, b) in pairs if a != b), len(came))
        if agreed == len(came) < len(guess.tokens):
            return False
        option = guess.option
        self._learnt.acceptance.observe(
            option.drafter, option.signal, self._situation, len(guess.tokens), agreed,
            num_used=option.num_draft_tokens, num_nodes=option.num_draft_tokens, num_steps=1,
        )  # fmt: skip
        return True


def judged(proposal: Proposal, verdict: Verdict) -> list[bool | None]:
    """For each draft token whether it was accepted, None where its parent was not."""
    path = {-1, *verdict.path}
    return [
        node in path if parent in path else None for node, parent in enumerate(proposal.parents)
    ]


def was_tried_beyond(proposal: Proposal, verdict: Verdict) -> bool:
    """Whether a draft token stood after the last accepted one, and was refused."""
    end = verdict.path[-1] if verdict.path else -1
    return end in proposal.parents
