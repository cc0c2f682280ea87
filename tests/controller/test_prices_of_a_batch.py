"""`auto` in a batch whose rows and steps have fixed prices: simulated rounds of all sequences."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest

from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import WIDTHS, Costs
from localspec.controller.policy import Policy, policy_of
from localspec.core.decoding import (
    ALONE,
    AUTO,
    OFF,
    DraftPlan,
    Others,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    Verdict,
)
from tests.kit.simulation import Simulated
from tests.worlds.play import RIGHT

SEQUENCE_MS = 3.0  # what one more sequence adds to a forward
MORE_OF_A_STEP = 0.15  # what one more sequence adds to a step of a draft that it shares
MS = {1: 38.0, 2: 38.0, 4: 39.0, 8: 44.0, 16: 54.0}  # of a forward of so many rows
STEP_MS = {"draft_model": 4.0, "self_quant": 14.0, "ngram": 0.02}
LIKELY = {"draft_model": 0.8, "self_quant": 0.95, "ngram": 0.3}
POSSIBLE = {"draft_model": 0.5, "self_quant": 0.8, "ngram": 0.1}
UNLIKELY = {"draft_model": 0.15, "self_quant": 0.3, "ngram": 0.02}
TURNS, TOKENS = 6, 60


def as_measured(num_rows: int) -> float:
    """Rows beyond 16 take what the last eight of these do."""
    for before, behind in pairwise(WIDTHS):
        if num_rows <= behind or behind == WIDTHS[-1]:
            share = (num_rows - before) / (behind - before)
            return MS[before] + share * (MS[behind] - MS[before])
    raise AssertionError


def by_sixteen(num_rows: int) -> float:
    """Each further 16 rows take as long as the first."""
    return as_measured(min(num_rows, 16)) + MS[16] * (max(0, num_rows - 1) // 16)


class Member:
    """One sequence, with the policy and the drafters of its slot."""

    def __init__(self, controller: Controller) -> None:
        self.sequence = Sequence((1, 2), SamplingParams(), TOKENS, frozenset(), None)  # type: ignore
        self.policy: Policy = policy_of(controller, SamplingParams(), AUTO, None)
        self.drafters = controller.drafters
        self.plan, self.proposal, self.draft_ms = DraftPlan(OFF, 0), Proposal(), 0.0

    @property
    def num_rows(self) -> int:
        return 1 + len(self.proposal.tokens)

    def draft(self) -> None:
        plan = self.policy.plan(self.sequence)
        self.plan = plan.shortened(min(plan.num_draft_tokens, self.sequence.num_remaining - 1))
        self.proposal = Proposal()
        if self.plan.drafter != OFF and self.plan.num_draft_tokens:
            self.proposal = self.drafters[self.plan.drafter].propose(self.sequence, self.plan)

    def verify(self, forward_ms: float, others: Others) -> None:
        drafted = self.proposal.tokens
        accepted = next((n for n, token in enumerate(drafted) if token != RIGHT), len(drafted))
        base = len(self.sequence.tokens) - 1
        self.sequence.append([RIGHT] * (accepted + 1))
        self.sequence.others = others
        step = Step(
            self.plan.drafter if drafted else OFF,
            len(drafted),
            accepted,
            accepted + 1,
            self.draft_ms,
            forward_ms + others.took_ms,
            base,
            self.plan.is_probe,
            self.plan.signal,
            others=others,
        )
        verdict = Verdict(tuple(range(accepted)), RIGHT)
        self.policy.observe(self.sequence, Outcome(step, self.proposal, verdict, None))  # type: ignore


def share_drafts(members: list[Member]) -> None:
    """Who drafts with the same model shares its steps, as long as they draft."""
    for each in members:
        lengths = [
            len(one.proposal.tokens) for one in members if one.plan.drafter == each.plan.drafter
        ]
        together = [sum(n > step for n in lengths) for step in range(len(each.proposal.tokens))]
        step_ms = STEP_MS.get(each.plan.drafter, 0.0)
        each.draft_ms = sum(step_ms * (1 + MORE_OF_A_STEP * (num - 1)) / num for num in together)


def turn_ms(members: list[Member], forward_ms: Callable[[int], float]) -> float:
    """Until the last sequence has all its tokens."""
    took_ms, num = 0.0, len(members)
    for each in members:  # as after their prompts, which were read together
        each.sequence.others = Others(num - 1, num - 1) if num > 1 else ALONE
    while members:
        for each in members:
            each.draft()
        share_drafts(members)
        num_rows = sum(each.num_rows for each in members)
        drafts_ms = sum(each.draft_ms for each in members)
        round_ms = forward_ms(num_rows) + SEQUENCE_MS * (len(members) - 1)
        took_ms += drafts_ms + round_ms
        for each in members:
            beside = len(members) - 1, num_rows - each.num_rows, drafts_ms - each.draft_ms
            each.verify(round_ms, Others(*beside) if beside[0] else ALONE)
        members = [each for each in members if each.sequence.finish_reason is None]
    return took_ms


def gains(num: int, rates: Mapping[str, float], forward_ms: Callable[[int], float]) -> list[float]:
    """Of each turn: the time of plain batches to that of `auto`."""
    costs = Costs()
    for width in WIDTHS:
        costs.set_verify(width, 0, MS[width])
    for name, step_ms in STEP_MS.items():
        costs.set_draft_step(name, 0, step_ms)

    def drafters_of(slot: int) -> dict[str, Any]:
        found: dict[str, Any] = {name: Simulated(STEP_MS[name], rates[name]) for name in rates}
        for name, drafter in found.items():
            drafter.random = random.Random(f"{name}/{slot}")
        return found

    first = Controller(drafters_of(0), costs, Acceptance())
    slots = [first, *(first.beside(drafters_of(slot)) for slot in range(1, num))]
    plain_ms = TOKENS * (forward_ms(num) + SEQUENCE_MS * (num - 1))
    return [plain_ms / turn_ms([Member(one) for one in slots], forward_ms) for _ in range(TURNS)]


@pytest.mark.slow
@pytest.mark.parametrize("forward_ms", [as_measured, by_sixteen])
@pytest.mark.parametrize("rates", [LIKELY, POSSIBLE, UNLIKELY])
@pytest.mark.parametrize("num", [2, 8, 16])
def test_auto_loses_nothing_to_plain_batches_but_what_finding_out_costs(
    num: int, rates: Mapping[str, float], forward_ms: Callable[[int], float]
) -> None:
    found = gains(num, rates, forward_ms)
    assert mean(found) > 0.96 and min(found) > 0.88
    if (num, rates) == (2, LIKELY):
        assert mean(found) > 1.5
    if (num, rates, forward_ms) == (8, LIKELY, as_measured):
        assert mean(found) > 1.3  # 1.1 where a step that eight share is priced as eight steps
