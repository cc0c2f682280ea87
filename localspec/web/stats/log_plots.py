"""The plots of the Stats tab and of the report: rows of the log in, SVG out.

Contract: pure. Rates over several turns are ratios of sums. A plot without data is left out. The
cost curves come from `Description.calibration`: a round of γ drafted tokens takes the check of
γ + 1 tokens and γ steps of the drafter. It breaks even at the α for which (1 - α^(γ+1)) / (1 - α)
tokens a round make up for T(γ) / T(0). A drafter that makes several tokens in one step breaks even
at a smaller α than drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from localspec.core.backend import Description
from localspec.core.plots import Axes, Group, Series, bars, lines
from localspec.core.speculation import expected_tokens, interpolated
from localspec.core.units import axis_unit
from localspec.core.workloads import kind_words
from localspec.drafters.registry import UNKNOWN, colour_of, label_of
from localspec.web.stats import figures as stats

Row = Mapping[str, Any]
MAX_ROUNDS = 300  # of γ over time: the newest
MAX_MARKS = 300  # of speed by turn: the newest
MAIN = ("speedup-by-drafter", "speedup-by-workload", "speed-by-turn")  # seen unasked
SHARED = {"temperature": "temperature", "drafter": "drafter", "workload": "kind of text"}
MAX_DRAFT_TOKENS = 8  # on the axis of the cost curves
BREAK_EVEN_STEPS = 2**40
MEASURED_COLOUR = "#dc2626"
SLOWER = " A red bar is slower than that."

Points = Mapping[str, float]  # ms by tokens of context

_axes = partial(Axes, width=440)  # three beside each other on a desk, one on a phone


@dataclass(frozen=True)
class Plot:
    """name: of the file it is saved as. note: what it shows, in words."""

    name: str
    svg: str
    note: str


def make_plots(
    rows: Sequence[Row], rounds: Sequence[Row], loaded: Description | None
) -> list[Plot]:
    """All that have something to show, those of MAIN first. rounds: of these rows, oldest first."""
    groups = {field: summaries(rows, rounds, field) for field in SHARED}
    found = [
        _speed(rows),
        *(_compared(groups[field], field) for field in SHARED),
        *(_accepted(groups[field], field) for field in SHARED),
        _gamma(rounds),
        _waits(rows, rounds),
        *_costs(rows, rounds, loaded),
    ]
    order = {name: place for place, name in enumerate(MAIN)}
    found.sort(key=lambda plot: order.get(plot.name, len(order)))
    return [plot for plot in found if plot.svg]


def _speed(rows: Sequence[Row]) -> Plot:
    by_arm: dict[str, list[tuple[float, float]]] = {}
    colours = {}
    newest = rows[-MAX_MARKS:]
    for turn, row in enumerate(newest, len(rows) - len(newest) + 1):
        if row["tokens_per_second"] is not None:
            name = stats.arm(row)
            by_arm.setdefault(name, []).append((float(turn), row["tokens_per_second"]))
            colours[name] = None if row["exact"] is False else colour_of(row["drafter"])
    series = [Series(name, found, colours[name], is_line=False) for name, found in by_arm.items()]
    axes = _axes("Tokens per second by turn", "turn", "tokens per second")
    note = f"One mark a turn, of the newest {MAX_MARKS}: tokens by the time of decoding."
    return Plot("speed-by-turn", lines(axes, series), note)


def _grouped(rows: Sequence[Row], field: str) -> dict[str, list[Row]]:
    """Rows by what they share in this column, lenient turns apart."""
    groups: defaultdict[tuple[Any, bool], list[Row]] = defaultdict(list)
    for row in rows:
        if row["num_output_tokens"]:
            groups[row[field], row["exact"] is False].append(row)
    named: defaultdict[str, list[Row]] = defaultdict(list)
    for (value, is_lenient), members in groups.items():
        named[_label(field, value) + (" (lenient)" if is_lenient else "")] += members
    return dict(sorted(named.items()))


def _label(field: str, value: Any) -> str:
    if value is None or value == "":
        return UNKNOWN
    return f"{value:.2f}" if field == "temperature" else kind_words(value)


def summaries(rows: Sequence[Row], rounds: Sequence[Row], field: str) -> dict[str, stats.Summary]:
    """What is shared in this column, taken together. Guesses are the drafter's that made them."""
    if field == "drafter":
        return stats.by_drafter(rows, rounds)
    return {label: stats.summarise(members) for label, members in _grouped(rows, field).items()}


