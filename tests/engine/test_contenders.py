"""Who is weighed in which round, and when planning rests."""

from __future__ import annotations

from typing import Any

from localspec.core import OFF, SamplingParams, Sequence
from localspec.engine.acceptance import Situation
from localspec.engine.contenders import (
    FULL_LOOK,
    LOOKS,
    MOST_REST,
    PLANNING_SHARE,
    SHARE,
    Contenders,
    Rest,
)
from localspec.engine.controller import Option
from localspec.engine.prices import RoundCurve
from tests.engine.simulation import PLAIN_MS, Simulated, World

PLAIN_RATE = 1.0 / PLAIN_MS


def option(drafter: str, rate: float, signal: str = "s") -> Option:
    """rate: to plain decoding."""
    curve = RoundCurve([PLAIN_MS], 5.0 * PLAIN_RATE)
    return Option(drafter, signal, 4, rate * PLAIN_RATE, curve, 0.5, PLAIN_MS)


def test_who_is_far_behind_is_left_out_until_the_next_full_look() -> None:
    contenders, near, far = Contenders(), option("near", 1.2), option("far", 1.2 * SHARE - 0.01)
    assert contenders.begin(wants_all=False)
    assert contenders.weigh({"near": "s", "far": "s"}, [near, far], PLAIN_RATE) == [near]
    for _ in range(FULL_LOOK - 1):
        assert not contenders.begin(wants_all=False)
        assert contenders.is_far("far", "s") and not contenders.is_far("near", "s")
    assert contenders.begin(wants_all=False)
    assert not contenders.is_far("far", "s")


def test_with_another_signal_it_is_weighed_again_at_once() -> None:
    contenders = Contenders()
    contenders.begin(wants_all=True)
    contenders.weigh({"lookup": "short"}, [option("lookup", 0.5, "short")], PLAIN_RATE)
    contenders.begin(wants_all=False)
    assert contenders.is_far("lookup", "short") and not contenders.is_far("lookup", "long")


def test_a_signal_that_never_changes_is_not_asked_for() -> None:
    contenders = Contenders()
    for look in range(LOOKS + 1):
        contenders.begin(wants_all=True)
        signals = {"same": "s", "other": f"match {look}"}
        found = [option("same", 0.5), option("other", 0.5, f"match {look}")]
        assert not contenders.need_not_ask("same")
        contenders.weigh(signals, found, PLAIN_RATE)
    assert contenders.need_not_ask("same") and not contenders.need_not_ask("other")


def test_planning_rests_where_a_plan_takes_long_beside_a_step() -> None:
    rest = Rest()
    for _ in range(100):
        rest.planned(2.5 * PLANNING_SHARE * PLAIN_MS)
    rest.begin(PLAIN_MS)
    assert [rest.goes_on() for _ in range(4)] == [True, True, False, False]
    rest.begin(10.0 * PLAIN_MS)  # a larger model: the same plan is nothing there
    assert not rest.goes_on()
    rest.begin(PLAIN_MS / 1000.0)
    assert [rest.goes_on() for _ in range(MOST_REST + 1)] == MOST_REST * [True] + [False]


def test_nobody_is_asked_while_planning_rests() -> None:
    """And a turn begins with a plan, whatever the one before it ended with."""
    asked: list[int] = []

    class Asked(Simulated):
        def signal(self, sequence: Sequence) -> str | None:
            asked.append(len(sequence.tokens))
            return f"match {len(sequence.tokens)}"

    world = World({"d": Asked(20.0, 0.1)})
    world.controller.rests[Situation(0)] = rest = Rest()
    for _ in range(100):
        rest.planned(PLAIN_MS)
    rng: Any = None
    for _ in range(2):
        sequence = Sequence((1, 2), SamplingParams(), 100, frozenset(), rng)
        policy = world.controller.policy(SamplingParams(), "auto", None)
        for _ in range(1 + MOST_REST):
            assert policy.plan(sequence).drafter == OFF
            sequence.append([9])
    assert asked == [2, 2]
