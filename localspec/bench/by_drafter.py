"""Ways of drafting side by side: how far each gets, what it costs, what it gains.

Contract: `columns` adds to a row what only rounds know; `cells` compares the controller's choice
with the best single way, cell by cell (task and temperature); `markdown` is the table of the
README. Pure functions of a result. Unknown is None, a dash in the table.

Acceptance by position: of the rounds that drafted, the share in which at least so many draft
tokens were accepted; of a tree by depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localspec.bench.figures import Estimate, rate_of, rate_ratio
from localspec.bench.stage import Run
from localspec.bench.table import DASH, aligned, shown
from localspec.core import AUTO, OFF

POSITIONS = 4
ALL = "all"
Row = Mapping[str, Any]
# By temperature and task, by arm: (tokens, ms) of each prompt, in the same order.
Timed = Mapping[tuple[float, str], Mapping[str, Sequence[tuple[int, float]]]]


def columns(runs: Sequence[Run]) -> dict[str, Any]:
    """acceptance_by_position: from the first; None without drafted rounds."""
    lengths = [length for run in runs for length in run.accepted_lengths]
    drafted = [run for run in runs if run.num_drafts]
    rounds = sum(run.num_drafts for run in drafted)
    known = [
        run for run in drafted if run.draft_ms is not None and run.drafted_verify_ms is not None
    ]
    draft_ms = sum(run.draft_ms or 0.0 for run in known)
    verify_ms = sum(run.drafted_verify_ms or 0.0 for run in known)
    return {
        "acceptance_by_position": [
            sum(length > place for length in lengths) / len(lengths) for place in range(POSITIONS)
        ]
        if lengths
        else None,
        "num_draft_tokens_per_round": sum(r.num_draft_tokens for r in drafted) / rounds
        if rounds
        else None,
        "draft_ms_per_round": draft_ms / rounds if known and rounds else None,
        "verify_ms_per_round": verify_ms / rounds if known and rounds else None,
    }


def cells(rows: Sequence[Row], timed: Timed | None = None) -> list[dict[str, Any]]:
    """For each temperature and task: the best single way of drafting (or none at all), and the
    controller's rate over its rate: tokens over time of the whole cell, as somebody meets it who
    asks all of it. (A median over its prompts would hide the one on which a drafter shines.)

    timed: the runs behind it. The best of many is partly luck, which the controller cannot have:
    auto_to_foreseen is its rate over that of the way which was best on the other half of the
    prompts, half by half."""
    found = list[dict[str, Any]]()
    for key in dict.fromkeys((row["temperature"], row["task"]) for row in rows):
        here = [row for row in rows if (row["temperature"], row["task"]) == key]
        rates = {row["arm"]: row["tokens_per_second"] for row in here}
        plain = rates.get(OFF)
        known = {arm: rate / plain for arm, rate in rates.items() if rate and plain}
        auto = known.pop(AUTO, None)
        if auto is None or not known:
            continue
        best = max(known, key=lambda arm: known[arm])
        runs = {} if timed is None else timed[key]
        interval = rate_ratio(runs[AUTO], runs[best]) if runs else Estimate()
        found.append(
            {
                "temperature": key[0],
                "task": key[1],
                "best": best,
                "best_ratio": known[best],
                "auto_ratio": auto,
                "auto_to_best": auto / known[best],
                "auto_to_best_low": interval.low,
                "auto_to_best_high": interval.high,
                "auto_to_foreseen": _to_foreseen({arm: runs[arm] for arm in (*known, AUTO)})
                if runs
                else None,
            }
        )
    return found


def _to_foreseen(runs: Mapping[str, Sequence[tuple[int, float]]]) -> float | None:
    """runs: (tokens, ms) by prompt, of the controller and of each single way."""
    halves = [{arm: of[start::2] for arm, of in runs.items()} for start in (0, 1)]
    if not all(half[AUTO] for half in halves):
        return None
    ours, theirs = list[tuple[int, float]](), list[tuple[int, float]]()
    for here, other in (halves, halves[::-1]):
        single = [arm for arm in other if arm != AUTO]
        best = max(single, key=lambda arm: rate_of(other[arm]))
        ours += here[AUTO]
        theirs += here[best]
    return rate_of(ours) / rate_of(theirs)


def chosen(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The controller against the best single way, for people; nothing where there was no choice."""
    if not any(cell["best"] != OFF for cell in found):
        return []
    headings = (
        "T",
        "task",
        "best single",
        "to off",
        "auto to off",
        "auto to best",
        "95 %",
        "foreseen",
    )
    lines = [
        (
            f"{cell['temperature']:g}",
            cell["task"],
            cell["best"],
            f"{cell['best_ratio']:.2f}",
            f"{cell['auto_ratio']:.2f}",
            f"{cell['auto_to_best']:.2f}",
            _interval(cell["auto_to_best_low"], cell["auto_to_best_high"]),
            shown(cell["auto_to_foreseen"], ".2f"),
        )
        for cell in found
    ]
    return ["", "The controller's choice against the best single one", *aligned([headings, *lines])]


