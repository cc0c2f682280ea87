"""The cost table: what was measured comes back, what was not is interpolated, drift is followed."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from typing import Any

import pytest

from localspec.controller.acceptance import Acceptance, Situation
from localspec.controller.costs import MAX_DRAFT_TOKENS, WIDTHS, Costs, Curve
from localspec.controller.options import option_of
from localspec.controller.prices import Prices
from localspec.core.decoding import ALONE, OFF, Others, Step


def measured() -> Costs:
    costs = Costs()
    for width, ms in ((1, 10.0), (2, 11.0), (4, 13.0), (8, 20.0), (16, 40.0)):
        costs.set_verify(width, 100, ms)
        costs.set_verify(width, 1100, ms + 5.0)
    costs.set_draft_step("small", 100, 2.0)
    return costs


def drafted(draft_ms: float, others: Others = ALONE) -> Step:
    return Step("small", 4, 4, 5, draft_ms, 20.0, 100, others=others)


def observe(
    costs: Costs, width: int, took_ms: float, context: int = 100, draft_ms: float = 0.0
) -> None:
    """A round of this width; draft_ms: of the steps of "small", 2 ms each in quiet."""
    count = width - 1
    step = Step("small" if count else OFF, count, 0, 1, draft_ms, took_ms, context)
    costs.observe(step, count if draft_ms else None)


def run(costs: Costs, num_rounds: int, load: float = 1.0, **wrong: float) -> None:
    """Three plain rounds and four of width 4 in turns, of which the first plain one finds cold
    caches. wrong: what plain, drafted and the steps take of what they were measured at."""
    for number in range(num_rounds):
        is_plain = number % 7 < 3
        share = load * wrong.get("plain" if is_plain else "drafted", 1.0)
        if is_plain:
            observe(costs, 1, 10.0 * share * (1.4 if number % 7 == 0 else 1.0))
        else:
            observe(costs, 4, 13.0 * share, draft_ms=6.0 * load * wrong.get("steps", 1.0))


def test_nothing_is_known_before_it_is_measured() -> None:
    costs = Costs()
    assert not costs.is_measured
    assert costs.verify_ms(1, 0) is None and costs.plain_ms(0) is None
    assert costs.draft_ms("small", 1, 0) is None
    observe(costs, 1, 5.0)
    observe(costs, 2, 5.0, draft_ms=5.0)
    assert costs.verify_ms(1, 0) is None


def test_measured_cells_come_back_and_widths_between_are_interpolated() -> None:
    costs = measured()
    assert [costs.verify_ms(w, 100) for w in (1, 4, 16)] == pytest.approx([10, 13, 40])
    assert costs.verify_ms(6, 100) == pytest.approx(16.5)
    assert costs.verify_ms(24, 100) == pytest.approx(60.0)  # the last slope goes on


def test_context_between_and_beyond_the_measured_points() -> None:
    curve = Curve({100: 10.0, 1100: 15.0})
    assert [curve.at(c) for c in (0, 100, 600, 1100, 2100)] == pytest.approx([10, 10, 12.5, 15, 20])


def test_noise_never_makes_more_context_cheaper() -> None:
    curve = Curve({100: 10.0, 1100: 9.0})
    values = [curve.at(c) for c in range(0, 5000, 100)]
    assert values == sorted(values) and min(values) > 0


def test_disturbed_rounds_apart_move_nothing() -> None:
    costs = measured()
    for _ in range(20):
        run(costs, 7)
        observe(costs, 4, 10_000.0)
        assert costs.plain_ms(100) == pytest.approx(10.0)
        assert costs.verify_ms(4, 100) == pytest.approx(13.0)


def test_a_load_moves_all_costs_within_seven_rounds_of_any_kind() -> None:
    """Also of what does not run meanwhile."""
    costs = measured()
    run(costs, 28)
    for _ in range(7):
        observe(costs, 4, 3 * 13.0, draft_ms=3 * 6.0)
    assert costs.load.value == pytest.approx(3.0)
    assert costs.plain_ms(100) == pytest.approx(30.0)
    assert costs.verify_ms(8, 1100) == pytest.approx(75.0)
    assert costs.draft_ms("small", 2, 100) == pytest.approx(12.0)
    assert prices(costs, ALONE).plain_ms == pytest.approx(10.0), "in quiet"


@pytest.mark.parametrize("load", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("wrong", [0.05, 0.5, 0.8, 1.4, 2.0])
def test_what_was_measured_wrongly_is_found_beside_the_rounds_around_it(
    wrong: float, load: float
) -> None:
    """Whichever it is, plain decoding and a draft are priced right beside each other."""
    for name in ("plain", "drafted", "steps"):
        costs = measured()
        run(costs, 140, load, **{name: wrong})
        found = costs.plain_ms(100), costs.verify_ms(4, 100), costs.draft_ms("small", 3, 100)
        truth = {"plain": 10.0, "drafted": 13.0, "steps": 6.0}
        truth[name] *= wrong
        assert found == pytest.approx([load * ms for ms in truth.values()], rel=0.06), name


def test_a_load_that_changes_is_not_taken_for_a_cost_that_was_measured_wrongly() -> None:
    costs = measured()
    for number in range(40):
        run(costs, 7, load=(1.0, 2.5, 1.5)[number % 3])
    kept = costs.snapshot()
    assert kept["verify_ms"]["1"]["100"] == pytest.approx(10.0, rel=0.05)
    assert kept["verify_ms"]["4"]["100"] == pytest.approx(13.0, rel=0.05)
    assert kept["draft_step_ms"]["small"]["100"] == pytest.approx(2.0, rel=0.05)


def test_a_width_that_never_ran_is_corrected_like_its_neighbours_that_did() -> None:
    costs = measured()
    run(costs, 140, drafted=1.4)
    assert costs.verify_ms(8, 100) == pytest.approx(1.4 * 20.0, rel=0.05)
    assert costs.plain_ms(100) == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("scatter", [0.1, 0.5])
def test_noise_around_the_truth_does_not_carry_the_costs_away(scatter: float) -> None:
    """Also not of plain decoding, where nothing but drafts runs for long."""
    costs, rng = measured(), random.Random(3)
    for number in range(4000):
        width = 4 if number > 1000 else (1, 1, 4, 4)[number % 4]
        truth = 10.0 if width == 1 else 13.0
        observe(costs, width, truth * rng.uniform(1.0 - scatter, 1.0 + scatter))
    kept = costs.snapshot()["verify_ms"]
    assert kept["1"]["100"] / kept["4"]["100"] == pytest.approx(
        10.0 / 13.0, rel=0.02 + 0.3 * scatter
    )


def test_measuring_again_after_a_drift_gives_what_was_measured() -> None:
    costs = measured()
    run(costs, 70, load=2.5, drafted=1.4)
    costs.set_verify(4, 100, 14.0)
    costs.set_draft_step("small", 100, 3.0)
    assert costs.verify_ms(4, 100) == pytest.approx(14.0)
    assert costs.draft_ms("small", 2, 100) == pytest.approx(6.0)


def test_state_makes_the_round_trip_through_json() -> None:
    costs = measured()
    run(costs, 70, drafted=1.4)
    again = Costs.restored(json.loads(json.dumps(costs.snapshot())))
    load = costs.load.value
    for width in (1, 3, 5, 16):
        for context in (0, 100, 700, 3000):
            assert load * (again.verify_ms(width, context) or 0.0) == pytest.approx(
                costs.verify_ms(width, context)
            )
    assert load * (again.draft_ms("small", 5, 500) or 0.0) == pytest.approx(
        costs.draft_ms("small", 5, 500)
    )


@pytest.mark.parametrize(
    "cell", [0.0, -1.0, float("nan"), float("inf"), "much", None, [], {}], ids=str
)
def test_impossible_costs_are_refused(cell: Any) -> None:
    state = {"verify_ms": {"1": {"100": cell}}, "draft_step_ms": {}}
    with pytest.raises((KeyError, ValueError, TypeError, AttributeError)):
        Costs.restored(state)


def test_a_round_wider_than_all_that_was_measured_teaches_nothing() -> None:
    costs = measured()
    run(costs, 14)
    for _ in range(60):
        observe(costs, 65, 10.0)
    assert costs.verify_ms(16, 100) == pytest.approx(40.0)


def test_noise_in_a_half_finished_measurement_makes_no_width_free() -> None:
    costs = Costs()
    costs.set_verify(1, 128, 10.0)
    costs.set_verify(2, 128, 9.2)
    assert [costs.verify_ms(width, 128) for width in (3, 8, 16)] == [9.2] * 3


def test_what_was_restored_is_not_fresh() -> None:
    costs = measured()
    assert costs.is_fresh(4, 100) and costs.is_fresh("small", 100)
    assert not costs.is_fresh(4, 500) and not costs.is_fresh("other", 100)
    again = Costs.restored(costs.snapshot())
    assert not again.is_fresh(4, 100) and not again.is_fresh("small", 100)
    assert again.knows("small") and not again.knows("other")


# all costs at one moment


def table(plain_ms: float = 10.0) -> Costs:
    costs = Costs()
    for width in WIDTHS:
        costs.set_verify(width, 0, plain_ms + 0.2 * (width - 1))
    costs.set_draft_step("d", 0, 1.5)
    return costs


def reading(costs: Costs) -> Prices:
    found = costs.at(100)
    assert found is not None
    return found


def test_a_round_is_its_forward_and_its_steps() -> None:
    prices = reading(table())
    by_length = prices.rounds("d", steps_a_token=1.0)[0]
    assert len(by_length) == MAX_DRAFT_TOKENS + 1
    assert by_length[0] == prices.plain_ms == pytest.approx(10.0)
    assert by_length[4] == prices.round_ms("d", 4, 4) == pytest.approx(10.8 + 4 * 1.5)
    assert prices.round_ms("d", 2.5, 1) == pytest.approx(10.5 + 1.5), "a mean lies between"
    assert prices.place_ms == pytest.approx([0.2] * MAX_DRAFT_TOKENS)
    assert prices.jump_ms == pytest.approx(0.0, abs=1e-9)


def test_a_tree_runs_at_least_once_and_less_often_than_it_has_tokens() -> None:
    by_length = reading(table()).rounds("d", steps_a_token=0.25)[0]
    assert by_length[2] == pytest.approx(10.4 + 1.5)
    assert by_length[8] == pytest.approx(11.6 + 2 * 1.5)


def test_a_block_costs_one_step_at_every_length_and_is_no_longer_than_itself() -> None:
    """Its first rounds were short, which must not make a longer draft look dearer."""
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.observe("d", "head", Situation(0), 3, 3, num_steps=1)
    belief = acceptance.estimate("d", "head", Situation(0))
    option = option_of("d", "head", reading(table()), belief, False, block_length=7)
    assert option.round_ms == pytest.approx([10.0, *(11.5 + 0.2 * n for n in range(1, 8))])
    assert option.num_draft_tokens == 7
    fixed = option_of("d", "head", reading(table()), belief, False, 12, block_length=7)
    assert fixed.fixed == 7


def test_a_jump_from_one_token_to_several_is_charged_once() -> None:
    """As where another kernel serves several tokens: 10 ms for one, 16 for two, then 0.1 each."""
    costs = Costs()
    for width in WIDTHS:
        costs.set_verify(width, 0, 10.0 if width == 1 else 16.0 + 0.1 * (width - 2))
    assert reading(costs).place_ms == pytest.approx([0.1] * MAX_DRAFT_TOKENS)
    assert reading(costs).jump_ms == pytest.approx(5.9)


@pytest.mark.parametrize("seed", range(12))
def test_jump_and_places_never_cost_more_than_the_forward_and_rise(seed: int) -> None:
    """Also where a width costs more than a wider one, as between two kernels."""
    rng = random.Random(seed)
    costs, verify_ms = Costs(), 10.0
    for width in WIDTHS:
        verify_ms += rng.choice((0.0, 0.1, 3.0, -1.0 if 2 < width < 16 else 0.0)) * rng.random()
        verify_ms = max(verify_ms, costs.plain_ms(0) or 0.0)
        costs.set_verify(width, 0, verify_ms)
    prices = reading(costs)
    totals = [prices.plain_ms + prices.jump_ms + ms for ms in accumulate(prices.place_ms)]
    assert list(prices.place_ms[1:]) == sorted(prices.place_ms[1:])
    for total, true in zip(totals, prices.verify_ms[1:], strict=True):
        assert total <= true + 1e-9
    assert totals[-1] == pytest.approx(prices.verify_ms[-1])


def test_a_reading_serves_near_its_context_until_a_cost_moves_or_is_measured() -> None:
    costs = table()
    first = costs.at(100)
    assert costs.at(110) is first and costs.at(4000) is not first
    for _ in range(20):  # a load moves all alike
        observe(costs, 1, 12.0)
    assert costs.at(100) is first
    run(costs, 70, drafted=1.4)
    assert reading(costs) is not first
    assert costs.set_draft_step("new", 0, 2.0) is None and "new" in reading(costs).step_ms


def test_nothing_is_read_from_a_table_that_is_empty() -> None:
    assert Costs().at(100) is None


# -- beside other sequences -----------------------------------------------------------------


def test_beside_others_a_draft_token_is_priced_as_a_row_of_the_common_forward() -> None:
    """Widths 1, 2, 4, 8 and 16 take 10, 11, 13, 20 and 40 ms."""
    found = measured().at(100, Others(3, 3))
    assert found is not None
    share_ms = 13.0 / 4  # of four rows in one forward
    wanted = [share_ms, share_ms + 20.0 - 13.0, share_ms + 40.0 - 13.0]
    assert [found.verify_ms[num] for num in (0, 4, 12)] == pytest.approx(wanted)
    assert found.plain_ms == pytest.approx(share_ms)


def test_the_more_rows_others_have_the_dearer_a_draft_is_beside_plain_decoding() -> None:
    costs, gains = measured(), list[float]()
    for others in (ALONE, Others(1, 1), Others(3, 3), Others(7, 7), Others(7, 30)):
        prices = costs.at(100, others)
        assert prices is not None
        gains.append(prices.plain_ms * 4 / prices.verify_ms[3])  # if all were accepted
    assert gains == sorted(gains, reverse=True) and gains[-1] <= 1.0 < gains[0]


def test_what_one_more_sequence_adds_is_learnt_from_rounds_beside_others() -> None:
    costs = measured()
    for _ in range(200):  # the four rows take 13 ms, each further sequence 2 ms, the rest is theirs
        costs.observe_shared(Step(OFF, 0, 0, 1, 0.0, 26.0, 100, others=Others(3, 3, 7.0)))
    found = costs.at(100, Others(3, 3))
    assert found is not None and found.plain_ms == pytest.approx((13.0 + 3 * 2.0) / 4, rel=0.02)
    assert costs.plain_ms(100) == pytest.approx(10.0)  # alone it takes what it took


def test_beside_others_a_draft_step_is_priced_as_what_it_took_of_the_time_of_all() -> None:
    """Four that draft in the same forwards take a little more than one. One alone still takes
    what it did."""
    costs, others = measured(), Others(3, 15)
    at_first = prices(costs, others).step_ms["small"]
    assert at_first == pytest.approx(2.0 * (0.5 + 0.5 / 4)), "shared in part, until it is seen"
    for _ in range(50):
        costs.observe_shared(drafted(4 * 0.6, others), 4)
    assert prices(costs, others).step_ms == {"small": pytest.approx(0.6, rel=0.05)}
    assert prices(costs, ALONE).step_ms == {"small": 2.0}


def prices(costs: Costs, others: Others) -> Prices:
    found = costs.at(100, others)
    assert found is not None
    return found


def test_what_a_row_beyond_the_widest_width_takes_is_learnt_from_rounds_beside_others() -> None:
    """At first each takes as long as one of the 16, as if they were forwards of their own."""
    costs, others = measured(), Others(7, 31)
    assert costs.verify_ms(32, 100) == pytest.approx(80.0)
    for _ in range(200):  # 32 rows take 60 ms
        costs.observe_shared(Step(OFF, 0, 0, 1, 0.0, 60.0, 100, others=others))
    assert costs.verify_ms(32, 100) == pytest.approx(60.0, rel=0.02)
    assert costs.verify_ms(16, 100) == pytest.approx(40.0)
