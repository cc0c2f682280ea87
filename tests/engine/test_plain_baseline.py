"""The cost of plain decoding that a turn is compared with follows the machine's load."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from localspec.core import OFF, Others, Step
from localspec.engine.costs import Costs
from localspec.engine.plain_baseline import PlainBaseline

PLAIN_MS, PLACE_MS = 20.0, 1.5  # of one token, and of each draft token's place
COLD_CACHES = 1.4  # the first plain round after a draft
LOOK_EVERY = 16  # drafted rounds
NUM_ROUNDS = 240

Load = Callable[[int], float]


def table(misjudged: float = 1.0) -> Costs:
    """misjudged: what widths over 1 were measured at, as a share of what they take."""
    costs = Costs()
    for width in (1, 2, 4, 8, 16):
        share = 1.0 if width == 1 else misjudged
        costs.set_verify(width, 128, share * (PLAIN_MS + PLACE_MS * (width - 1)))
    return costs


class Run:
    """Turns on a clock of their own. truth_ms: plain decoding of the same tokens at the same
    moments."""

    def __init__(self, costs: Costs, load: Load, noise: float = 0.0) -> None:
        self.baseline = PlainBaseline(costs)
        self.truth_ms = 0.0
        self.alarms = list[int]()
        self._load, self._noise, self._random, self._num = load, noise, Random(7), 0

    def round(self, num_draft_tokens: int, slower: float = 1.0) -> None:
        load = self._load(self._num)
        accepted = self._random.randint(0, num_draft_tokens)
        noise = 1.0 + self._random.uniform(-self._noise, self._noise)
        verify_ms = load * noise * slower * (PLAIN_MS + PLACE_MS * num_draft_tokens)
        drafter, draft_ms = ("d", 3.0) if num_draft_tokens else (OFF, 0.0)
        step = Step(
            drafter, num_draft_tokens, accepted, accepted + 1, draft_ms, verify_ms, 128 + self._num
        )
        if self.baseline.observe(step, accepted + 1):
            self.alarms.append(self._num)
        self.truth_ms += load * PLAIN_MS * (accepted + 1)
        self._num += 1

    def drafted(self, num_rounds: int = NUM_ROUNDS, looks: bool = True) -> None:
        for place in range(num_rounds):
            if looks and place % LOOK_EVERY == LOOK_EVERY - 1:
                self.round(0, COLD_CACHES)
                self.round(0)
            else:
                self.round(self._random.choice((3, 4, 7)))


def changed(factor: float, at: int) -> Load:
    return lambda num: factor if num >= at else 1.0


@pytest.mark.parametrize("at", [30, 150])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.2, 1.6, 3.0])
@pytest.mark.parametrize("misjudged", [0.85, 1.0, 1.15])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_change_of_load_in_mid_turn_is_followed(
    at: int, factor: float, misjudged: float, noise: float
) -> None:
    run = Run(table(misjudged), changed(factor, at), noise)
    run.drafted()
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.05)


def test_a_load_that_comes_and_goes_is_followed() -> None:
    run = Run(table(), lambda num: 2.0 if num // 70 % 2 else 1.0, 0.05)
    run.drafted()
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.05)


def test_loads_that_were_seen_once_are_compared_without_a_plain_round() -> None:
    """The load of a desktop comes and goes."""
    run = Run(table(), lambda num: (1.0, 1.6, 2.5)[num // 12 % 3], 0.05)
    run.drafted()
    run.baseline.begin_turn()
    run.truth_ms = 0.0
    run.drafted(60, looks=False)
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.05)
    assert run.baseline.end_turn()


@pytest.mark.parametrize("factor", [0.4, 2.0])
def test_without_a_plain_round_a_changed_load_cannot_be_compared(factor: float) -> None:
    run = Run(table(), changed(factor, 100))
    run.drafted(100, looks=False)
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.01)
    run.drafted(50, looks=False)
    assert run.baseline.plain_ms is None
    assert len(run.alarms) == 1 and 100 < run.alarms[0] < 105, "it is told once, and soon"
    assert run.baseline.end_turn() == ()


def test_plain_rounds_after_the_change_make_the_rounds_before_them_comparable() -> None:
    run = Run(table(), changed(2.0, 50))
    run.drafted(100, looks=False)
    assert run.baseline.plain_ms is None
    run.round(0, COLD_CACHES)
    for _ in range(5):
        run.round(0)
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.05)


def test_a_busy_moment_that_no_plain_round_saw_stays_without_comparison() -> None:
    run = Run(table(), lambda num: 3.0 if 40 <= num < 70 else 1.0)
    run.drafted(110, looks=False)
    for _ in range(6):
        run.round(0)
    assert run.baseline.plain_ms is None
    assert run.baseline.end_turn() == (), "its calm rounds alone would be another figure"


def test_a_moment_too_short_to_matter_does_not_spoil_a_turn() -> None:
    run = Run(table(), lambda num: 2.0 if 40 <= num < 44 else 1.0)
    run.drafted(400, looks=False)
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.05)


def test_the_parts_of_the_rounds_are_the_whole() -> None:
    run = Run(table(), changed(1.5, 90), 0.1)
    run.drafted()
    parts = run.baseline.end_turn()
    assert len(parts) == NUM_ROUNDS + NUM_ROUNDS // LOOK_EVERY
    assert sum(parts) == pytest.approx(run.baseline.plain_ms)


def test_what_one_turn_showed_of_the_load_holds_for_the_next() -> None:
    run = Run(table(), lambda num: 2.0)
    run.drafted(60)
    run.baseline.begin_turn()
    run.truth_ms = 0.0
    run.drafted(10, looks=False)
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.05)


def test_the_costs_it_was_made_of_may_change_meanwhile() -> None:
    costs = table()
    run = Run(costs, lambda num: 1.0)
    for _ in range(200):
        costs.observe(5, 128, 100.0)
    run.drafted(40, looks=False)
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.01)


def test_a_plain_round_unlike_those_around_it_teaches_nothing() -> None:
    """Two of the first rounds of a reply wait for another program, the plain ones before do not."""
    run = Run(table(), lambda num: 9.0 if num in (3, 4) else 1.0)
    run.round(0)
    run.round(0)
    for _ in range(3):
        run.round(3)
    assert run.baseline.plain_ms is None
    run.baseline.end_turn()
    run.baseline.begin_turn()
    run.drafted(60, looks=False)
    assert run.baseline.end_turn(), "the load is again the one measured"


def test_a_turn_that_shared_a_forward_is_not_compared_and_the_next_one_is() -> None:
    baseline = PlainBaseline(table())
    shared = Step("d", 3, 1, 2, 3.0, 60.0, 200, others=Others(1, 4, 10.0))
    own = Step("d", 3, 1, 2, 3.0, 24.5, 200)
    for step in (*[own] * 20, shared):
        assert not baseline.observe(step, 2)
    assert baseline.plain_ms is None and baseline.end_turn() == ()
    baseline.begin_turn()
    for _ in range(20):
        baseline.observe(own, 2)
    assert baseline.plain_ms == pytest.approx(20 * 2 * PLAIN_MS)
