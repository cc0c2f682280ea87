"""Times in words: the unit changes at a second and at a minute, and three digits stand."""

from __future__ import annotations

import pytest

from localspec.core.units import DASH, clock, counted, enumerated, took


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (None, DASH), (0.0, "0 ms"), (0.123, "0.12 ms"), (6.344, "6.34 ms"), (62.06, "62.1 ms"),
        (623.4, "623 ms"), (999.4, "999 ms"), (999.6, "1.00 s"), (1240.0, "1.24 s"),
        (12_400.0, "12.4 s"), (59_960.0, "1 min 0 s"), (125_000.0, "2 min 5 s"),
        (-1240.0, "-1.24 s"), (-125_000.0, "-2 min 5 s"),
    ],
)  # fmt: skip
def test_what_was_measured_has_three_digits_and_its_unit(ms: float | None, said: str) -> None:
    assert took(ms) == said


def test_a_clock_shows_whole_units() -> None:
    found = [clock(each) for each in (0.2, 59.4, 61, 3000, 3700)]
    assert found == ["0 s", "59 s", "1 min 1 s", "50 min", "1 h 1 min"]


@pytest.mark.parametrize(
    ("words", "shown"), [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_a_list_in_a_sentence(words: list[str], shown: str) -> None:
    assert enumerated(words) == shown


@pytest.mark.parametrize(
    ("number", "shown"), [(0, "0 tokens"), (1, "1 token"), (1024, "1,024 tokens")]
)
def test_a_number_with_its_noun(number: int, shown: str) -> None:
    assert counted(number, "token") == shown
