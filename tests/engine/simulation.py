"""A clock and coins instead of models: rounds whose cost and acceptance are known exactly."""

from __future__ import annotations

import random
from typing import Any

import torch

from localspec.core import (
    AUTO,
    OFF,
    DraftPlan,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    Verdict,
    chain,
)
from localspec.engine.acceptance import Acceptance
from localspec.engine.controller import Controller
from localspec.engine.costs import WIDTHS, Costs
from localspec.engine.prices import MAX_DRAFT_TOKENS

PLAIN_MS = 10.0
WIDTH_MS = 0.2  # each further token of a round's forward
TURN = 400  # tokens of a turn


def verify_ms(num_draft_tokens: int) -> float:
    return PLAIN_MS + WIDTH_MS * num_draft_tokens


class Simulated:
    """Each draft token is right with chance `rate`, given that those before it were."""

    memory_bytes = 0
    shapes_itself = False

    def __init__(self, step_ms: float, rate: float, is_free: bool = False) -> None:
        self.step_ms = step_ms
        self.rate = rate
        self.is_free = is_free
        self.is_silent = False
        self.confidence: float | None = None
        self.foreseen: tuple[int, ...] = ()

    def signal(self, sequence: Sequence) -> str | None:
        return None if self.is_silent else "s"

    def prepare(self, sequence: object) -> None:
        pass

    def foresee(self, sequence: Sequence) -> tuple[int, ...]:
        return self.foreseen if self.is_free else ()

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        raise AssertionError("nothing is drafted in a simulation")

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        pass


class World:
    """Rounds of simulated drafters under a real controller."""

    def __init__(
        self, drafters: dict[str, Simulated], seed: int = 1, is_measured: bool = True
    ) -> None:
        self.drafters = drafters
        self.rng = random.Random(seed)
        self.noise = 0.0
        self.kind = ""  # of the text of the turns to come
        costs = Costs()
        if is_measured:
            for width in WIDTHS:
                costs.set_verify(width, 0, verify_ms(width - 1))
            for name, drafter in drafters.items():
                costs.set_draft_step(name, 0, drafter.step_ms)
        named: dict[str, Any] = dict(drafters)
        self.controller = Controller(named, costs, Acceptance())
        self.steps: list[Step] = []
        self.reasons: list[str] = []

    def run(
        self,
        num_rounds: int,
        sampling: SamplingParams,
        requested: str = AUTO,
        length: int | None = None,
    ) -> None:
        left = num_rounds
        while left > 0:
            rng: Any = None
            sequence = Sequence((1, 2), sampling, 10**9, frozenset(), rng)
            policy = self.controller.policy(sampling, requested, length, kind=self.kind)
            while left > 0 and len(sequence.tokens) < TURN:
                left -= 1
                self._round(sequence, policy)

    def _round(self, sequence: Sequence, policy: Any) -> None:
        plan = policy.plan(sequence)
        drafter = self.drafters.get(plan.drafter)
        num_drafted, confidences = self._drafted(plan, drafter)
        accepted = 0
        while drafter and accepted < num_drafted and self.rng.random() < drafter.rate:
            accepted += 1
        jitter = 1.0 + self.noise * self.rng.uniform(-1.0, 1.0)
        step = Step(
            drafter=plan.drafter if num_drafted else OFF,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=accepted,
            num_output_tokens=accepted + 1,
            draft_ms=jitter * (drafter.step_ms if drafter else 0.0) * num_drafted,
            verify_ms=jitter * verify_ms(num_drafted),
            context_length=len(sequence.tokens) - 1,
            is_probe=plan.is_probe,
            signal=plan.signal,
            confidences=confidences,
        )
        sequence.append([9] * (accepted + 1))
        proposal = chain((9,) * num_drafted, confidences=confidences)
        verdict = Verdict(tuple(range(accepted)), 9)
        policy.observe(sequence, Outcome(step, proposal, verdict, torch.empty(0)))
        self.steps.append(step)
        self.reasons.append(plan.reason)

    def _drafted(
        self, plan: DraftPlan, drafter: Simulated | None
    ) -> tuple[int, tuple[float, ...] | None]:
        if drafter is None or drafter.confidence is None:
            return plan.num_draft_tokens, None
        count = 0
        while count < plan.num_draft_tokens:
            count += 1
            if plan.keep_drafting and not plan.keep_drafting(count - 1, drafter.confidence):
                break
        return count, (drafter.confidence,) * count

    def share(self, drafter: str, last: int | None = None) -> float:
        """Share of the rounds (the last ones) that this drafter drafted."""
        steps = self.steps[-last:] if last else self.steps
        return sum(step.drafter == drafter for step in steps) / len(steps)

    def rate(self, since: int = 0) -> float:
        """Tokens per ms from round `since` on."""
        steps = self.steps[since:]
        return sum(s.num_output_tokens for s in steps) / sum(s.round_ms for s in steps)


def best_fixed_rate(drafters: dict[str, Simulated]) -> float:
    """Tokens per ms of the best drafter at its best fixed length, or of plain decoding."""
    rates = [1.0 / PLAIN_MS]
    for drafter in drafters.values():
        for length in range(1, MAX_DRAFT_TOKENS + 1):
            tokens = sum(drafter.rate**i for i in range(length + 1))
            rates.append(tokens / (verify_ms(length) + length * drafter.step_ms))
    return max(rates)
