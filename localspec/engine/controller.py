"""Chooses the drafter and the draft length of each round.

Contract: maximises expected tokens per ms, R(γ) = E(γ) / T(γ), over every drafter and every
γ, with E from learnt acceptance (per drafter, signal, temperature bucket and kind of text) and T
from costs measured here. Plain decoding is the option with γ = 0. The controller holds what is
learnt over turns; the policy it hands out for a turn decides its rounds.

Not here: the decisions of a round (policy), measuring costs (calibrate), counting acceptance
(acceptance), drafting.
Source: R as a ratio of sums is the renewal-reward rate; with a flat verify cost it is the
speedup of Leviathan et al. (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
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
    ALL_KINDS,
    LENIENT,
    Acceptance,
    Situation,
    expected_tokens,
    temperature_bucket,
)
from localspec.engine.contenders import Contenders, Rest
from localspec.engine.costs import Costs
from localspec.engine.fixed import FixedPolicy
from localspec.engine.policy import ASKED_MS, AdaptivePolicy
from localspec.engine.prices import MAX_DRAFT_TOKENS, PriceList, Prices, RoundCurve
from localspec.engine.probing import ALLOWANCE, Probing

STATE_VERSION = 4
USUAL_NODES = 4  # of a drafter that shapes itself, before its rounds have shown
UNKNOWN_STEPS = 0.25  # of such a drafter, a token
USUAL_CONTEXT = 256  # tokens behind which a round of another machine is priced here


@dataclass(frozen=True)
class Option:
    """One drafter at its best length in this situation; of one that shapes itself the length is
    as far as it may go. rate: expected tokens per ms. curve: what its rounds cost by length."""

    drafter: str
    signal: Hashable
    num_draft_tokens: int
    rate: float
    curve: RoundCurve
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
    """Turns of one temperature bucket, exact and lenient ones apart."""
    return temperature_bucket(sampling.temperature) + (LENIENT if sampling.leniency else 0)


class Controller:
    """The learnt state of one target on one machine; hands out one policy a turn."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        costs: Costs,
        acceptance: Acceptance,
        sampled_costs: Costs | None = None,
        elsewhere: Mapping[str, Any] | None = None,
    ) -> None:
        """costs: of greedy rounds. sampled_costs: of rounds that draw, None: the same. elsewhere:
        a snapshot of the acceptance of these very models on another machine; taken up where
        nothing was learnt here, once rounds have a price. ValueError, KeyError, TypeError for what
        is no such snapshot."""
        self.drafters = drafters
        self.costs = costs
        self.sampled_costs = costs if sampled_costs is None else sampled_costs
        self.acceptance = acceptance
        self.elsewhere = elsewhere
        self._expected = None if elsewhere is None else Acceptance.restored(elsewhere)
        self.probing: dict[Situation, Probing] = {}
        self.length_probing: dict[Situation, Probing] = {}
        self.contenders: dict[Situation, Contenders] = {}
        self.rests: dict[Situation, Rest] = {}
        self.incumbents: dict[tuple[Hashable, ...], str] = {}
        self._is_plain_run = False  # the round before was plain decoding and nothing else
        self._price_list = PriceList()
        self._options: dict[tuple[Hashable, ...], tuple[int, Prices, Option | None]] = {}

    def policy(
        self,
        sampling: SamplingParams,
        requested: str,
        num_draft_tokens: int | None,
        first_num_draft_tokens: int | None = None,
        kind: str = ALL_KINDS,
    ) -> Policy:
        """The policy of the turn that begins now. requested: AUTO, OFF or a drafter's name.
        num_draft_tokens: fixed γ or None. first_num_draft_tokens: γ of a chain until anything was
        learnt here, None: our own guess. kind: of text, which is learnt apart."""
        self._take_up_what_is_known_elsewhere()
        self.acceptance.begin_turn()
        self._is_plain_run = False
        situation, first = Situation(bucket_of(sampling), kind), first_num_draft_tokens
        if requested == OFF or num_draft_tokens == 0:
            chosen = "chose plain decoding" if requested == OFF else "fixed γ at 0"
            return FixedPolicy(self, situation, OFF, 0, f"Off: you {chosen}.")
        if requested != AUTO and num_draft_tokens is not None:
            reason = f"{requested} with {num_draft_tokens} tokens a round, as you chose."
            return FixedPolicy(self, situation, requested, num_draft_tokens, reason)
        if requested == AUTO:
            everybody = tuple(self.drafters)
            return AdaptivePolicy(self, situation, everybody, True, num_draft_tokens, first)
        return AdaptivePolicy(self, situation, (requested,), False, None, first)

    def _take_up_what_is_known_elsewhere(self) -> None:
        is_priced = self.costs.is_measured and self.sampled_costs.is_measured
        if self._expected is not None and is_priced:
            self.acceptance.expect(self._expected, self._usual_round_ms)
            self._expected = None
            self.probing.clear()  # there is less to find out than it was made for

    def _usual_round_ms(
        self, drafter: str, bucket: int, num_tokens: float, num_steps: float
    ) -> float | None:
        return self.costs_at(bucket).round_ms(drafter, num_tokens, USUAL_CONTEXT, num_steps)

    def probing_in(self, situation: Situation) -> Probing:
        """When to look at what lost there; with an allowance where nothing was learnt before."""
        if situation not in self.probing:
            allowance = 0.0 if self.acceptance.is_known(situation) else ALLOWANCE
            self.probing[situation] = Probing(allowance=allowance)
        return self.probing[situation]

    def option(
        self,
        name: str,
        signal: Hashable,
        situation: Situation,
        prices: Prices,
        fixed_length: int | None = None,
        first_length: int | None = None,
    ) -> Option | None:
        """The drafter at its best length, or at the one asked for; None while its cost is not
        known. first_length: the length of a chain before its first round. Kept until it would
        come out otherwise."""
        key = (name, signal, situation, fixed_length, first_length)
        version = self.acceptance.version(name, signal)
        known = self._options.get(key)
        if known is not None and known[0] == version and known[1] is prices:
            return known[2]
        made = self._option(name, signal, situation, prices, fixed_length, first_length)
        self._options[key] = (version, prices, made)
        return made

    def _option(
        self,
        name: str,
        signal: Hashable,
        situation: Situation,
        prices: Prices,
        fixed_length: int | None,
        first_length: int | None,
    ) -> Option | None:
        """The expectation by position is weighed against what its rounds really gave: positions
        late in a draft are reached by confident drafts only, and look better than they are."""
        curve = prices.curve(name, self._steps_a_token(name))
        if curve is None:
            return None
        rates = self.acceptance.rates(name, signal, situation)
        shapes_itself = self.drafters[name].shapes_itself
        usual = USUAL_NODES if shapes_itself else best_length(rates, curve.round_ms)[0]
        expected = expected_tokens(rates, fixed_length or usual)
        round_ms = curve.round_ms[min(fixed_length or usual, MAX_DRAFT_TOKENS)]
        rate = self.acceptance.rate(name, signal, situation, expected, round_ms)
        if first_length is not None and not self.acceptance.num_rounds(name, signal, situation):
            usual = min(first_length, MAX_DRAFT_TOKENS)
        length = fixed_length or (MAX_DRAFT_TOKENS if shapes_itself else usual)
        return Option(name, signal, length, rate, curve, rates[0], round_ms)

    def growth(self, option: Option, prices: Prices, bucket: int, rate: float) -> Growth | None:
        """What a tree of this drafter may spend at the going rate, tokens per ms; None before its
        step was measured. A node's price is what its place in the forward takes."""
        step_ms = prices.step_ms(option.drafter)
        if step_ms is None:
            return None
        nodes = tuple(rate * ms for ms in prices.place_ms)
        chance = partial(self.acceptance.chance, option.drafter, bucket)
        return Growth(chance, nodes, rate * step_ms, rate * prices.jump_ms)

    def prices(self, bucket: int, context: int) -> Prices | None:
        """What rounds cost here; None until measured."""
        return self._price_list.at(self.costs_at(bucket), bucket % LENIENT == 0, context)

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

    def _steps_a_token(self, drafter: str) -> float:
        learnt = self.acceptance.steps_a_token(drafter)
        if learnt is not None:
            return learnt
        return UNKNOWN_STEPS if self.drafters[drafter].shapes_itself else 1.0

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
        self._price_list.clear()
        self._options.clear()
        return True

    def learn(self, situation: Situation, outcome: Outcome) -> None:
        """What every round teaches, whichever policy planned it."""
        step, verdict = outcome.step, outcome.verdict
        context = step.context_length
        self.acceptance.tick(situation.kind)
        self._price_list.tick()
        costs = self.costs_at(situation.bucket)
        is_settled = self._is_settled(step)
        if step.num_draft_tokens > 0 or is_settled:
            costs.observe(step.num_draft_tokens + 1, context, step.verify_ms)
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
            situation,
            # Censored where the path ends at a leaf: nothing further was tried.
            accepted + was_tried_beyond(outcome.proposal, verdict),
            accepted,
            step.round_ms if known_ms is None else known_ms,
            num_nodes=step.num_draft_tokens,
            num_steps=num_steps,
        )
        if step.confidences is not None:
            taken = judged(outcome.proposal, verdict)
            self.acceptance.observe_confidences(
                step.drafter, situation.bucket, step.confidences, taken
            )

    def _is_settled(self, step: Step) -> bool:
        """Whether a plain round shows what plain decoding costs by itself: right after a draft was
        made the target's weights are no longer where a processor's caches had them, and the round
        takes longer than those after it."""
        is_plain = step.num_draft_tokens == 0 and step.draft_ms < ASKED_MS
        was_plain, self._is_plain_run = self._is_plain_run, is_plain
        return is_plain and was_plain

    def learn_of_nothing(self, situation: Situation, asked: DraftPlan, step: Step) -> None:
        """A drafter was asked and proposed nothing: a round that gave one token and cost the
        asking. (Where there was no room for a draft it was not asked, which takes no time.)"""
        if step.draft_ms < ASKED_MS:
            return
        plain_ms = self.costs_at(situation.bucket).plain_ms(step.context_length)
        cost_ms = step.round_ms if plain_ms is None else plain_ms + step.draft_ms
        self.acceptance.observe(asked.drafter, asked.signal, situation, 0, 0, cost_ms)


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
