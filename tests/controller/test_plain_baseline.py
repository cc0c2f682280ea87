"""The cost of plain decoding that a turn is compared with follows the machine's load.

On a clock of its own: what is shown lies within 5 % of plain decoding at the same moments.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median

import pytest

from localspec.controller.costs import Costs
from localspec.controller.plain_baseline import PlainBaseline
from localspec.core.decoding import OFF, Others, Step

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
    moments. noise: spread of single rounds, and of their drafts. took_ms: all rounds; even_ms: the
    same without noise. draft_ms: one draft."""

    def __init__(self, costs: Costs, load: Load, noise: float = 0.0, draft_ms: float = 3.0) -> None:
        self.costs, self.baseline = costs, PlainBaseline(costs)
        self.truth_ms = self.took_ms = self.even_ms = 0.0
        self._load, self._noise, self._random, self._num = load, noise, Random(7), 0
        self._draft_ms = draft_ms

    def round(self, num_draft_tokens: int, slower: float = 1.0, pause_ms: float = 0.0) -> None:
        """pause_ms: what the round takes because it follows a pause, whatever it does."""
        load = self._load(self._num)
        accepted = self._random.randint(0, num_draft_tokens)
        noise, of_draft = (self._random.uniform(-self._noise, self._noise) for _ in range(2))
        even_ms = load * slower * (PLAIN_MS + PLACE_MS * num_draft_tokens)
        verify_ms = (1.0 + noise) * even_ms + pause_ms
        drafter, draft_ms = ("d", self._draft_ms) if num_draft_tokens else (OFF, 0.0)
        self.even_ms += even_ms + pause_ms + draft_ms
        draft_ms *= 1.0 + of_draft
        self.took_ms += verify_ms + draft_ms
        step = Step(
            drafter, num_draft_tokens, accepted, accepted + 1, draft_ms, verify_ms, 128 + self._num
        )
        self.costs.observe(step)
        self.baseline.observe(step, accepted + 1)
        self.truth_ms += load * PLAIN_MS * (accepted + 1) + pause_ms
        self._num += 1

    def reply(self, num_rounds: int, pause_ms: float = 0.0) -> float | None:
        """A turn that only drafts: how much is shown, as a share of the truth."""
        self._only_drafted(num_rounds, pause_ms)
        shown_ms = sum(self.baseline.end_turn())
        assert self.baseline.plain_ms is None or shown_ms == pytest.approx(self.baseline.plain_ms)
        return shown_ms / self.truth_ms if shown_ms else None

    def gain(self, num_rounds: int) -> float | None:
        """The gain that is shown, as a share of what drafting gains under the same load."""
        share = self.reply(num_rounds)
        return None if share is None else share * self.even_ms / self.took_ms

    def at_least(self, num_rounds: int) -> float:
        """The same of what it is at least."""
        self._only_drafted(num_rounds)
        self.baseline.end_turn()
        assert self.baseline.least_ms is not None
        return self.baseline.least_ms / self.truth_ms

    def _only_drafted(self, num_rounds: int, pause_ms: float = 0.0) -> None:
        self.costs.begin_turn()
        self.baseline = PlainBaseline(self.costs)
        self.truth_ms = self.took_ms = self.even_ms = 0.0
        self.round(3, pause_ms=pause_ms)
        self.drafted(num_rounds - 1, looks=False)

    def drafted(self, num_rounds: int = NUM_ROUNDS, looks: bool = True) -> None:
        for place in range(num_rounds):
            if looks and place % LOOK_EVERY == LOOK_EVERY - 1:
                self.round(0, COLD_CACHES)
                self.round(0)
            else:
                self.round(self._random.choice((3, 4, 7)))


def changed(factor: float, at: int) -> Load:
    return lambda num: factor if num >= at else 1.0


LOADS: dict[str, Load] = {
    "calm": lambda num: 1.0,
    "1.2": lambda num: 1.2,
    "1.5": lambda num: 1.5,
    "2": lambda num: 2.0,
    "calmer than when measured": lambda num: 0.4,
}


@pytest.mark.slow
@pytest.mark.parametrize("pause_ms", [0.0, 50.0])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("num_rounds", [5, 8, 20])
def test_a_first_reply_is_compared_under_any_load_that_stays(
    num_rounds: int, load: Load, pause_ms: float
) -> None:
    """Without a plain round, and where the first round after a pause takes 3.5 times its cost:
    plain decoding would have waited for that once as well."""
    assert Run(table(), load).reply(num_rounds, pause_ms) == pytest.approx(1.0, rel=0.01)
    noisy = Run(table(), load, noise=0.1)
    shown = [noisy.reply(num_rounds, pause_ms) for _ in range(40)]
    errors = [abs(share - 1.0) for share in shown if share is not None]
    assert len(errors) >= 38, "scatter of a tenth is usual"
    assert sum(error < 0.05 for error in errors) >= 0.85 * len(errors)


@pytest.mark.parametrize("noise", [0.3, 0.75])
@pytest.mark.parametrize("num_rounds", [10, 20])
def test_a_busy_machine_hides_no_gain(num_rounds: int, noise: float) -> None:
    """Rounds scatter widely there, those of plain decoding too: the gain stays what it is."""
    run = Run(table(), lambda num: 3.0, noise)
    shown = [run.gain(num_rounds) for _ in range(60)]
    gains = [share for share in shown if share is not None]
    assert len(gains) >= 55
    assert median(gains) == pytest.approx(1.0, rel=0.03)
    assert sum(abs(share - 1.0) < 0.15 for share in gains) >= 0.85 * len(gains)