def markdown(result: Mapping[str, Any]) -> str:
    """Every way of drafting over all prompts; speedup by task, tokens over time of all of it; and
    the controller's choice against the best single one, where there was a choice."""
    rows = [row for row in result["rows"] if row["num_prompts"]]
    found = list(result.get("cells", ()))
    choices = ["", *_choices(found)] if found else []
    return "\n".join([*_ways(rows), "", *_tasks(rows), *choices])


def _ways(rows: Sequence[Row]) -> list[str]:
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    lines = [
        "| drafter | T | accepted at least 1 / 2 / 3 / 4 | mean accepted length | drafted a round "
        "| round, in plain steps | to plain (95 %) |",
        "|---|---|---|---|---|---|---|",
    ]
    for temperature in temperatures:
        here = [r for r in rows if r["temperature"] == temperature and r["task"] == ALL]
        plain = next((r["tokens_per_second"] for r in here if r["arm"] == OFF), None)
        lines += [_way(row, plain) for row in here if row["arm"] != OFF]
    return lines


def _interval(low: float | None, high: float | None) -> str:
    return DASH if low is None or high is None else f"{low:.2f}–{high:.2f}"


def _way(row: Row, plain_rate: float | None) -> str:
    by_position = row.get("acceptance_by_position")  # the first results kept no rounds
    shares = DASH if by_position is None else " / ".join(f"{share:.2f}" for share in by_position)
    draft_ms, verify_ms = row.get("draft_ms_per_round"), row.get("verify_ms_per_round")
    cost = None
    if draft_ms is not None and verify_ms is not None and plain_rate is not None:
        cost = (draft_ms + verify_ms) * plain_rate / 1000.0
    interval = _interval(row["ratio_low"], row["ratio_high"])
    cells = (
        f"`{row['arm']}`",
        f"{row['temperature']:g}",
        shares,
        shown(row["mean_accepted_length"], ".2f"),
        shown(row.get("num_draft_tokens_per_round"), ".1f"),
        shown(cost, ".2f"),
        f"{shown(row['ratio_to_off'], '.2f')}x ({interval})",
    )
    return f"| {' | '.join(cells)} |"


def _tasks(rows: Sequence[Row]) -> list[str]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != OFF]
    rates = {(r["temperature"], r["task"], r["arm"]): r["tokens_per_second"] for r in rows}
    lines = [
        f"| T | task | {' | '.join(f'`{arm}`' for arm in arms)} |",
        f"|---|---|{'---|' * len(arms)}",
    ]
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        for task in tasks:
            plain = rates.get((temperature, task, OFF))
            found = [rates.get((temperature, task, arm)) for arm in arms]
            ratios = [rate / plain if rate and plain else None for rate in found]
            shown_ratios = " | ".join(shown(ratio, ".2f") for ratio in ratios)
            lines.append(f"| {temperature:g} | {task} | {shown_ratios} |")
    return lines


def _choices(found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| T | task | best single way, to plain | `auto` to plain | `auto` to the best (95 %) "
        "| to the one foreseen |",
        "|---|---|---|---|---|---|",
    ]
    for cell in found:
        interval = _interval(cell.get("auto_to_best_low"), cell.get("auto_to_best_high"))
        lines.append(
            f"| {cell['temperature']:g} | {cell['task']} "
            f"| `{cell['best']}` {cell['best_ratio']:.2f} | {cell['auto_ratio']:.2f} "
            f"| {cell['auto_to_best']:.2f} ({interval}) "
            f"| {shown(cell.get('auto_to_foreseen'), '.2f')} |"
        )
    return lines
