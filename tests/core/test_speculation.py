"""The formulas of speculative decoding, against values worked out by hand."""

from __future__ import annotations

import pytest

from localspec.core.speculation import (
    Measurement,
    best_length,
    expected_tokens,
    interpolated,
    num_checked,
)

FLAT = {1: 10.0, 2: 10.0, 4: 10.0, 8: 10.0}


def measured(acceptance: float, step_ms: float, verify_ms: dict[int, float]) -> Measurement:
    return Measurement("t", "bf16", verify_ms, {"d": step_ms}, {"d": (acceptance,)})


def test_expected_tokens_are_the_geometric_sum() -> None:
    assert expected_tokens((0.8,), 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert expected_tokens((1.0,), 5) == 6.0
    assert expected_tokens((0.9, 0.5), 3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)


@pytest.mark.parametrize(
    ("parents", "path", "num_accepted", "checked"),
    [
        ((), (), 0, 0),
        ((-1, 0, 1, 2), (), 0, 1),  # the first is wrong, and none behind it is looked at
        ((-1, 0, 1, 2), (0, 1), 2, 3),
        ((-1, 0, 1, 2), (0, 1, 2, 3), 4, 4),
        ((-1, 0, 1, 2), (0, 1, 2), 2, 2),  # the reply ended with the second
        ((-1, 0, 1, 2), (0,), 0, 0),  # and before the first
        ((-1, -1, 0, 0, 1), (0, 3), 2, 4),  # a tree: both pairs that stand after what was accepted
    ],
)
def test_a_guess_is_checked_when_all_before_it_were_accepted(
    parents: tuple[int, ...], path: tuple[int, ...], num_accepted: int, checked: int
) -> None:
    assert num_checked(parents, path, num_accepted) == checked


def test_costs_between_measured_widths_are_on_a_line() -> None:
    assert interpolated({1: 10.0, 4: 16.0}, 2) == pytest.approx(12.0)
    assert interpolated({1: 10.0, 4: 16.0}, 5) == 16.0, "the nearest beyond them"


def test_the_best_length_has_the_most_tokens_per_ms() -> None:
    assert best_length((0.5,), (1.0, 1.0, 2.0, 9.0)) == (1, 1.5)


def test_a_free_and_perfect_draft_gives_the_widest_verification() -> None:
    found = measured(1.0, 0.0, FLAT).expected_speedup("d")
    assert found is not None and (found.value, found.num_draft_tokens) == (8.0, 7)


def test_the_best_length_is_the_maximum_over_all_lengths() -> None:
    found = measured(0.8, 1.0, FLAT).expected_speedup("d")
    by_hand = {n: ((1 - 0.8 ** (n + 1)) / 0.2) / (0.1 * n + 1.0) for n in range(1, 8)}
    best = max(by_hand, key=lambda n: by_hand[n])
    assert found is not None and found.num_draft_tokens == best
    assert found.value == pytest.approx(by_hand[best])


def test_a_steep_verification_curve_shortens_the_draft() -> None:
    steep = {1: 10.0, 2: 11.0, 4: 20.0, 8: 40.0}
    flat, found = (measured(0.8, 1.0, curve).expected_speedup("d") for curve in (FLAT, steep))
    assert flat is not None and found is not None
    assert found.num_draft_tokens < flat.num_draft_tokens and found.value < flat.value


def test_a_costly_draft_is_below_one() -> None:
    found = measured(0.5, 8.0, FLAT).expected_speedup("d")
    assert found is not None and found.value < 1.0


@pytest.mark.parametrize(
    "incomplete",
    [
        Measurement("t", "bf16", {}, {"d": 1.0}, {"d": (0.8,)}),
        Measurement("t", "bf16", {1: 10.0}, {"d": 1.0}, {"d": (0.8,)}),
        Measurement("t", "bf16", FLAT, {}, {"d": (0.8,)}),
        Measurement("t", "bf16", FLAT, {"d": 1.0}, {}),
    ],
)
def test_nothing_is_expected_of_what_was_not_measured(incomplete: Measurement) -> None:
    assert incomplete.expected_speedup("d") is None
