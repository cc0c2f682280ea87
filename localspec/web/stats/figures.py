"""The figures of the Stats tab and of the report: rows of the log in, numbers and tables out.

Contract: pure. Rates over several turns are ratios of sums, never means of ratios; unknown is None.
The formula for the mean accepted length, (1 - α^(γ+1)) / (1 - α), is Leviathan et al. 2023 (arXiv
2211.17192); it holds for independent acceptances, so the measured value beside it shows how far
they are from that. Tokens of one round arrive together: the first waits for the round, the others
wait 0 ms; `between_updates` are the times of the rounds themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from localspec.core.arithmetic import percentile, ratio
from localspec.core.filling import Guesses, parted
from localspec.core.speculation import (
    MIN_COMPARED_TOKENS,
    DecodeCounts,
    expected_tokens,
    interpolated,
    speedup,
)
from localspec.core.units import DASH, capital, compared, direction, took
from localspec.core.workloads import kind_words
from localspec.drafters.registry import label_of
from localspec.record.markdown import ENDED
from localspec.web.live import badge, drafters_of
from localspec.web.words import gain, number, percent

Row = Mapping[str, Any]
SHARES = (0.50, 0.95, 0.99)  # of the percentiles of waits
WAIT_COLUMNS = ("Waits", *(f"P{100 * share:.0f}" for share in SHARES), "tokens")

MAX_LINES = 100  # of the table


@dataclass(frozen=True)
class Summary:
    """Turns taken together. None where nothing was measured; each rate is of the turns that have
    both of its numbers. speedup: of whole replies, of the num_compared turns that have one.
    num_lenient_tokens: of num_lenient_output_tokens, which the lenient turns among them have."""

    num_turns: int
    num_output_tokens: int
    tokens_per_second: float | None
    acceptance_rate: float | None
    checked_acceptance_rate: float | None
    draft_share: float | None
    mean_accepted_length: float | None
    mean_num_draft_tokens: float | None
    speedup: float | None
    decode_speedup: float | None
    alpha: float | None = None
    num_compared: int = 0
    num_lenient_turns: int = 0
    num_lenient_output_tokens: int = 0
    num_lenient_tokens: int = 0

    @property
    def expected_length(self) -> float | None:
        """The formula at the measured α and the mean γ, which need not be whole."""
        if self.alpha is None or (gamma := self.mean_num_draft_tokens) is None:
            return None
        around = (int(gamma), int(gamma) + 1)
        return interpolated({each: expected_tokens([self.alpha], each) for each in around}, gamma)


def summarise(rows: Sequence[Row], rounds: Sequence[Row] = ()) -> Summary:
    """All turns of `rows` as one. rounds: their steps, needed for α alone."""
    measured = [row for row in rows if row["num_output_tokens"]]
    lenient = [row for row in rows if row["exact"] is False]
    return Summary(
        num_turns=len(rows),
        num_output_tokens=_sum(measured, "num_output_tokens"),
        tokens_per_second=_both(measured, "num_output_tokens", "decode_ms").tokens_per_second,
        acceptance_rate=_both(measured, "num_accepted_tokens", "num_draft_tokens").acceptance_rate,
        checked_acceptance_rate=_both(
            measured, "num_accepted_tokens", "num_checked_tokens"
        ).checked_acceptance_rate,
        draft_share=_both(measured, "num_accepted_tokens", "num_output_tokens").draft_share,
        mean_accepted_length=_both(
            measured, "num_accepted_tokens", "num_drafts"
        ).mean_accepted_length,
        mean_num_draft_tokens=_both(
            measured, "num_draft_tokens", "num_drafts"
        ).mean_num_draft_tokens,
        speedup=_gain(measured, "plain_reply_ms", "reply_ms"),
        decode_speedup=_gain(measured, "plain_decode_ms", "decode_ms"),
        alpha=reached_acceptance(rounds),
        num_compared=sum(row["plain_reply_ms"] is not None for row in measured),
        num_lenient_turns=len(lenient),
        num_lenient_output_tokens=_sum(lenient, "num_output_tokens"),
        num_lenient_tokens=_sum(lenient, "num_lenient_tokens"),
    )


def by_drafter(rows: Sequence[Row], rounds: Sequence[Row]) -> dict[str, Summary]:
    """The rounds of each drafter taken together, lenient ones apart; those without a draft have no
    speedup. rounds: of these turns. Guesses that another drafter appended count as that one's."""
    lenient = {row["turn_id"] for row in rows if row["exact"] is False}
    groups, guesses = _by_maker(rounds, lenient), _by_maker(_parts(rounds), lenient)
    return {
        label_of(drafter) + (" (lenient)" if is_lenient else ""): _of_rounds(
            groups.get((drafter, is_lenient), ()), guesses[drafter, is_lenient]
        )
        for drafter, is_lenient in guesses
    }


