"""What each drafter would have gained in the replies of the log, for the Stats tab and the report.

Each figure is of the replies that the drafter was judged by once they were over: the rounds that it
would have run alone, at the costs measured on the machine (core.hindsight).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.core.speculation import MIN_COMPARED_TOKENS, DecodeCounts, speedup
from localspec.core.units import DASH
from localspec.drafters.registry import label_of
from localspec.web.words import gain, number, percent

Row = Mapping[str, Any]
TITLE = "What each drafter would have gained"
COLUMNS = ("Drafter, alone", "Decoding", "Mean length", "Text it would guess", "Replies", "Tokens")
NOTE = (
    "Each finished reply is gone through again, for a moment, once nothing waits: which guesses "
    "of a drafter would have been right is then known exactly, and what its rounds would have "
    "taken follows from the costs measured on this computer. The reply itself never depends on it."
)


@dataclass(frozen=True)
class InHindsight:
    """One drafter over several replies. decode_speedup: of the replies whose costs are known, None
    for too few tokens."""

    counts: DecodeCounts
    num_replies: int
    decode_speedup: float | None


def by_drafter(rows: Sequence[Row]) -> dict[str, InHindsight]:
    """Return the sums of each drafter, the highest gain first, unknown gains last."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["drafter"], []).append(row)
    found = {name: _together(members) for name, members in groups.items()}
    return dict(sorted(found.items(), key=lambda each: -(each[1].decode_speedup or 0.0)))


def _together(rows: Sequence[Row]) -> InHindsight:
    names = ("num_output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    counts = DecodeCounts(**{name: sum(row[name] for row in rows) for name in names})
    timed = [row for row in rows if row["decode_ms"] and row["plain_decode_ms"] is not None]
    gained = None
    if sum(row["num_output_tokens"] for row in timed) >= MIN_COMPARED_TOKENS:
        plain_ms = sum(row["plain_decode_ms"] for row in timed)
        gained = speedup(plain_ms, sum(row["decode_ms"] for row in timed))
    return InHindsight(counts, len(rows), gained)


def lines(rows: Sequence[Row], available: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the table in words, in the order of COLUMNS. available: the drafters that are loaded;
    one that no reply has judged is unknown. Empty if no drafter was judged."""
    judged = by_drafter(rows)
    if not judged:
        return []
    unknown = [name for name in available if name not in judged]
    return [_line(name, one) for name, one in judged.items()] + [
        (label_of(name), *[DASH] * 3, "0", "0") for name in unknown
    ]


def _line(name: str, one: InHindsight) -> tuple[str, ...]:
    counts = one.counts
    return (
        label_of(name),
        gain(one.decode_speedup),
        number(counts.mean_accepted_length, digits=2),
        percent(counts.draft_share),
        f"{one.num_replies:,}",
        f"{counts.num_output_tokens:,}",
    )
