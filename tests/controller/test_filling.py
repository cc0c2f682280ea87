"""When a lookup may append to the chain of another drafter, and what its tokens teach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from localspec.controller.acceptance import Situation
from localspec.controller.controller import Controller
from localspec.controller.policy import policy_of
from localspec.core.decoding import (
    AUTO,
    DraftPlan,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    Verdict,
    chain,
)
from localspec.core.filling import Fill, Filling, filled
from tests.kit.simulation import WIDTH_MS, Simulated, World
from tests.worlds.made_up import copying
from tests.worlds.play import play_adaptive

HERE = Situation(0)
COLD = SamplingParams()
OWN = chain((5, 6), (0.9, 0.8))
COPIED = replace(chain((7, 8, 9), (0.3, 0.5, 0.7)), num_steps=1)
WHOLE = filled(OWN, "model", Fill("copy", "5-8", COPIED))


NOISE: Any = None  # nothing draws


def turn() -> Sequence:
    sequence = Sequence((1, 2, 3), COLD, 100, frozenset(), NOISE)
    sequence.append([1] * 40)
    return sequence


class Copy(Simulated):
    """A lookup that has nothing to propose itself."""

    def signal(self, sequence: Sequence) -> None:
        return None

    def fill(self, sequence: Sequence, proposal: Proposal, filling: Filling) -> Fill:
        return Fill("copy", None, Proposal())


def controller_with(**drafters: Simulated) -> Controller:
    return World(drafters).controller


def both() -> Controller:
    return controller_with(model=Simulated(1.0, 0.9), copy=Copy(0.01, 0.9))


def filling_of(controller: Controller, requested: str, length: int | None) -> Filling | None:
    """The filling of the first round that uses what is known to be good."""
    for _ in range(50):
        learn(controller, OWN, 2, "model")
    policy, sequence = policy_of(controller, COLD, requested, length), turn()
    plans = (policy.plan(sequence) for _ in range(4))  # the first ones look at plain decoding
    return next(plan.filling for plan in plans if plan.drafter == "model")


def test_auto_prices_what_a_lookup_may_append_by_its_usual_tables() -> None:
    filling = filling_of(both(), AUTO, None)
    assert filling is not None and filling.drafter == "copy"
    places = filling.growth.node_prices
    assert len(places) == filling.num_tokens == 15
    assert [*places] == sorted(places) and places[-1] > 0.1 * WIDTH_MS, (
        "a later place is no cheaper"
    )
    assert filling.own_chance(0.8) > 0.9 and filling.growth.chance(0.8) == pytest.approx(0.8)


@pytest.mark.parametrize(("requested", "length"), [(AUTO, 4), ("model", None), ("model", 4)])
def test_length_or_drafter_that_a_person_named_is_kept(requested: str, length: int | None) -> None:
    assert filling_of(both(), requested, length) is None


def test_nothing_is_appended_without_a_measured_lookup() -> None:
    assert filling_of(controller_with(model=Simulated(1.0, 0.9)), AUTO, None) is None


def learn(controller: Controller, proposal: Proposal, num_accepted: int, drafter: str) -> None:
    signal = "5-8" if drafter == "copy" else "s"
    count = len(proposal.tokens)
    step = Step(drafter, count, num_accepted, num_accepted + 1, 1.0, 10.0, 2, signal=signal)
    plan = DraftPlan(drafter, count, signal=signal)
    verdict = Verdict(tuple(range(num_accepted)), 1)
    outcome = Outcome(step, proposal, verdict, torch.empty(0))
    controller.observe(HERE, turn(), plan, outcome)


@pytest.mark.parametrize("num_accepted", range(6))
def test_appended_tokens_teach_the_lookup_and_the_chain_its_drafter(num_accepted: int) -> None:
    """Together they teach what two rounds would have: the chain, then the copy behind it."""
    filled, alone = both(), both()
    learn(filled, WHOLE, num_accepted, "model")
    learn(alone, OWN, min(2, num_accepted), "model")
    if num_accepted >= 2:
        learn(alone, COPIED, num_accepted - 2, "copy")
    learnt, expected = (each.snapshot()["acceptance"] for each in (filled, alone))
    assert learnt == expected
    assert ("copy" in {row["drafter"] for row in learnt["records"]}) is (num_accepted >= 2)


def played(copied: float, **changes: Any) -> tuple[int, int]:
    found = play_adaptive(copying("steep", 0, copied, num_tokens=3000, **changes), AUTO, 0)
    return found.num_rounds, found.num_draft_tokens


def test_rounds_fall_where_text_is_copied_and_free_text_is_drafted_as_before() -> None:
    alone, filled = (played(0.9, fills=fills) for fills in (False, True))
    assert filled[0] < 0.95 * alone[0]
    assert played(0.0, fills=True) == played(0.0, fills=False)
