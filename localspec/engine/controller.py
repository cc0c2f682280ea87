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
from typing import Any

from localspec.core import AUTO, OFF, Drafter, Policy, SamplingParams, Sequence, Step, Verdict
from localspec.engine.acceptance import (
    PRIOR_WEIGHT,
    Acceptance,
    expected_tokens,
    temperature_bucket,
)
from localspec.engine.costs import Costs
from localspec.engine.policy import AdaptivePolicy, FixedPolicy
from localspec.engine.probing import Probing

STATE_VERSION = 2
MAX_DRAFT_TOKENS = 15  # with the root 16 tokens wide, the widest width measured


@dataclass(frozen=True)
class Option:
    """One drafter at its best length in this situation. rate: expected tokens per ms.
    ceiling: the rate if every draft token were accepted."""

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
        self.incumbents: dict[tuple[Hashable, ...], str] = {}

    def policy(
        self, sampling: SamplingParams, requested: str, num_draft_tokens: int | None
    ) -> Policy:
        """requested: AUTO, OFF or a drafter's name. num_draft_tokens: fixed γ or None."""
        if requested == OFF or num_draft_tokens == 0:
            return FixedPolicy(self, OFF, 0, "Off: you chose plain decoding.")
        if requested != AUTO and num_draft_tokens is not None:
            reason = f"{requested} with {num_draft_tokens} tokens a round, as you chose."
            return FixedPolicy(self, requested, num_draft_tokens, reason)
        bucket = temperature_bucket(sampling.temperature)
        if requested == AUTO:
            return AdaptivePolicy(self, bucket, tuple(self.drafters), True, num_draft_tokens)
        return AdaptivePolicy(self, bucket, (requested,), False, None)

    def option(
        self,
        name: str,
        signal: Hashable,
        bucket: int,
        curve: list[float],
        fixed_length: int | None = None,
    ) -> Option:
        """The drafter at its best length, or at the one asked for.

        The expectation by position is weighed against what its rounds really gave: positions
        late in a draft are reached by confident drafts only, and look better than they are.
        """
        rates = self.acceptance.rates(name, signal, bucket)
        length = fixed_length or best_length(rates, curve)[0]
        tokens, ms = self.acceptance.realised(name, signal, bucket)
        expected = PRIOR_WEIGHT * expected_tokens(rates, length)
        round_ms = curve[min(length, len(curve) - 1)]
        rate = (tokens + expected) / (ms + PRIOR_WEIGHT * round_ms)
        ceiling = max((n + 1) / curve[n] for n in range(1, len(curve)))
        return Option(name, signal, length, rate, ceiling, rates[0], round_ms)

    def costs_at(self, bucket: int) -> Costs:
        """The costs of rounds in this temperature bucket: drawing tokens takes time as well."""
        return self.costs if bucket == 0 else self.sampled_costs

    def plain_ms(self, sequence: Sequence, context: int) -> float | None:
        """One step of plain decoding of this sequence at this context; None until measured."""
        return self.costs_at(temperature_bucket(sequence.sampling.temperature)).plain_ms(context)

    def round_curve(self, drafter: str, context: int, bucket: int) -> list[float] | None:
        """Cost of a round at γ = 0, 1, … MAX_DRAFT_TOKENS; None until measured."""
        lengths, costs = range(MAX_DRAFT_TOKENS + 1), self.costs_at(bucket)
        curve = [costs.round_ms(drafter, length, context) for length in lengths]
        known = [ms for ms in curve if ms is not None]
        return known if len(known) == len(curve) else None

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

    def learn(self, sequence: Sequence, step: Step, verdict: Verdict) -> None:
        """What every round teaches, whichever policy planned it."""
        width, context = step.num_draft_tokens + 1, step.context_length
        self.acceptance.tick()
        bucket = temperature_bucket(sequence.sampling.temperature)
        costs = self.costs_at(bucket)
        costs.observe(width, context, step.verify_ms)
        if step.num_draft_tokens == 0:
            return
        accepted = verdict.accepted_length
        costs.observe_draft(step.drafter, step.num_draft_tokens, context, step.draft_ms)
        # By the cost table where it knows: a round disturbed by something else must not count.
        known_ms = costs.round_ms(step.drafter, step.num_draft_tokens, context)
        round_ms = step.round_ms if known_ms is None else known_ms
        self.acceptance.observe(
            step.drafter, step.signal, bucket, step.num_draft_tokens, accepted, round_ms
        )
        if step.confidences is not None:
            self.acceptance.observe_confidences(step.drafter, bucket, step.confidences, accepted)
