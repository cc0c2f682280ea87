"""Plots of the log show what was measured; the cost curve breaks even where the formula says."""

from __future__ import annotations

import pytest

from localspec.core.backend import Description
from localspec.core.speculation import expected_tokens
from localspec.web.stats.log_plots import at, break_even, cost_curves, make_plots
from tests.web.stats.rows import LENIENT, NOTHING, OFF, ROW

CALIBRATION = {
    "verify_ms": {"1": {"100": 10.0, "500": 14.0}, "2": {"100": 11.0}, "4": {"100": 13.0}},
    "draft_step_ms": {"draft_model": {"100": 2.0}},
}


def test_a_round_is_one_check_and_its_steps() -> None:
    (curve,) = cost_curves(CALIBRATION, 100)
    assert curve.drafter == "draft_model"
    assert curve.round_ms[:4] == pytest.approx((10.0, 13.0, 16.0, 19.0))
    assert curve.round_ms[8] == pytest.approx(13.0 + 16.0)  # beyond what was measured: the widest


def test_context_is_interpolated_and_flat_outside() -> None:
    points = {"100": 10.0, "500": 14.0}
    assert [at(points, context) for context in (0, 100, 300, 900)] == [10.0, 10.0, 12.0, 14.0]


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("cost", [1.2, 1.9])
def test_the_break_even_acceptance_pays_exactly(cost: float, gamma: int) -> None:
    alpha = break_even(cost, gamma)
    assert alpha is not None and expected_tokens([alpha], gamma) == pytest.approx(cost)


def test_what_can_never_pay_has_no_break_even() -> None:
    assert break_even(2.1, 1) is None
    assert break_even(0.99, 1) == 0.0


def test_nothing_measured_is_no_curve() -> None:
    assert cost_curves(None, 10) == []
    assert cost_curves({"verify_ms": {"1": {"9": 1.0}}, "draft_step_ms": {}}, 10) == []


def test_costs_without_a_turn_name_no_context() -> None:
    """No round has 0 tokens before it."""
    loaded = Description("demo", None, "cpu", "fp32", 64, (), calibration=CALIBRATION)
    (costs,) = (plot.svg for plot in make_plots([], [], loaded) if plot.name == "cost-curve")
    assert "at the shortest context measured" in costs
    turn = ROW | {"num_prompt_tokens": 250}
    (costs,) = (plot.svg for plot in make_plots([turn], [], loaded) if plot.name == "cost-curve")
    assert "at 300 tokens of context" in costs


def test_a_turn_that_was_not_measured_has_no_mark_and_a_lenient_one_its_own() -> None:
    rows = [row | {"num_prompt_tokens": 9} for row in (ROW, OFF, LENIENT, NOTHING)]
    plots = {plot.name: plot.svg for plot in make_plots(rows, [], None)}
    speed = plots["speed-by-turn"]
    assert speed.count("<title>the small model: 1, 100</title>") == 1
    assert (
        "the small model (lenient): 3, 100" in speed
        and "without drafting: 2, 30" in speed
        and ": 4" not in speed
    )
    assert "gamma-over-time" not in plots and "cost-curve" not in plots


@pytest.mark.parametrize(("round_ms", "unit"), [(900.0, "ms"), (2400.0, "s")])
def test_axes_of_time_are_in_seconds_beyond_a_second(round_ms: float, unit: str) -> None:
    rows = [ROW | {"num_prompt_tokens": 9, "turn_id": 1}]
    counts = {"num_draft_tokens": 2, "num_accepted_tokens": 1, "num_output_tokens": 2}
    counts["num_checked_tokens"] = 2
    times = {"draft_ms": 0.0, "verify_ms": round_ms, "plain_ms": None}
    slow = {"turn_id": 1, "drafter": "ngram", "filler": None, **counts, **times}
    (waits,) = (plot.svg for plot in make_plots(rows, [slow], None) if plot.name == "waits")
    assert f">{unit}</text>" in waits
    assert f"P99, with drafting: {round_ms * 0.99 if unit == 'ms' else 2.376:.4g}" in waits
