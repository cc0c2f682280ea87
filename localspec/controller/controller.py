"""What is known of one target on one machine: costs, acceptance, and what trying things has cost.

Contract: `observe` learns from a finished round, whichever policy planned it. `option` gives the
present estimate of a drafter. `snapshot` and `restore` keep the state over restarts as plain data.
States are kept by `identity`, one for each combination of models, precision and machine;
`measurements` reads them for the planner. No torch.

Not here: the choice of a round (policy), measuring costs (calibrate).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

from localspec.controller.acceptance import LENIENT, Acceptance, Situation, bucket_of
from localspec.controller.catch_up import CatchUp
from localspec.controller.costs import Costs, was_asked
from localspec.controller.options import Option, option_of
from localspec.controller.prices import Prices
from localspec.core.decoding import (
    OFF,
    Drafter,
    DraftPlan,
    Growth,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    Verdict,
)
from localspec.core.filling import Filler, Filling, own_part
from localspec.core.precisions import PRECISIONS
from localspec.core.speculation import Measurement

STATE_VERSION = 5
READABLE_VERSIONS = (4, 5)  # version 4 has the same fields and more
UNREADABLE = (LookupError, ValueError, TypeError, AttributeError, OverflowError)
NO_DRAFT = "no draft"
# In the name of a combination whose target has its experts in the RAM beside a GPU.
SPLIT_TARGET = "experts in the RAM"

EXPLORED = 0.01  # Exploration may lose this share of the time.
ALLOWANCE = 24.0  # It may lose so many plain rounds at the start, where no acceptance is known.
KNOWN_ALLOWANCE = 2.0  # It may lose so many where acceptance is known: one look at plain decoding.
MOST_SAVED = 30.0  # An unspent budget grows to so many plain rounds; a debt is no larger.
FIRST_PLAIN_LOOK = 16  # Plain decoding is measured again after so many drafted rounds.
LAST_PLAIN_LOOK = 512  # It is measured ever more rarely, but after so many drafted rounds at last.


class Budget:
    """What trying things may cost in one temperature bucket, in plain rounds. saved: what
    exploration may still lose against the best choice known. It also says when a plain round is due
    to be measured, since every gain is relative to it. num_drafted: rounds since one was."""

    def __init__(self, allowance: float) -> None:
        self.saved = allowance
        self.num_drafted = 0
        self._look_after = FIRST_PLAIN_LOOK

    def earn(self, passed: float) -> None:
        """Time passed, of which exploration may lose a share."""
        if self.saved < MOST_SAVED:
            self.saved += EXPLORED * passed

    def explored(self, gained: float) -> None:
        """A round explored and gained so much over the best choice known, mostly less than 0. A
        round that something else disturbed may take minutes, so the debt is limited."""
        most = max(MOST_SAVED, self.saved)
        self.saved = max(-MOST_SAVED, min(most, self.saved + gained))

    @property
    def is_plain_due(self) -> bool:
        return self.num_drafted >= self._look_after

    def look_at_plain(self) -> None:
        self.num_drafted, self._look_after = 0, min(LAST_PLAIN_LOOK, 2 * self._look_after)


class Controller:
    """The learnt state of one target on one machine. Policies read it and teach it."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        costs: Costs,
        acceptance: Acceptance,
        sampled_costs: Costs | None = None,
        shipped: Mapping[str, Any] | None = None,
        shared: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """costs: of greedy rounds. sampled_costs: of rounds that draw, None: the same. shipped: a
        snapshot of the acceptance of these models on another machine, used where nothing was
        observed here. shared: see CatchUp. Raises ValueError, KeyError, TypeError for what is no
        such snapshot."""
        self.drafters = drafters
        self._fillers = _fillers(drafters)
        self.costs = costs
        self.sampled_costs = costs if sampled_costs is None else sampled_costs
        self.acceptance = acceptance
        self.shipped = shipped
        self.shared = shared
        self.catch_up = CatchUp(shared)
        self.random = Random(0)
        self.signals: dict[str, set[Hashable]] = {}  # that each drafter ever gave
        self.second_looks = Counter[str]()  # rounds at drafters that their costs rule out
        self._expected = None if shipped is None else Acceptance.restored(shipped)
        self._budgets: dict[int, Budget] = {}

    def beside(self, drafters: Mapping[str, Drafter]) -> Controller:
        """The controller of a sequence that is decoded beside this one's, with drafters of its own.
        All that is learnt is shared; the turn under way is not. Ask after `restore`."""
        found = copy(self)
        found.drafters, found._fillers = drafters, _fillers(drafters)
        found.acceptance, found.catch_up = self.acceptance.beside(), self.catch_up.beside()
        return found

    def begin_turn(self) -> None:
        if self._expected is not None:
            self.acceptance.expect(self._expected)
            self._expected = None
        self.acceptance.begin_turn()
        self.costs.begin_turn()
        self.sampled_costs.begin_turn()

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

    def load(self, sampling: SamplingParams) -> float:
        """How many times its measured cost such a round takes now."""
        return self.costs_at(bucket_of(sampling)).load.value

    def budget(self, bucket: int) -> Budget:
        """Where acceptance is known, drafting may begin at once, but a plain round is due: the
        costs were measured while nothing was shown, and a page beside the engine changes them."""
        if bucket not in self._budgets:
            is_known = self.acceptance.is_known(bucket)
            self._budgets[bucket] = Budget(KNOWN_ALLOWANCE if is_known else ALLOWANCE)
            self._budgets[bucket].num_drafted = FIRST_PLAIN_LOOK if is_known else 0
        return self._budgets[bucket]

    def option(
        self,
        name: str,
        signal: Hashable,
        situation: Situation,
        prices: Prices,
        fixed_length: int | None = None,
        first_length: int | None = None,
    ) -> Option | None:
        """See option_of; None for a drafter whose step was never measured."""
        if name not in prices.step_ms:
            return None
        belief = self.acceptance.estimate(name, signal, situation)
        drafter = self.drafters[name]
        return option_of(
            name, signal, prices, belief, drafter.shapes_itself, fixed_length, first_length,
            drafter.block_length,
        )  # fmt: skip

    def growth(self, drafter: str, prices: Prices, bucket: int, rate: float) -> Growth:
        """What a tree of this drafter may spend at the going rate, tokens per ms. A node's price is
        what its place in the forward takes."""
        nodes = tuple(rate * ms for ms in prices.place_ms)
        chance = partial(self.acceptance.chance, drafter, bucket)
        return Growth(chance, nodes, rate * prices.step_ms[drafter], rate * prices.jump_ms)

    def filling(self, drafter: str, prices: Prices, bucket: int, rate: float) -> Filling | None:
        """What a filler may append to a chain of this drafter; None without a filler that was
        measured. rate: the going rate, tokens per ms."""
        filler = next((name for name in self._fillers if name in prices.step_ms), None)
        if filler is None:
            return None
        growth = self.growth(filler, prices, bucket, rate)
        own_chance = partial(self.acceptance.chance, drafter, bucket)
        return Filling(filler, len(growth.node_prices), own_chance, growth)

    def observe(
        self, situation: Situation, sequence: Sequence, plan: DraftPlan, outcome: Outcome
    ) -> None:
        """Learn from a finished round of this sequence."""
        step = outcome.step
        self.acceptance.tick(situation.kind)
        costs = self.costs_at(situation.bucket)
        was_drafting = plan.drafter != OFF and was_asked(step)
        num_missed, num_steps = 0, outcome.proposal.num_draft_steps if step.num_draft_tokens else 1
        if was_drafting:
            num_missed = self.catch_up.read(plan.drafter, sequence, step.context_length)
            known_ms = costs.draft_ms(plan.drafter, num_steps, step.context_length, step.others)
            usual_ms = known_ms or step.draft_ms
            self.catch_up.observe(plan.drafter, num_missed, step.draft_ms - usual_ms)
        observe = costs.observe_shared if step.others.num_sequences else costs.observe
        observe(step, num_steps if step.num_draft_tokens and not num_missed else None)
        if not was_drafting:
            return
        if step.num_draft_tokens:
            self._learn_acceptance(situation, outcome)
        else:  # one token, and the cost of asking
            steps = 1.0 if num_missed else step.draft_ms / usual_ms
            self.acceptance.observe(
                plan.drafter, plan.signal, situation, 0, 0, num_nodes=0.0, num_steps=steps
            )

    def _learn_acceptance(self, situation: Situation, outcome: Outcome) -> None:
        """Learn of the drafter's own tokens as if its draft had ended with them. Where all of them
        were accepted, what a filler appended is a draft of the filler's from there."""
        step, verdict, fill = outcome.step, outcome.verdict, outcome.proposal.fill
        own, path = outcome.proposal, verdict.path
        if fill is not None:
            own = own_part(outcome.proposal)
            path = tuple(node for node in path if node < len(own.tokens))
            verdict = replace(verdict, path=path)
        self.observe_acceptance(situation, step.drafter, step.signal, own, verdict)
        if fill is not None and len(path) == len(own.tokens):
            path = tuple(node - len(path) for node in outcome.verdict.path[len(path) :])
            verdict = replace(verdict, path=path)
            self.observe_acceptance(situation, fill.drafter, fill.signal, fill.draft, verdict)

    def observe_acceptance(
        self,
        situation: Situation,
        drafter: str,
        signal: Hashable,
        proposal: Proposal,
        verdict: Verdict,
    ) -> None:
        """Learn what was accepted of a draft. Costs and clocks stay as they are, so the draft may
        be one that no round ran."""
        accepted = verdict.accepted_length
        self.acceptance.observe(
            drafter,
            signal,
            situation,
            # Censored where the path ends at a leaf: nothing further was tried.
            accepted + was_tried_beyond(proposal, verdict),
            accepted,
            num_nodes=len(proposal.tokens),
            num_steps=proposal.num_draft_steps,
        )
        if proposal.confidences is not None:
            taken = judged(proposal, verdict)
            self.acceptance.observe_confidences(
                drafter, situation.bucket, proposal.confidences, taken
            )

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
        except UNREADABLE:
            return False
        self.costs, self.sampled_costs, self.acceptance = costs, sampled_costs, acceptance
        return True