def _by_maker(rounds: Iterable[Row], lenient: Set[int]) -> dict[tuple[str, bool], list[Row]]:
    """Rounds by their drafter and whether they are of a lenient turn."""
    groups: dict[tuple[str, bool], list[Row]] = {}
    for one in sorted(rounds, key=lambda one: str(one["drafter"])):
        groups.setdefault((one["drafter"], one["turn_id"] in lenient), []).append(one)
    return groups


def _parts(rounds: Iterable[Row]) -> Iterator[Row]:
    """Yield the rounds, and those with appended guesses as one round of each of the drafters."""
    for one in rounds:
        if not one["filler"]:
            yield one
            continue
        whole = Guesses(*(one[name] for name in Guesses._fields))
        own, filled = parted(whole, one["num_filled_tokens"])
        yield {**one, **own._asdict()}
        yield {**one, **filled._asdict(), "drafter": one["filler"]}


def _of_rounds(rounds: Sequence[Row], guesses: Sequence[Row]) -> Summary:
    """Rounds as if they were a turn. A whole reply is of no single drafter. guesses: rounds with
    the counts of this drafter's own guesses alone."""
    drafted = [one for one in rounds if one["num_draft_tokens"]]
    turns = {one["turn_id"] for one in rounds}
    as_turn = {
        "num_output_tokens": _sum(rounds, "num_output_tokens"),
        "num_drafts": len(drafted),
        "num_draft_tokens": _sum(drafted, "num_draft_tokens"),
        "num_accepted_tokens": _sum(drafted, "num_accepted_tokens"),
        "num_checked_tokens": None,
        "decode_ms": _sum(rounds, "draft_ms") + _sum(rounds, "verify_ms"),
        "exact": None, "plain_decode_ms": None, "plain_reply_ms": None, "reply_ms": None,
    }  # fmt: skip
    compared = [
        {**one, "round_ms": one["draft_ms"] + one["verify_ms"]}
        for one in drafted
        if one["plain_ms"] is not None
    ]
    return replace(
        summarise([as_turn], rounds),
        num_turns=len(turns),
        acceptance_rate=_both(guesses, "num_accepted_tokens", "num_draft_tokens").acceptance_rate,
        checked_acceptance_rate=_both(
            guesses, "num_accepted_tokens", "num_checked_tokens"
        ).checked_acceptance_rate,
        decode_speedup=_gain(compared, "plain_ms", "round_ms"),
    )


def reached_acceptance(rounds: Sequence[Row]) -> float | None:
    """α of the formula: accepted guesses over guesses reached. A round reaches its accepted ones
    and, unless all were accepted, the one refused."""
    accepted = _sum(rounds, "num_accepted_tokens")
    refused = sum(row["num_accepted_tokens"] < row["num_draft_tokens"] for row in rounds)
    return ratio(accepted, accepted + refused)


