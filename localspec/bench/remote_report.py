"""What the rows of a throughput test mean for people: a table, and advice for each load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localspec.bench.tables import DASH, Column, aligned, known, limits, number, text
from localspec.core.units import took

SPECULATIVE, PLAIN = "speculative", "plain"  # The arms' names.
GOOD, FAIR = 0.7, 0.4  # Acceptance rates at which the advice changes.
FASTER, SLOWER = 1.05, 0.95  # Speedups at which the advice changes.


def advice(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each load of the server that speculates."""
    for row in rows:
        if row["server"] == PLAIN:
            continue
        rate, gain = row["acceptance_rate"], row["speedup"]
        at = f"With {row['concurrency']} at the same time"
        if gain is not None:
            yield f"{at} speculation is {gain:.2f} times plain: {_by_gain(gain, rate)}"
        elif row["num_draft_tokens"] == 0:
            yield f"{at} the server drafted nothing."
        elif rate is not None:
            yield f"{at} {rate:.0%} of its guesses are right: {_by_rate(rate)}"
        else:
            yield f"{at} it is not known what was drafted."


def _by_gain(gain: float, rate: float | None) -> str:
    if gain >= FASTER:
        return "keep it."
    if gain > SLOWER:
        return "it makes no difference that this test can see."
    if rate is not None and rate >= GOOD:
        return (
            "its guesses are right, but checking or making them costs too much under this load. "
            "Turn it off there, or use a cheaper way of drafting."
        )
    return "start the server with fewer speculative tokens, or without speculation."


def _by_rate(rate: float) -> str:
    if rate >= GOOD:
        return "more speculative tokens may be faster. Compare with --plain."
    if rate >= FAIR:
        return "that is usual. Compare with --plain, and try one token fewer."
    return "most of the work is thrown away. Use fewer speculative tokens, or another draft."


COLUMNS = (
    text("at once", "concurrency"),
    text("server"),
    number("req/s", "requests_per_second", ".2f"),
    number("tok/s", "tokens_per_second", ".1f"),
    Column("each", lambda row: _each(row["tpot_ms"])),
    Column("TTFT P50/95/99", lambda row: _triple(row["ttft_ms"])),
    Column("between P50/95/99", lambda row: _triple(row["inter_token_ms"])),
    number("accepted", "acceptance_rate", ".0%"),
    number("mean length", "mean_accepted_length", ".2f"),
    number("times plain", "speedup", ".2f"),
    limits("95 %", "speedup"),
    number("times one at a time", "of_one_at_a_time", ".2f"),
    limits("95 %", "of_one_at_a_time"),
    number("differ", "num_differing", "d"),
    number("failed", "num_failed", "d"),
)


def render_remote(result: Mapping[str, Any]) -> str:
    faults = sorted({fault for row in result["rows"] for fault in row["faults"]})
    return "\n".join(
        [*aligned(known(COLUMNS, result["rows"]), result["rows"]), "", *result["advice"], *faults]
    )


def _each(tpot_ms: Mapping[str, float] | None) -> str:
    """The rate of the reply in the middle, behind its first token."""
    return f"{1000.0 / tpot_ms['p50']:.1f}" if tpot_ms and tpot_ms["p50"] else DASH


def _triple(spread: Mapping[str, float] | None) -> str:
    return DASH if spread is None else " / ".join(map(took, spread.values()))
