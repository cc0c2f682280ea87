"""The Stats tab in numbers: rows of the log in, tables and sentences out. No gradio here.

Rates over several turns are ratios of sums, never means of ratios. The formula for the mean
accepted length, (1 - α^(γ+1)) / (1 - α), is Leviathan et al. 2023 (arXiv 2211.17192); it holds
for independent acceptances, so the measured value beside it shows how far they are from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from localspec.arithmetic import ratio
from localspec.web.live import DASH, badge, number, percent

Row = dict[str, Any]

TURN_COLUMNS = (
    "Turn",
    "Drafter",
    "T",
    "tok/s",
    "Speedup",
    "Accepted",
    "From draft",
    "Mean length",
    "γ",
    "Tokens",
    "First token",
    "Ended",
    "Kind",
    "Checked",
)


@dataclass(frozen=True)
class Summary:
    """Turns taken together. None where nothing was measured. num_lenient_tokens: of
    num_lenient_output_tokens, which the lenient turns among them have."""

    num_turns: int
    num_output_tokens: int
    tokens_per_second: float | None
    acceptance_rate: float | None
    mean_accepted_length: float | None
    mean_num_draft_tokens: float | None
    speedup: float | None
    alpha: float | None = None
    num_lenient_turns: int = 0
    num_lenient_output_tokens: int = 0
    num_lenient_tokens: int = 0

    @property
    def expected_length(self) -> float | None:
        """The formula at the measured α and the mean γ."""
        if self.alpha is None or self.mean_num_draft_tokens is None:
            return None
        return expected_length(self.alpha, self.mean_num_draft_tokens)


def expected_length(acceptance_rate: float, num_draft_tokens: float) -> float:
    """(1 - α^(γ+1)) / (1 - α), which is γ + 1 at α = 1."""
    if acceptance_rate >= 1.0:
        return num_draft_tokens + 1.0
    survival: float = acceptance_rate ** (num_draft_tokens + 1.0)
    return (1.0 - survival) / (1.0 - acceptance_rate)


def summarise(rows: Sequence[Row], rounds: Sequence[Row] = ()) -> Summary:
    """All turns of `rows` as one. rounds: their steps, needed for α alone."""
    measured = [row for row in rows if row["num_output_tokens"]]
    timed = [row for row in measured if row["plain_decode_ms"] is not None]
    lenient = [row for row in rows if row["exact"] is False]
    return Summary(
        num_turns=len(rows),
        num_output_tokens=_sum(measured, "num_output_tokens"),
        tokens_per_second=ratio(
            1000.0 * _sum(measured, "num_output_tokens"), _sum(measured, "decode_ms")
        ),
        acceptance_rate=ratio(
            _sum(measured, "num_accepted_tokens"), _sum(measured, "num_draft_tokens")
        ),
        mean_accepted_length=_plus_one(
            ratio(_sum(measured, "num_accepted_tokens"), _sum(measured, "num_drafts"))
        ),
        mean_num_draft_tokens=ratio(
            _sum(measured, "num_draft_tokens"), _sum(measured, "num_drafts")
        ),
        speedup=ratio(_sum(timed, "plain_decode_ms"), _sum(timed, "decode_ms")),
        alpha=reached_acceptance(rounds),
        num_lenient_turns=len(lenient),
        num_lenient_output_tokens=_sum(lenient, "num_output_tokens"),
        num_lenient_tokens=_sum(lenient, "num_lenient_tokens"),
    )


def reached_acceptance(rounds: Sequence[Row]) -> float | None:
    """α of the formula: accepted guesses over guesses reached. A round reaches its accepted ones
    and, unless all were accepted, the one refused."""
    accepted = _sum(rounds, "num_accepted_tokens")
    refused = sum(row["num_accepted_tokens"] < row["num_draft_tokens"] for row in rounds)
    return ratio(accepted, accepted + refused)


def turn_table(rows: Sequence[Row]) -> list[list[Any]]:
    """One line a turn, newest first, in the order of TURN_COLUMNS."""
    return [_line(number_of_turn, row) for number_of_turn, row in reversed([*enumerate(rows, 1)])]


def _line(turn: int, row: Row) -> list[Any]:
    ended = {"cancelled": "stopped", "eos": "done", "length": "max tokens"}
    return [
        turn,
        row["drafter"] or DASH,
        number(row["temperature"], digits=2),
        number(row["tokens_per_second"]),
        number(row["speedup"] if row["num_draft_tokens"] else None, " ×", 2),
        percent(row["acceptance_rate"]),
        percent(row["draft_share"]),
        number(row["mean_accepted_length"], digits=2),
        number(row["mean_num_draft_tokens"]),
        DASH if row["num_output_tokens"] is None else row["num_output_tokens"],
        number(row["ttft_ms"], " ms", 0),
        ended.get(row["finish_reason"], row["finish_reason"] or "under way"),
        row["workload"] or DASH,
        DASH if row["exact"] is None else badge(row) or "exact",
    ]


def arm(row: Row) -> str:
    """What a turn is compared as: its drafter, lenient turns apart."""
    return f"{row['drafter']} (lenient)" if row["exact"] is False else str(row["drafter"])


def by_turn(rows: Sequence[Row], name: str, factor: float = 1.0) -> dict[str, list[Any]]:
    """The points of a plot over turns: the measured ones only."""
    points = [
        (turn, factor * row[name], arm(row))
        for turn, row in enumerate(rows, 1)
        if row[name] is not None
    ]
    return {
        "turn": [turn for turn, _, _ in points],
        name: [value for _, value, _ in points],
        "drafter": [drafter for _, _, drafter in points],
    }


def by_temperature(
    rows: Sequence[Row], name: Literal["tokens_per_second", "acceptance_rate"], factor: float = 1.0
) -> dict[str, list[Any]]:
    """The points of a plot over temperatures, one for each drafter, as ratios of sums."""
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in rows:
        if row["num_output_tokens"] and row["temperature"] is not None:
            groups.setdefault((row["temperature"], arm(row)), []).append(row)
    points = []
    for (temperature, drafter), members in sorted(groups.items()):
        summary = summarise(members)
        rates = {
            "tokens_per_second": summary.tokens_per_second,
            "acceptance_rate": summary.acceptance_rate,
        }
        rate = rates[name]
        if rate is not None:
            points.append((temperature, factor * rate, drafter))
    return {
        "temperature": [f"{temperature:.2f}" for temperature, _, _ in points],
        name: [value for _, value, _ in points],
        "drafter": [drafter for _, _, drafter in points],
    }


def verdict(acceptance_rate: float | None) -> str:
    """The band an acceptance rate falls in, with advice."""
    if acceptance_rate is None:
        return "Nothing has been drafted yet, so there is no acceptance rate to judge."
    if acceptance_rate >= 0.7:
        return (
            f"Acceptance rate {acceptance_rate:.2f}: excellent (0.7 and more). Drafting pays well."
        )
    if acceptance_rate >= 0.5:
        return f"Acceptance rate {acceptance_rate:.2f}: good (0.5 to 0.7)."
    return f"Acceptance rate {acceptance_rate:.2f}: low (below 0.5). Try another draft, or off."


def band(acceptance_rate: float | None) -> str:
    """The band's name, for colouring."""
    if acceptance_rate is None:
        return "none"
    return "excellent" if acceptance_rate >= 0.7 else "good" if acceptance_rate >= 0.5 else "low"


def _sum(rows: Sequence[Row], name: str) -> Any:
    return sum(row[name] or 0 for row in rows)


def _plus_one(value: float | None) -> float | None:
    return None if value is None else 1.0 + value
