"""Chooses the drafter and the draft length of each round.

Contract: maximises expected tokens per ms, R(γ) = E(γ) / T(γ), over every drafter and every
γ, with E from learnt acceptance (per drafter, signal and temperature bucket) and T from costs
measured here. Plain decoding is the option with γ = 0. The controller holds what is learnt over
turns; the policy it hands out for a turn decides its rounds.

Not here: the decisions of a round (policy), measuring costs (calibrate), counting acceptance
(acceptance), drafting.
Source: R as a ratio of sums is the renewal-reward rate; with a flat verify cost it is the
speedup of Leviathan et al. (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from localspec.core import (
    AUTO,
    OFF,
    Drafter,
    DraftPlan,
    Growth,
    Outcome,
    Policy,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    Verdict,
)
from localspec.engine.acceptance import (
    LENIENT,
    PRIOR_WEIGHT,
    Acceptance,
    expected_tokens,
    temperature_bucket,
)
from localspec.engine.contenders import Contenders, Rest
from localspec.engine.costs import Costs
from localspec.engine.fixed import FixedPolicy
from localspec.engine.policy import AdaptivePolicy
from localspec.engine.probing import Probing

STATE_VERSION = 3
USUAL_NODES = 4  # of a drafter that shapes itself, before its rounds have shown
ASKED_MS = 0.01  # drafting that took less did not happen
UNKNOWN_STEPS = 0.25  # of such a drafter, a token
MAX_DRAFT_TOKENS = 15  # with the root 16 tokens wide, the widest width measured


@dataclass(frozen=True)
class Option:
    """One drafter at its best length in this situation; of one that shapes itself the length is
    as far as it may go. rate: expected tokens per ms. ceiling: the rate if every draft token were
    accepted."""

    drafter: str
    signal: Hashable
    num_draft_tokens: int
    rate: float
    ceiling: float
    acceptance: float
    round_ms: float


def best_length(rates: list[float], round_ms: list[float]) -> tuple[int, float]:
    """γ >= 1 with the highest E(γ) / T(γ), and that ratio.

    rates[i]: chance of draft token i given its predecessors. round_ms[γ]: cost of a round.
    """
    best, best_rate, expected, survival = 1, 0.0, 1.0, 1.0
    for length in range(1, len(round_ms)):
        survival *= rates[length - 1]
        expected += survival
        if expected / round_ms[length] > best_rate:
            best, best_rate = length, expected / round_ms[length]
    return best, best_rate


def bucket_of(sampling: SamplingParams) -> int:
    """What is learnt together: turns of one temperature bucket, exact and lenient ones apart."""
    return temperature_bucket(sampling.temperature) + (LENIENT if sampling.leniency else 0)


class Controller:
    """The learnt state of one target on one machine; hands out one policy a turn."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        costs: Costs,
        acceptance: Acceptance,
        sampled_costs: Costs | None = None,
    ) -> None:
        """costs: of greedy rounds. sampled_costs: of rounds that draw, None: the same."""
        self.drafters = drafters
        self.costs = costs
        self.sampled_costs = costs if sampled_costs is None else sampled_costs
        self.acceptance = acceptance
        self.probing: dict[int, Probing] = {}
        self.length_probing: dict[int, Probing] = {}
        self.contenders: dict[int, Contenders] = {}
        self.rests: dict[int, Rest] = {}
        self.incumbents: dict[tuple[Hashable, ...], str] = {}

    def policy(
        self,
        sampling: SamplingParams,
        requested: str,
        num_draft_tokens: int | None,
        first_num_draft_tokens: int | None = None,
    ) -> Policy:
        """requested: AUTO, OFF or a drafter's name. num_draft_tokens: fixed γ or None.
        first_num_draft_tokens: γ of a chain until anything was learnt here, None: our own guess."""
        if requested == OFF or num_draft_tokens == 0:
            return FixedPolicy(self, OFF, 0, "Off: you chose plain decoding.")
        if requested != AUTO and num_draft_tokens is not None:
            reason = f"{requested} with {num_draft_tokens} tokens a round, as you chose."
            return FixedPolicy(self, requested, num_draft_tokens, reason)
        bucket, first = bucket_of(sampling), first_num_draft_tokens
        if requested == AUTO:
            return AdaptivePolicy(self, bucket, tuple(self.drafters), True, num_draft_tokens, first)
        return AdaptivePolicy(self, bucket, (requested,), False, None, first)

    def option(
        self,
        name: str,
        signal: Hashable,
        bucket: int,
        curve: list[float],
        fixed_length: int | None = None,
        first_length: int | None = None,
    ) -> Option:
        """The drafter at its best length, or at the one asked for. first_length: the length of a
        chain before its first round.

        The expectation by position is weighed against what its rounds really gave: positions
        late in a draft are reached by confident drafts only, and look better than they are.
        """
        rates = self.acceptance.rates(name, signal, bucket)
        shapes_itself = self.drafters[name].shapes_itself
        usual = USUAL_NODES if shapes_itself else best_length(rates, curve)[0]
        tokens, ms = self.acceptance.realised(name, signal, bucket)
        expected = PRIOR_WEIGHT * expected_tokens(rates, fixed_length or usual)
        round_ms = curve[min(fixed_length or usual, len(curve) - 1)]
        rate = (tokens + expected) / (ms + PRIOR_WEIGHT * round_ms)
        ceiling = max((n + 1) / curve[n] for n in range(1, len(curve)))
        if first_length is not None and not self.acceptance.num_rounds(name, signal, bucket):
            usual = min(first_length, len(curve) - 1)
        length = fixed_length or (MAX_DRAFT_TOKENS if shapes_itself else usual)
        return Option(name, signal, length, rate, ceiling, rates[0], round_ms)

    def growth(self, option: Option, context: int, bucket: int, rate: float) -> Growth | None:
        """What a tree of this drafter may spend at the going rate, tokens per ms; None before its
        step was measured. A node's price is what its place in the forward takes."""
        costs, acceptance = self.costs_at(bucket), self.acceptance
        widths = range(1, MAX_DRAFT_TOKENS + 2)
        known = [ms for w in widths if (ms := costs.verify_ms(w, context)) is not None]
        step_ms = costs.draft_ms(option.drafter, 1, context)
        if step_ms is None or len(known) < len(widths):
            return None
        prices = tuple(rate * max(0.0, after - ms) for ms, after in pairwise(known))
        chance = partial(acceptance.chance, option.drafter, bucket)
        return Growth(chance, prices, rate * step_ms)

    def costs_at(self, bucket: int) -> Costs:
        """The costs of rounds in this temperature bucket: drawing tokens takes time as well."""
        return self.costs if bucket % LENIENT == 0 else self.sampled_costs

    def is_measured(self, sampling: SamplingParams) -> bool:
        """Whether the costs of such rounds are known: greedy ones are measured first."""
        return self.costs_at(bucket_of(sampling)).is_measured

    def plain_ms(self, sequence: Sequence, context: int) -> float | None:
        """One step of plain decoding of this sequence at this context; None until measured."""
        return self.costs_at(bucket_of(sequence.sampling)).plain_ms(context)

    def round_curve(self, drafter: str, context: int, bucket: int) -> list[float] | None:
        """Cost of a round at γ = 0, 1, … MAX_DRAFT_TOKENS; None until measured."""
        lengths, costs = range(MAX_DRAFT_TOKENS + 1), self.costs_at(bucket)
        a_token = self._steps_a_token(drafter)
        curve = [
            costs.round_ms(drafter, length, context, max(1.0, a_token * length))
            for length in lengths
        ]
        known = [ms for ms in curve if ms is not None]
        return known if len(known) == len(curve) else None

    def _steps_a_token(self, drafter: str) -> float:
        if not self.drafters[drafter].shapes_itself:
            return 1.0
        learnt = self.acceptance.steps_a_token(drafter)
        return UNKNOWN_STEPS if learnt is None else learnt

    def snapshot(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "costs": self.costs.snapshot(),
            "sampled_costs": self.sampled_costs.snapshot(),
            "acceptance": self.acceptance.snapshot(),
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take up a snapshot; False (and nothing changed) when it is not one of ours."""
        try:
            if state["version"] != STATE_VERSION:
                return False
            costs = Costs.restored(state["costs"])
            sampled_costs = Costs.restored(state["sampled_costs"])
            acceptance = Acceptance.restored(state["acceptance"])
        except (LookupError, ValueError, TypeError, AttributeError):
            return False
        self.costs, self.sampled_costs, self.acceptance = costs, sampled_costs, acceptance
        return True

    def learn(self, sequence: Sequence, outcome: Outcome) -> None:
        """What every round teaches, whichever policy planned it."""
        step, verdict = outcome.step, outcome.verdict
        width, context = step.num_draft_tokens + 1, step.context_length
        self.acceptance.tick()
        bucket = bucket_of(sequence.sampling)
        costs = self.costs_at(bucket)
        costs.observe(width, context, step.verify_ms)
        if step.num_draft_tokens == 0:
            return
        num_steps = step.num_draft_steps or step.num_draft_tokens
        costs.observe_draft(step.drafter, num_steps, context, step.draft_ms)
        # By the cost table where it knows: a round disturbed by something else must not count.
        known_ms = costs.round_ms(step.drafter, step.num_draft_tokens, context, num_steps)
        accepted = verdict.accepted_length
        self.acceptance.observe(
            step.drafter,
            step.signal,
            bucket,
            # Censored where the path ends at a leaf: nothing further was tried.
            accepted + was_tried_beyond(outcome.proposal, verdict),
            accepted,
            step.round_ms if known_ms is None else known_ms,
            num_nodes=step.num_draft_tokens,
            num_steps=num_steps,
        )
        if step.confidences is not None:
            taken = judged(outcome.proposal, verdict)
            self.acceptance.observe_confidences(step.drafter, bucket, step.confidences, taken)

    def learn_of_nothing(self, sequence: Sequence, asked: DraftPlan, step: Step) -> None:
        """A drafter was asked and proposed nothing: a round that gave one token and cost the
        asking. (Where there was no room for a draft it was not asked, which takes no time.)"""
        if step.draft_ms < ASKED_MS:
            return
        bucket = bucket_of(sequence.sampling)
        plain_ms = self.costs_at(bucket).plain_ms(step.context_length)
        cost_ms = step.round_ms if plain_ms is None else plain_ms + step.draft_ms
        self.acceptance.observe(asked.drafter, asked.signal, bucket, 0, 0, cost_ms)


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