def _compared(groups: Mapping[str, stats.Summary], field: str) -> Plot:
    names = ("decoding",) if field == "drafter" else ("decoding", "whole reply")
    shown = [
        Group(label, (one.decode_speedup, one.speedup)[: len(names)])
        for label, one in groups.items()
        if one.decode_speedup is not None
    ]
    axes = _axes(
        f"Gain by {SHARED[field]}", SHARED[field], "speed by that without drafting",
        line=1.0, line_label="without drafting", y_digits=2,
    )  # fmt: skip
    note = "Speed by that without drafting: decoding alone, and whole replies." + SLOWER
    if field == "drafter":
        note = "Speed by that without drafting: the rounds of each drafter." + SLOWER
    return Plot(f"speedup-by-{field}", bars(axes, names, shown), note)


def _accepted(groups: Mapping[str, stats.Summary], field: str) -> Plot:
    shown = [
        Group(label, (_percent(one.checked_acceptance_rate), _percent(one.draft_share)))
        for label, one in groups.items()
        if one.checked_acceptance_rate is not None
    ]
    axes = _axes(f"Acceptance by {SHARED[field]}", SHARED[field], "%", y_top=100)
    note = (
        "How many of the checked guesses were right, and how much of the text was guessed. A guess "
        "is checked when all before it were right."
    )
    names = ("checked guesses right", "text that was guessed")
    return Plot(f"acceptance-by-{field}", bars(axes, names, shown), note)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _gamma(rounds: Sequence[Row]) -> Plot:
    newest = [*enumerate(rounds, 1)][-MAX_ROUNDS:]
    drafted = [(float(place), float(one["num_draft_tokens"])) for place, one in newest]
    accepted = [(float(place), float(one["num_accepted_tokens"])) for place, one in newest]
    is_used = any(value for _, value in drafted)
    series = [Series("γ, guessed", drafted), Series("accepted", accepted)] if is_used else []
    axes = _axes("Draft length γ over time", "round", "tokens in a round")
    note = (
        f"The newest {len(newest)} rounds: how many tokens were guessed, and how many were right."
    )
    return Plot("gamma-over-time", lines(axes, series), note)


def _waits(rows: Sequence[Row], rounds: Sequence[Row]) -> Plot:
    drafted, plain = stats.with_and_without(rows, rounds)
    kinds = [("with drafting", drafted), ("without", plain)]
    known = [(name, waits) for name, waits in kinds if waits.num_tokens]
    names = [name for name, _ in known]
    times = [[ms or 0.0 for ms in waits.between_tokens] for _, waits in known]
    unit, unit_ms = axis_unit(max(map(max, times), default=0.0))
    groups = [
        Group(
            f"P{100 * share:.0f}",
            [each[i] / unit_ms for each in times],
        )
        for i, share in enumerate(stats.SHARES)
    ]
    axes = _axes("Wait between tokens", "percentile", unit, y_digits=1)
    note = (
        "Tokens of one round arrive together: with drafting most waits are 0 and the rounds stand "
        "in the upper percentiles."
    )
    return Plot("waits", bars(axes, names, groups) if known else "", note)


def usual_context(rows: Sequence[Row]) -> int:
    """Tokens before the one decoded, in the middle of the median turn; 0 where none is known."""
    known = [
        row["num_prompt_tokens"] + (row["num_output_tokens"] or 0) // 2
        for row in rows
        if row["num_prompt_tokens"] is not None
    ]
    return int(median(known)) if known else 0


