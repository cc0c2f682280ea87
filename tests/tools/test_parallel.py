"""The table of replies that are written at the same time."""

from __future__ import annotations

import pytest

from localspec.bench.tables import as_markdown
from tools.parallel.__main__ import COLUMNS, DRAFTED, SERIAL, TOGETHER, TimedReply, row_of


def run(*last_s: float) -> list[TimedReply]:
    """Replies of ten tokens each, in two chunks."""
    return [TimedReply([last / 2.0, last], list(range(10))) for last in last_s]


def test_a_rate_is_of_all_turns_and_its_ratio_pairs_them() -> None:
    runs = {
        SERIAL: [run(2.0, 4.0), run(4.0, 8.0)],
        TOGETHER: [run(2.0, 2.0), run(4.0, 4.0)],
        DRAFTED: [run(1.0, 1.0), run(2.0, 1.0)],
    }
    row = row_of(0.7, 2, DRAFTED, runs)
    assert row["tokens_per_second"] == pytest.approx(40 / 3.0)
    assert [row[f"of_plain{end}"] for end in ("", "_low", "_high")] == pytest.approx([2.0] * 3)
    assert row["of_serial"] == pytest.approx(4.0)
    assert (row["ttft_ms_p50"], row["gap_ms_p99"]) == pytest.approx((500.0, 985.0))
    assert "2.00 (2.00 to 2.00)" in as_markdown(COLUMNS, [row])


def test_replies_that_differ_from_those_alone_are_counted() -> None:
    other = [TimedReply([1.0], [1]), *run(1.0)]
    runs = {SERIAL: [run(1.0, 2.0)], TOGETHER: [other], DRAFTED: [run(1.0, 1.0)]}
    assert row_of(0.0, 2, TOGETHER, runs)["num_differing"] == 1
    assert row_of(0.0, 2, DRAFTED, runs)["num_differing"] == 0
