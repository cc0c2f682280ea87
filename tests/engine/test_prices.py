"""Readings of the cost table: of one moment, kept for a while, and made anew in time."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from localspec.engine.costs import WIDTHS, Costs
from localspec.engine.prices import KEPT_ROUNDS, MAX_DRAFT_TOKENS, PriceList, Prices


def table(plain_ms: float = 10.0) -> Costs:
    costs = Costs()
    for width in WIDTHS:
        costs.set_verify(width, 0, plain_ms + 0.2 * (width - 1))
    costs.set_draft_step("d", 0, 1.5)
    return costs


def test_a_round_is_its_forward_and_its_steps() -> None:
    prices = Prices(table(), 100)
    curve = prices.curve("d", steps_a_token=1.0)
    assert curve is not None and len(curve.round_ms) == MAX_DRAFT_TOKENS + 1
    assert curve.round_ms[0] == prices.plain_ms == pytest.approx(10.0)
    assert curve.round_ms[4] == pytest.approx(10.8 + 4 * 1.5)
    assert curve.ceiling == pytest.approx(16 / (13.0 + 15 * 1.5))
    assert prices.place_ms == pytest.approx([0.2] * MAX_DRAFT_TOKENS)
    assert prices.jump_ms == pytest.approx(0.0, abs=1e-9)


def test_a_jump_from_one_token_to_several_is_charged_once() -> None:
    """As where another kernel serves several tokens: 10 ms for one, 16 for two, then 0.1 each."""
    costs = Costs()
    for width in WIDTHS:
        costs.set_verify(width, 0, 10.0 if width == 1 else 16.0 + 0.1 * (width - 2))
    prices = Prices(costs, 100)
    assert prices.place_ms == pytest.approx([0.1] * MAX_DRAFT_TOKENS)
    assert prices.jump_ms == pytest.approx(5.9)


@pytest.mark.parametrize("seed", range(12))
def test_jump_and_places_never_cost_more_than_the_forward_and_rise(seed: int) -> None:
    """Also where a width costs more than a wider one, as between two kernels."""
    rng = random.Random(seed)
    costs, verify_ms = Costs(), 10.0
    for width in WIDTHS:
        verify_ms += rng.choice((0.0, 0.1, 3.0, -1.0 if 2 < width < 16 else 0.0)) * rng.random()
        verify_ms = max(verify_ms, costs.plain_ms(0) or 0.0)
        costs.set_verify(width, 0, verify_ms)
    prices = Prices(costs, 100)
    totals = [prices.plain_ms + prices.jump_ms + ms for ms in accumulate(prices.place_ms)]
    assert list(prices.place_ms[1:]) == sorted(prices.place_ms[1:])
    for total, true in zip(totals, prices.verify_ms[1:], strict=True):
        assert total <= true + 1e-9
    assert totals[-1] == pytest.approx(prices.verify_ms[-1])


def test_a_tree_runs_at_least_once_and_less_often_than_it_has_tokens() -> None:
    curve = Prices(table(), 100).curve("d", steps_a_token=0.25)
    assert curve is not None
    assert curve.round_ms[2] == pytest.approx(10.4 + 1.5)
    assert curve.round_ms[8] == pytest.approx(11.6 + 2 * 1.5)


def test_a_drafter_never_measured_has_no_curve_until_it_is() -> None:
    costs = table()
    prices = Prices(costs, 100)
    assert prices.curve("new", 1.0) is None and prices.step_ms("new") is None
    costs.set_draft_step("new", 0, 2.0)
    assert Prices(costs, 100).curve("new", 1.0) is not None


def test_a_reading_is_kept_for_a_while_and_near_its_context() -> None:
    costs, kept = table(), PriceList()
    first = kept.at(costs, True, 100)
    costs.set_verify(1, 0, 20.0)
    assert kept.at(costs, True, 110) is first, "costs of another moment are not compared with it"
    assert kept.at(costs, False, 100) is not first and kept.at(costs, True, 4000) is not first
    for _ in range(KEPT_ROUNDS):
        kept.tick()
    later = kept.at(costs, True, 100)
    assert later is not first and later is not None and later.plain_ms == pytest.approx(20.0)


def test_nothing_is_kept_of_a_table_that_is_empty() -> None:
    kept = PriceList()
    assert kept.at(Costs(), True, 100) is None
    assert kept.at(table(), True, 100) is not None
    kept.clear()
    assert kept.at(Costs(), True, 100) is None