def _costs(rows: Sequence[Row], rounds: Sequence[Row], loaded: Description | None) -> list[Plot]:
    context = usual_context(rows)
    curves = cost_curves(None if loaded is None else loaded.calibration, context)
    unit, unit_ms = axis_unit(max((max(curve.round_ms) for curve in curves), default=0.0))
    series = [
        Series(
            label_of(curve.drafter),
            [(gamma, ms / unit_ms) for gamma, ms in enumerate(curve.round_ms)],
            colour_of(curve.drafter),
        )
        for curve in curves
    ]
    where = f"{context} tokens of context" if context else "the shortest context measured"
    axes = _axes(f"Cost of a round here, at {where}", "draft length γ", unit)
    note = "Measured on this machine: one check of γ + 1 tokens and γ steps of the drafter."
    return [Plot("cost-curve", lines(axes, series), note), _break_even(rows, rounds, curves)]


def _break_even(rows: Sequence[Row], rounds: Sequence[Row], curves: Sequence[CostCurve]) -> Plot:
    series = [
        Series(label_of(curve.drafter), curve.break_even, colour_of(curve.drafter))
        for curve in curves
    ]
    all_turns = stats.summarise(rows, rounds)
    if all_turns.alpha is not None and all_turns.mean_num_draft_tokens is not None:
        point = (all_turns.mean_num_draft_tokens, 100 * all_turns.alpha)
        series.append(Series("measured", [point], MEASURED_COLOUR, is_line=False))
    axes = _axes(
        "Acceptance needed to break even", "draft length γ", "% of guesses checked", y_top=100
    )
    note = (
        "Above its line a drafter gains, below it loses. The mark is what was measured over all "
        "drafters at the mean γ, of the guesses that were checked; one after a wrong guess never "
        "is."
    )
    return Plot("break-even", lines(axes, series) if curves else "", note)


@dataclass(frozen=True)
class CostCurve:
    """One drafter. round_ms[γ] from γ = 0 on. break_even: γ and the percentage of guesses that must
    be accepted; a γ at which not even all would do is left out."""

    drafter: str
    round_ms: tuple[float, ...]
    break_even: tuple[tuple[float, float], ...]


def cost_curves(calibration: Mapping[str, Any] | None, context_length: int) -> list[CostCurve]:
    """One curve for each drafter that was measured; none before."""
    if calibration is None:
        return []
    measured = calibration["verify_ms"].items()
    widths = {int(width): at(points, context_length) for width, points in measured}
    if 1 not in widths or len(widths) < 2:
        return []
    curves = []
    for name, points in calibration["draft_step_ms"].items():
        step_ms = at(points, context_length)
        round_ms = [
            interpolated(widths, gamma + 1) + gamma * step_ms
            for gamma in range(MAX_DRAFT_TOKENS + 1)
        ]
        plain_ms, *drafted_ms = round_ms
        shares = [break_even(ms / plain_ms, gamma) for gamma, ms in enumerate(drafted_ms, 1)]
        pays = [(float(g), 100 * share) for g, share in enumerate(shares, 1) if share is not None]
        curves.append(CostCurve(name, tuple(round_ms), tuple(pays)))
    return curves


def at(points: Points, context_length: int) -> float:
    """ms at this context, interpolated between what was measured."""
    return interpolated({int(context): ms for context, ms in points.items()}, context_length)


def break_even(cost: float, num_draft_tokens: int) -> float | None:
    """The α at which a round gives as many tokens as it costs steps without drafting."""
    if cost > num_draft_tokens + 1:
        return None
    steps = range(BREAK_EVEN_STEPS)
    found = bisect_left(
        steps, cost, key=lambda step: expected_tokens([step / len(steps)], num_draft_tokens)
    )
    return found / len(steps)