def _fillers(drafters: Mapping[str, Drafter]) -> list[str]:
    return [name for name, drafter in drafters.items() if isinstance(drafter, Filler)]


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


def identity(target: str, draft: str | None, precision: str, *machine: str) -> str:
    """The name of one combination; what is learnt on it serves no other."""
    return " | ".join((target, draft or NO_DRAFT, precision, *machine))


def measurements(states: Mapping[str, Any], context_length: int) -> tuple[Measurement, ...]:
    """One Measurement for each learnt state that can be read: its costs at the measured context
    nearest to `context_length`, its acceptance at the temperature with the most evidence. A state
    that cannot be read is left out; it is learnt again."""
    found = (_measurement(name, state, context_length) for name, state in states.items())
    return tuple(each for each in found if each is not None)


def _measurement(name: str, state: Any, context_length: int) -> Measurement | None:
    def near(points: Mapping[str, float]) -> float:
        return points[min(points, key=lambda at: abs(int(at) - context_length))]

    target, draft, precision, *machine = [*name.split(" | "), "", "", ""]
    try:
        costs, learnt = state["costs"], Acceptance.restored(state["acceptance"])
        return Measurement(
            target=target,
            precision=PRECISIONS[precision],
            verify_ms={int(width): near(points) for width, points in costs["verify_ms"].items()},
            draft_step_ms={name: near(points) for name, points in costs["draft_step_ms"].items()},
            acceptance={name: tuple(rates) for name, rates in learnt.best_known().items()},
            draft=None if draft == NO_DRAFT else draft,
            has_experts_in_ram=SPLIT_TARGET in machine,
        )
    except UNREADABLE:
        return None
