"""Waits are counted token by token, with and without drafting apart."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.arithmetic import percentile
from localspec.web.stats.panels import waits_html
from localspec.web.stats.waits import seconds_saved, with_and_without


def one_round(turn: int, ms: float | None, tokens: int) -> dict[str, Any]:
    return {"turn_id": turn, "draft_ms": ms, "verify_ms": 0.0, "num_output_tokens": tokens}


ROWS: list[dict[str, Any]] = [
    {"turn_id": 1, "num_draft_tokens": 9, "plain_decode_ms": 3000.0, "decode_ms": 1000.0},
    {"turn_id": 2, "num_draft_tokens": 0, "plain_decode_ms": 500.0, "decode_ms": 1000.0},
    {"turn_id": 3, "num_draft_tokens": None, "plain_decode_ms": None, "decode_ms": None},
]


def test_tokens_of_one_round_arrive_together() -> None:
    rounds = [one_round(1, 30.0, 3), one_round(1, 60.0, 1), one_round(2, 20.0, 1)]
    drafted, plain = with_and_without(ROWS, [*rounds, one_round(3, 99.0, 1)])
    assert drafted.num_tokens == 4 and plain.num_tokens == 1
    assert drafted.between_tokens[0] == pytest.approx(15.0)  # of 0, 0, 30, 60
    assert drafted.between_updates[0] == pytest.approx(45.0)
    assert plain.between_tokens == (20.0, 20.0, 20.0)


def test_an_untimed_or_empty_round_is_left_out() -> None:
    drafted, plain = with_and_without(ROWS, [one_round(1, None, 2), one_round(1, 5.0, 0)])
    assert drafted.num_tokens == 0 and drafted.between_updates == (5.0, 5.0, 5.0)
    assert plain.between_tokens == (None, None, None)
    assert percentile([], 0.5) is None


def test_seconds_saved_may_be_lost_and_are_unknown_before_measuring() -> None:
    assert seconds_saved(ROWS) == pytest.approx(1.5)
    assert seconds_saved(ROWS[1:2]) == pytest.approx(-0.5)
    assert seconds_saved(ROWS[2:]) is None


def test_nothing_waited_for_is_no_table() -> None:
    assert waits_html(*with_and_without(ROWS, [])) == ""
    assert "P95" in waits_html(*with_and_without(ROWS, [one_round(1, 3.0, 1)]))
