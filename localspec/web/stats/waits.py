"""What a reader waits for, from the rounds of the log, and what drafting saved.

Contract: pure. The waits between tokens of a reply are those of the round that brings them: tokens
of one round arrive together, so the first of them carries the round's time and the others 0. That
is why drafting has a median near 0 and its rounds in the upper percentiles; `updates` are the times
of the rounds themselves. Unknown is None.

Same definition as bench.figures.inter_token_ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.arithmetic import percentile
from localspec.core import OFF

Row = Mapping[str, Any]
SHARES = (0.50, 0.95, 0.99)


@dataclass(frozen=True)
class Waits:
    """In ms, of SHARES in order. num_tokens: that were waited for."""

    between_tokens: tuple[float | None, ...]
    between_updates: tuple[float | None, ...]
    num_tokens: int


def with_and_without(rows: Sequence[Row], rounds: Sequence[Row]) -> tuple[Waits, Waits]:
    """Waits of turns that drafted, and of turns that did not at all."""
    drafted = {row["turn_id"] for row in rows if row["num_draft_tokens"]}
    plain = {row["turn_id"] for row in rows if row["num_draft_tokens"] == 0}
    return (
        _waits([one for one in rounds if one["turn_id"] in drafted]),
        _waits([one for one in rounds if one["turn_id"] in plain]),
    )


def _waits(rounds: Sequence[Row]) -> Waits:
    timed = [
        (one["draft_ms"] + one["verify_ms"], one["num_output_tokens"])
        for one in rounds
        if one["draft_ms"] is not None and one["verify_ms"] is not None
    ]
    tokens = [wait for ms, count in timed for wait in (ms, *[0.0] * (count - 1))[:count]]
    updates = [ms for ms, _ in timed]
    return Waits(
        tuple(percentile(tokens, share) for share in SHARES),
        tuple(percentile(updates, share) for share in SHARES),
        len(tokens),
    )


def seconds_saved(rows: Sequence[Row]) -> float | None:
    """Against what the same tokens would have taken plainly here; negative where drafting lost.
    None before plain decoding was measured."""
    timed = [
        row["plain_decode_ms"] - row["decode_ms"]
        for row in rows
        if row["plain_decode_ms"] is not None and row["decode_ms"] is not None
    ]
    return sum(timed) / 1000.0 if timed else None


def num_plain(rows: Sequence[Row]) -> int:
    return sum(row["drafter"] == OFF for row in rows)