@pytest.mark.parametrize("num_rounds", [5, 8])
def test_a_gain_is_not_shown_where_few_drafts_of_uneven_length_decide_it(num_rounds: int) -> None:
    run = Run(table(), lambda num: 1.0, noise=0.9, draft_ms=60.0)
    assert sum(run.reply(num_rounds) is None for _ in range(40)) >= 34


def test_a_fast_reply_of_few_rounds_is_compared_where_rounds_scatter_little() -> None:
    """A short reply that drafting shortened to three rounds, after a usual one."""
    run = Run(table(), lambda num: 1.0, noise=0.15)
    run.reply(20)
    shown = [run.reply(3) for _ in range(40)]
    found = [share for share in shown if share is not None]
    assert len(found) >= 36
    assert sum(abs(share - 1.0) < 0.15 for share in found) >= 0.85 * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("num_rounds", [4, 6, 12])
@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_what_plain_decoding_takes_at_least_holds_in_19_of_20_replies(
    noise: float, num_rounds: int
) -> None:
    run = Run(table(), lambda num: 1.0, noise=noise)
    found = [run.at_least(num_rounds) for _ in range(1000)]
    assert sum(share > 1.0 for share in found) <= 0.06 * len(found)
    assert median(found) > 0.6, "it still says something"


def test_costs_of_drafts_that_were_measured_too_low_make_no_gain() -> None:
    """They look like a load, which plain decoding would have met as well."""
    run = Run(table(misjudged=0.6), lambda num: 1.0)
    assert run.at_least(4) <= 1.0


def test_how_rounds_scatter_is_remembered_from_the_reply_before() -> None:
    run = Run(table(), lambda num: 1.0, noise=0.75, draft_ms=60.0)
    run.reply(20)
    assert all(run.reply(3) is None for _ in range(10))


def test_a_long_reply_is_compared_although_its_rounds_scatter() -> None:
    run = Run(table(), lambda num: 1.0, noise=0.5)
    shown = [run.reply(150) for _ in range(10)]
    found = [share for share in shown if share is not None]
    assert len(found) == 10 and median(found) == pytest.approx(1.0, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("at", [30, 150])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.2, 1.6, 3.0])
@pytest.mark.parametrize("misjudged", [0.85, 1.0, 1.15])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_change_of_load_in_mid_turn_is_followed(
    at: int, factor: float, misjudged: float, noise: float
) -> None:
    """Plain rounds between the drafted ones mend what was misjudged."""
    run = Run(table(misjudged), changed(factor, at), noise)
    run.drafted()
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0])
def test_a_change_of_load_in_a_short_reply_is_followed_too(factor: float) -> None:
    shown = Run(table(), changed(factor, 10)).reply(20)
    assert shown is None or shown == pytest.approx(1.0, rel=0.05)


def test_a_load_that_comes_and_goes_is_followed() -> None:
    for looks in (True, False):
        run = Run(table(), lambda num: (1.0, 1.6, 2.5)[num // 24 % 3], 0.05)
        run.drafted(looks=looks)
        assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.05)


def test_a_moment_that_a_program_takes_is_charged_to_plain_decoding_once() -> None:
    run = Run(table(), lambda num: 1.0)
    for place in range(40):
        run.round(3, pause_ms=500.0 if place == 20 else 0.0)
    assert run.baseline.plain_ms == pytest.approx(run.truth_ms, rel=0.02)


def test_the_parts_of_the_rounds_are_the_whole() -> None:
    run = Run(table(), changed(1.5, 90), 0.1)
    run.drafted()
    parts = run.baseline.end_turn()
    assert len(parts) == NUM_ROUNDS + NUM_ROUNDS // LOOK_EVERY
    assert sum(parts) == pytest.approx(run.baseline.plain_ms)


def test_what_plain_rounds_of_one_turn_corrected_holds_for_the_next() -> None:
    run = Run(table(misjudged=0.8), lambda num: 1.0)
    run.drafted()
    assert run.reply(10) == pytest.approx(1.0, rel=0.05)


def test_costs_that_are_measured_between_two_replies_count_in_the_next() -> None:
    """As after a message that interrupted measuring."""
    run = Run(table(), lambda num: 1.0)
    assert run.reply(20) == pytest.approx(1.0, rel=0.01)
    run.costs.set_verify(1, 128, 2.0 * PLAIN_MS)
    assert run.reply(20) == pytest.approx(2.0, rel=0.01)


def test_a_turn_that_shared_a_forward_is_not_compared_and_the_next_one_is() -> None:
    costs = table()
    baseline = PlainBaseline(costs)
    shared = Step("d", 3, 1, 2, 3.0, 60.0, 200, others=Others(1, 4, 10.0))
    own = Step("d", 3, 1, 2, 3.0, 24.5, 200)
    for step in (*[own] * 20, shared):
        costs.observe(step)
        baseline.observe(step, 2)
    assert baseline.was_shared and baseline.plain_ms is None and baseline.end_turn() == ()
    baseline = PlainBaseline(costs)
    for _ in range(20):
        costs.observe(own)
        baseline.observe(own, 2)
    assert baseline.plain_ms == pytest.approx(20 * 2 * PLAIN_MS)
