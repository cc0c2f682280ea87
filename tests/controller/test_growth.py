"""Drafters that shape themselves: what trees teach, their prices, and the choice of them."""

from __future__ import annotations

import pytest
import torch

from localspec.controller.acceptance import Situation
from localspec.controller.controller import Controller, judged, was_tried_beyond
from localspec.controller.costs import MAX_DRAFT_TOKENS
from localspec.controller.options import USUAL_NODES
from localspec.controller.policy import policy_of
from localspec.controller.prices import Prices
from localspec.core.decoding import (
    DraftPlan,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    Verdict,
    chain,
)
from tests.kit.simulation import WIDTH_MS, Simulated, World, best_fixed_rate

TREE = Proposal((5, 6, 7, 8), (-1, -1, 0, 1), confidences=(0.9, 0.8, 0.7, 0.6), num_steps=2)
COLD = SamplingParams()
HERE = Situation(0)
TEXT = Sequence((1,) * 101, COLD, 100, frozenset(), torch.Generator())


def outcome(proposal: Proposal, path: tuple[int, ...], draft_ms: float = 2.0) -> Outcome:
    step = Step(
        "tree", len(proposal.tokens), len(path), len(path) + 1, draft_ms, 11.0, 100,
        signal="s",
    )  # fmt: skip
    return Outcome(step, proposal, Verdict(path, 1), torch.empty(0))


def world() -> tuple[World, Simulated]:
    drafter = Simulated(1.0, 0.5)
    drafter.shapes_itself = True
    return World({"tree": drafter}), drafter


def turn() -> Sequence:
    return Sequence((1, 2, 3), COLD, 100, frozenset(), torch.Generator())


def learn(controller: Controller, outcome: Outcome) -> None:
    controller.observe(HERE, TEXT, DraftPlan("tree", 4, signal="s"), outcome)


def test_children_of_accepted_tokens_were_judged_and_no_others() -> None:
    assert judged(TREE, Verdict((1,), 0)) == [False, True, None, False]
    assert judged(TREE, Verdict((0, 2), 0)) == [True, False, True, None]
    assert judged(chain((1, 2, 3)), Verdict((0,), 0)) == [True, False, None]


def test_a_path_that_ends_at_a_leaf_is_censored() -> None:
    assert not was_tried_beyond(TREE, Verdict((0, 2), 0))
    assert was_tried_beyond(TREE, Verdict((0,), 0)) and was_tried_beyond(TREE, Verdict((), 0))
    assert not was_tried_beyond(chain((1, 2)), Verdict((0, 1), 0))


def test_a_tree_teaches_by_depth_by_confidence_and_by_steps() -> None:
    played, _ = world()
    for _ in range(200):
        learn(played.controller, outcome(TREE, (1,)))
    acceptance = played.controller.acceptance
    assert acceptance.rates("tree", "s", HERE)[:2] == pytest.approx([1.0, 0.0], abs=0.06)
    assert acceptance.chance("tree", 0, 0.8) > 0.9 and acceptance.chance("tree", 0, 0.9) < 0.1
    assert acceptance.chance("tree", 0, 0.7) == pytest.approx(0.7), "never judged: its own word"
    counts, _ = acceptance.estimate("tree", "s", HERE).levels[0]
    assert counts.steps / counts.drafted == pytest.approx(0.5)


def prices_of(controller: Controller) -> Prices:
    found = controller.costs.at(100)
    assert found is not None
    return found


def rate_of(controller: Controller) -> float:
    option = controller.option("tree", "s", HERE, prices_of(controller))
    assert option is not None
    return option.rate


def test_steps_are_what_drafting_is_charged_by() -> None:
    played, drafter = world()
    drafter.shapes_itself = True
    controller = played.controller
    first = controller.option("tree", "s", HERE, prices_of(controller))
    assert first is not None
    assert first.round_ms[USUAL_NODES] == pytest.approx(10.0 + USUAL_NODES * WIDTH_MS + 1.0)
    for _ in range(64):
        learn(controller, outcome(TREE, (1,)))
    dearer = controller.option("tree", "s", HERE, prices_of(controller))
    assert dearer is not None
    assert dearer.round_ms[4] > first.round_ms[4] + 0.9, "two steps for four"