def turn_table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line a turn, newest first, at most MAX_LINES. Tokens by the time of decoding are the
    tokens per second."""
    newest = reversed(rows[-MAX_LINES:])
    return [_line(len(rows) - place, row) for place, row in enumerate(newest)]


def _line(turn: int, row: Row) -> dict[str, Any]:
    workload, num_tokens = row["workload"], row["num_output_tokens"]
    return {
        "Turn": turn,
        "Drafter": drafters_of(row),
        "Gain, whole reply": gain(row["speedup"]),
        "Gain, decoding": gain(row["decode_speedup"]),
        "Tokens": DASH if num_tokens is None else num_tokens,
        "Decoding": took(row["decode_ms"]),
        "Tokens / s": number(row["tokens_per_second"]),
        "First token": took(row["ttft_ms"]),
        "Whole reply": took(row["reply_ms"]),
        "Checked guesses right": percent(
            ratio(row["num_accepted_tokens"], row["num_checked_tokens"])
        ),
        "Guessed of the text": percent(row["draft_share"]),
        "Mean length": number(row["mean_accepted_length"], digits=2),
        "γ": number(row["mean_num_draft_tokens"]),
        "Temperature": number(row["temperature"], digits=2),
        "Kind": kind_words(workload) if workload else DASH,
        "Ended": ENDED.get(row["finish_reason"], "not ended"),
        "Checked": DASH if row["exact"] is None else badge(row) or "exact",
    }


def arm(row: Row) -> str:
    """What a turn is compared as: its drafter, lenient turns apart."""
    return label_of(row["drafter"]) + (" (lenient)" if row["exact"] is False else "")


def verdict(
    rows: Sequence[Row], rounds: Sequence[Row], where: str, whose: str = "your replies"
) -> tuple[str, str]:
    """The band of the gain of whole replies, for colouring, and a sentence about it. rounds: of the
    newest of these turns. where, whose: which turns they are, in words."""
    gained = _gain(rows, "plain_reply_ms", "reply_ms")
    if gained is None:
        return "none", _why_unknown(rows)
    num_compared = sum(row["plain_reply_ms"] is not None for row in rows)
    said = f"{capital(whose)} came {compared(gained)} {where}"
    said += f" (measured on {num_compared:,} of {len(rows):,})"
    which = direction(gained)
    if which == "faster":
        return "good", f"{said}{_most(rounds)}."
    if not which:
        return "none", f"{said}."
    return "low", f"{said}. Choose another drafter, or off."


def _why_unknown(rows: Sequence[Row]) -> str:
    if not any(row["num_output_tokens"] for row in rows):
        return (
            "No reply was written in this selection yet; copied and imported ones have no figures."
        )
    if not any(row["num_draft_tokens"] for row in rows):
        return "Nothing was drafted in these replies, so there is no gain to tell."
    return (
        "No reply could be compared with writing without drafting: it was too short, the machine "
        "was busy with something else, or the plain speed is not measured yet."
    )


def _most(rounds: Sequence[Row]) -> str:
    """The drafter whose rounds saved the most time, as the end of a sentence."""
    saved: dict[str, float] = {}
    for one in rounds:
        if one["num_draft_tokens"] and one["plain_ms"] is not None:
            won_ms = one["plain_ms"] - one["draft_ms"] - one["verify_ms"]
            saved[one["drafter"]] = saved.get(one["drafter"], 0.0) + won_ms
    best = max(saved, key=lambda name: saved[name], default=None)
    if best is None or len(saved) < 2 or saved[best] <= 0.0:
        return ""
    return f"; {label_of(best)} brought the most"


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


def wait_lines(drafted: Waits, plain: Waits) -> list[tuple[str, ...]]:
    """The waits in words, in the order of WAIT_COLUMNS; none where nothing was waited for."""
    if not (drafted.num_tokens or plain.num_tokens):
        return []
    named = (("with drafting", drafted), ("without", plain))
    found = [(f"between tokens, {how}", waits, waits.between_tokens) for how, waits in named]
    found += [(f"between updates, {how}", waits, waits.between_updates) for how, waits in named]
    return [(name, *map(took, times), f"{one.num_tokens:,}") for name, one, times in found]


def _waits(rounds: Sequence[Row]) -> Waits:
    timed = [
        (one["draft_ms"] + one["verify_ms"], one["num_output_tokens"])
        for one in rounds
        if one["draft_ms"] is not None and one["verify_ms"] is not None
    ]
    tokens = [wait for ms, count in timed for wait in (ms, *[0.0] * (count - 1))[:count]]
    return Waits(_percentiles(tokens), _percentiles([ms for ms, _ in timed]), len(tokens))


def _percentiles(ms: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(percentile(ms, share) for share in SHARES)


def saved_ms(rows: Sequence[Row]) -> float | None:
    """Over whole replies, against the time that the same tokens take here without drafting;
    negative where drafting lost. None where nothing was compared."""
    compared = [row for row in rows if row["plain_reply_ms"] is not None]
    saved: float = _sum(compared, "plain_reply_ms") - _sum(compared, "reply_ms")
    return saved if compared else None


def _gain(rows: Sequence[Row], plain: str, took: str) -> float | None:
    """A speedup over all compared rows: sums before the division; None of too few tokens."""
    compared = [row for row in rows if row[plain] is not None]
    if _sum(compared, "num_output_tokens") < MIN_COMPARED_TOKENS:
        return None
    return speedup(_sum(compared, plain), _sum(compared, took))


def _both(rows: Sequence[Row], above: str, below: str) -> DecodeCounts:
    """The sums of these two, over the rows that have both."""
    known = [row for row in rows if row[above] is not None and row[below]]
    return DecodeCounts(**{name: _sum(known, name) for name in (above, below)})


def _sum(rows: Sequence[Row], name: str) -> Any:
    return sum(filter(None, map(itemgetter(name), rows)))
