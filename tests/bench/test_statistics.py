"""The arithmetic of a comparison, on numbers made by hand."""

from __future__ import annotations

import pytest

from localspec.bench.statistics import (
    IntervalEstimate,
    median_of,
    rate,
    rate_ratio,
    repetition,
)
from localspec.core.arithmetic import percentile


def test_the_median_is_the_middle_ratio_and_not_the_mean() -> None:
    assert median_of([1.0, 2.0, 9.0]).value == 2.0


def test_the_interval_holds_the_median_and_stays_within_the_ratios() -> None:
    found = median_of([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9])
    assert found.low is not None and found.high is not None and found.value is not None
    assert 1.0 <= found.low < found.value < found.high <= 1.9


def test_the_interval_of_many_equal_halves_matches_the_binomial_bounds() -> None:
    # 100 ratios 1..100: order statistics 40 and 61 bound the median with 95 % (binomial).
    found = median_of([float(value) for value in range(1, 101)])
    assert found.low == pytest.approx(40.5, abs=3.0)
    assert found.high == pytest.approx(60.5, abs=3.0)


def test_more_prompts_narrow_the_interval() -> None:
    few, many = median_of([1.0, 2.0, 3.0] * 3), median_of([1.0, 2.0, 3.0] * 100)
    assert few.low is not None and few.high is not None
    assert many.low is not None and many.high is not None
    assert many.high - many.low < few.high - few.low


def test_the_same_ratios_give_the_same_interval() -> None:
    ratios = [0.9, 1.7, 1.1, 2.3, 1.4]
    assert median_of(ratios) == median_of(ratios)


def test_nothing_is_unknown_and_one_ratio_has_no_interval() -> None:
    assert median_of([]) == IntervalEstimate(None, None, None)
    assert median_of([1.5]) == IntervalEstimate(1.5, None, None)
    assert IntervalEstimate(2.0, 1.0, 3.0).columns("a", "b") == {
        "a": 2.0,
        "b_low": 1.0,
        "b_high": 3.0,
    }


def test_a_gram_counts_as_repeated_from_its_second_time_on() -> None:
    assert repetition([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)
    assert repetition([[7] * 10]) == pytest.approx(6 / 7)
    assert repetition([[1, 2, 3]]) is None


def test_repetition_is_a_share_over_all_outputs_together() -> None:
    assert repetition([[1, 2, 3, 4, 1, 2, 3, 4], [5, 6, 7, 8, 9]]) == pytest.approx(1 / 7)
    assert repetition([[1, 2], []]) is None


def test_the_same_gram_in_two_outputs_is_no_repetition() -> None:
    assert repetition([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.0


def test_a_percentile_lies_on_the_line_between_its_neighbours() -> None:
    values = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(values, share) for share in (0.0, 0.5, 1.0)] == [10.0, 25.0, 40.0]
    assert percentile(values, 0.95) == pytest.approx(38.5)
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_a_ratio_of_rates_is_of_sums_and_its_interval_holds_it() -> None:
    ours, theirs = [(10, 100.0), (90, 300.0)], [(10, 200.0), (90, 600.0)]
    found = rate_ratio(ours, theirs)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    uneven = rate_ratio(
        [(10, 100.0), (90, 300.0), (20, 50.0)], [(10, 100.0), (90, 900.0), (20, 60.0)]
    )
    assert uneven.value == pytest.approx((120 / 450) / (120 / 1060))
    assert uneven.low is not None and uneven.high is not None
    assert uneven.low < uneven.value < uneven.high
    assert rate_ratio([], []).value is None


@pytest.mark.parametrize("nothing", [(0, 5.0), (0, 0.0)])
def test_replies_without_a_token_or_a_time_have_no_rate(nothing: tuple[int, float]) -> None:
    assert rate([nothing]) is None and rate([]) is None
    assert (
        rate_ratio([(10, 5.0)], [nothing])
        == rate_ratio([nothing], [(10, 5.0)])
        == IntervalEstimate()
    )


def test_resamples_without_a_token_are_left_out_of_the_interval() -> None:
    found = rate_ratio([(10, 5.0), (0, 1.0)], [(10, 10.0), (0, 1.0)])
    assert found.value == pytest.approx((10 / 6) / (10 / 11))
    assert found.low is not None and found.high == pytest.approx(2.0)