def test_prices_are_what_width_and_steps_cost_at_the_going_rate() -> None:
    played, _ = world()
    controller = played.controller
    prices = prices_of(controller)
    option = controller.option("tree", "s", HERE, prices)
    assert option is not None and option.num_draft_tokens == MAX_DRAFT_TOKENS
    growth = controller.growth("tree", prices, 0, rate=0.2)
    assert len(growth.node_prices) == MAX_DRAFT_TOKENS
    assert growth.node_prices == pytest.approx([0.2 * WIDTH_MS] * MAX_DRAFT_TOKENS)
    assert growth.step_price == pytest.approx(0.2 * 1.0)
    assert growth.chance(0.6) == pytest.approx(0.6)


def test_a_plan_for_such_a_drafter_carries_prices_and_others_none() -> None:
    played, _ = world()
    by_name = policy_of(played.controller, COLD, "tree", None).plan(turn())
    assert by_name.growth is not None and by_name.num_draft_tokens == MAX_DRAFT_TOKENS
    fixed = policy_of(played.controller, COLD, "tree", 3).plan(turn())
    assert fixed.growth is None and fixed.num_draft_tokens == 3
    chained = policy_of(World({"chain": Simulated(1.0, 0.5)}).controller, COLD, "chain", None)
    assert chained.plan(turn()).growth is None


def test_the_rate_of_such_a_drafter_is_what_its_rounds_gave() -> None:
    played, _ = world()
    controller = played.controller
    for _ in range(100):
        learn(controller, outcome(TREE, (0, 2)))
    round_ms = prices_of(controller).round_ms("tree", 4, 2)
    assert rate_of(controller) == pytest.approx(3 / round_ms, rel=0.05)


MANY = {
    "cheap": Simulated(0.1, 0.55),
    "model": Simulated(0.8, 0.6),
    "head": Simulated(1.2, 0.92),
    "exit": Simulated(2.5, 0.85),
    "copy": Simulated(0.05, 0.3),
    "other": Simulated(0.9, 0.4),
    "third": Simulated(1.0, 0.55),
    "self": Simulated(4.0, 0.9),
}


@pytest.mark.slow
def test_the_best_of_many_is_found_though_others_look_better_at_first() -> None:
    """Eight ways; the best is dearer than four of them. 2000 rounds, the learning included."""
    reached = []
    for seed in range(4):
        played = World(MANY, seed, noise=0.1)
        played.run(2000, COLD)
        reached.append(played.rate() / best_fixed_rate(MANY))
    assert sum(reached) / len(reached) >= 0.95 and min(reached) >= 0.85, reached


@pytest.mark.slow
def test_each_that_could_win_is_tried() -> None:
    """The two whose every token would have to be accepted to win need not be."""
    played = World(MANY, 1)
    played.run(4000, COLD)
    known = {n: played.controller.acceptance.estimate(n, "s", HERE).evidence for n in MANY}
    assert all(known[name] > 0.0 for name in MANY if name not in ("exit", "self")), known


def test_a_drafter_asked_for_by_name_is_asked_though_it_signals_nothing() -> None:
    played, drafter = world()
    drafter.is_silent = True
    by_name = policy_of(played.controller, COLD, "tree", None).plan(turn())
    assert (by_name.drafter, by_name.num_draft_tokens) == ("tree", 4)
    assert policy_of(played.controller, COLD, "auto", None).plan(turn()).drafter == "off"


def test_asking_a_drafter_that_proposes_nothing_is_charged_to_it() -> None:
    """Else the asking would be paid for round after round."""
    played, _ = world()
    policy = policy_of(played.controller, COLD, "tree", None)
    before = rate_of(played.controller)
    for _ in range(60):
        plan = policy.plan(TEXT)
        assert plan.drafter == "tree"
        step = Step("off", 0, 0, 1, 5.0, 10.0, 100, signal=plan.signal)
        policy.observe(TEXT, Outcome(step, Proposal(), Verdict((), 1), torch.empty(0)))
    after = rate_of(played.controller)
    assert after == pytest.approx(1.0 / 15.0, rel=0.2) and after < before
    choice = policy_of(played.controller, COLD, "auto", None).plan(turn())
    assert choice.drafter == "off" or choice.is_probe
