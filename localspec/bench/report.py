"""A result as text: the report that `bench` prints, and the Markdown of `bench table`.

Contract: pure functions of a result. Unknown is a dash. Results of earlier versions are read too:
what they do not have is a dash, or a table that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localspec.bench.results import ALL
from localspec.core import OFF

Result = Mapping[str, Any]
Row = Mapping[str, Any]
Line = Sequence[str]

DASH = "-"
GIB = 2**30
FLOOR = 0.97  # of plain decoding's rate: a cell that surely lies below it breaks a promise

ROW_HEADINGS = (
    "arm", "T", "task", "prompts", "tokens/s", "to off", "95 % interval", "accepted", "length",
    "repeats", "differ",
)  # fmt: skip
LATENCY_HEADINGS = (
    "arm", "T", "first token ms", "prefill tokens/s", "wait P50 ms", "P95", "P99",
    "host ms a round", "peak memory", "joules a token", "of bandwidth",
)  # fmt: skip
AUTO_HEADINGS = (
    "T", "task", "auto to off", "95 % interval", "best single way", "to off", "auto to best",
    "95 % interval", "to the best of other prompts",
)  # fmt: skip


def render(result: Result) -> str:
    """The report for people: what ran where, the tables, and everything that was left out."""
    table = aligned([ROW_HEADINGS, *(_row_line(row) for row in result["rows"])])
    latency = _latency_table(result["rows"])
    return "\n".join(
        [*_heading(result), "", *table, *latency, *_auto_table(result["cells"]), *_notes(result)]
    )


def shown(value: float | None, form: str) -> str:
    """The number in this format, or a dash."""
    return DASH if value is None else format(value, form)


def interval(low: float | None, high: float | None) -> str:
    return DASH if low is None or high is None else f"{low:.2f} to {high:.2f}"


def aligned(lines: Sequence[Line]) -> list[str]:
    """Lines of equal length as text in columns, left-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _heading(result: Result) -> list[str]:
    machine = result["machine"]
    draft = f" with {machine['draft']}" if machine["draft"] else ""
    return [
        f"{machine['target']}{draft}, {machine['dtype']}, on {machine['device']}",
        f"{machine['num_threads']} threads, torch {machine['torch']}, controller "
        f"{machine['controller']}, at most {machine['max_tokens']} tokens a reply",
    ]


def _row_line(row: Row) -> Line:
    return (
        row["arm"],
        f"{row['temperature']:g}",
        row["task"],
        str(row["num_prompts"]),
        shown(row["tokens_per_second"], ".1f"),
        shown(row["ratio_to_off"], ".2f"),
        interval(row["ratio_low"], row["ratio_high"]),
        shown(row["acceptance_rate"], ".2f"),
        shown(row["mean_accepted_length"], ".2f"),
        shown(row["repetition"], ".2f"),
        shown(row["identical_to_off"], "d"),
    )


def _latency_table(rows: Sequence[Row]) -> list[str]:
    """One line for each arm and temperature over all prompts. Columns that are unknown for every
    arm are left out, and the table when no other is left."""
    lines = [_latency_line(row) for row in rows if row["task"] == ALL and row["num_prompts"]]
    kept = [
        column
        for column in range(len(LATENCY_HEADINGS))
        if column < 2 or any(line[column] != DASH for line in lines)
    ]
    if len(kept) == 2:
        return []
    picked = [[line[column] for column in kept] for line in (LATENCY_HEADINGS, *lines)]
    return ["", "Latency and cost, over all prompts", *aligned(picked)]


def _latency_line(row: Row) -> Line:
    peak = row["peak_memory_bytes"]
    return (
        row["arm"],
        f"{row['temperature']:g}",
        shown(row["ttft_ms"], ".1f"),
        shown(row["prefill_tokens_per_second"], ".0f"),
        shown(row["itl_p50_ms"], ".2f"),
        shown(row["itl_p95_ms"], ".2f"),
        shown(row["itl_p99_ms"], ".2f"),
        shown(row["host_ms_per_round"], ".3f"),
        DASH if peak is None else f"{peak / GIB:.2f} GiB",
        shown(row["energy_joules_per_token"], ".3g"),
        shown(row["bandwidth_share"], ".0%"),
    )


def _auto_table(cells: Sequence[Row]) -> list[str]:
    """`auto` by temperature and task against plain decoding and against the best single way (no
    column for it where plain decoding was the only one)."""
    if not cells:
        return []
    lines = [AUTO_HEADINGS, *(_auto_line(cell) for cell in cells)]
    has_choice = any(cell["best"] != OFF for cell in cells)
    count = len(AUTO_HEADINGS) if has_choice else 4
    below = [f"T {c['temperature']:g} {c['task']}" for c in cells if is_surely_below(c)]
    surely = f"{len(below)} of {len(cells)} intervals lie below {FLOOR:g} of plain decoding"
    return [
        "",
        "auto by temperature and task, tokens over time of all prompts",
        *aligned([line[:count] for line in lines]),
        f"{surely}{': ' + ', '.join(below) if below else ''}.",
    ]


def is_surely_below(cell: Row) -> bool:
    """Whether the whole 95 % interval of `auto` to plain decoding lies below FLOOR."""
    high = cell.get("auto_ratio_high")
    return high is not None and high < FLOOR


def _auto_line(cell: Row) -> Line:
    return (
        f"{cell['temperature']:g}",
        cell["task"],
        shown(cell["auto_ratio"], ".2f"),
        interval(cell["auto_ratio_low"], cell["auto_ratio_high"]),
        cell["best"],
        shown(cell["best_ratio"], ".2f"),
        shown(cell["auto_to_best"], ".2f"),
        interval(cell["auto_to_best_low"], cell["auto_to_best_high"]),
        shown(cell["auto_to_foreseen"], ".2f"),
    )


def _notes(result: Result) -> list[str]:
    reasons = {row["arm"]: row["reason"] for row in result["rows"] if "reason" in row}
    notes = [f"{arm} did not run: {reason}" for arm, reason in reasons.items()]
    notes += [f"Skipped {skip['prompt']}: {skip['reason']}" for skip in result["skipped"]]
    notes += [_difference("Near-tie", each) for each in result["near_ties"]]
    notes += [_difference("Differs", each) for each in result["differences"]]
    if result["ending"] is not None:
        notes.append(f"Incomplete: {result['ending']}")
    return ["", *notes] if notes else []


def _difference(kind: str, each: Mapping[str, Any]) -> str:
    gap = each["gap"]
    distance = "the output stops there" if gap is None else f"{gap:.2g} below the best"
    return f"{kind}: {each['arm']} on {each['prompt']} at token {each['position']}, {distance}"


# -- Markdown ---------------------------------------------------------------------------------


def markdown(result: Result) -> str:
    """Three tables: every way of drafting over all prompts; speedup by task, tokens over time of
    all of it; and `auto` by temperature and task, where it was an arm."""
    rows = [row for row in result["rows"] if row["num_prompts"]]
    tables = [_drafter_table(rows), _task_table(rows)]
    if result.get("cells"):
        tables.append(_choice_table(result["cells"]))
    return "\n\n".join("\n".join(table) for table in tables)


def _markdown_table(headings: Line, lines: Sequence[Line]) -> list[str]:
    return [
        f"| {' | '.join(headings)} |",
        f"|{'---|' * len(headings)}",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]


def _drafter_table(rows: Sequence[Row]) -> list[str]:
    lines = list[Line]()
    for temperature in _temperatures(rows):
        here = [r for r in rows if r["temperature"] == temperature and r["task"] == ALL]
        plain = next((r["tokens_per_second"] for r in here if r["arm"] == OFF), None)
        lines += [_drafter_line(row, plain) for row in here if row["arm"] != OFF]
    headings = (
        "drafter", "T", "accepted at least 1 / 2 / 3 / 4", "mean accepted length",
        "drafted a round", "round, in plain steps", "to plain (95 %)",
    )  # fmt: skip
    return _markdown_table(headings, lines)


def _drafter_line(row: Row, plain_rate: float | None) -> Line:
    by_position = row.get("acceptance_by_position")
    shares = DASH if by_position is None else " / ".join(f"{share:.2f}" for share in by_position)
    draft_ms, verify_ms = row.get("draft_ms_per_round"), row.get("verify_ms_per_round")
    cost = None
    if draft_ms is not None and verify_ms is not None and plain_rate is not None:
        cost = (draft_ms + verify_ms) * plain_rate / 1000.0
    return (
        f"`{row['arm']}`",
        f"{row['temperature']:g}",
        shares,
        shown(row["mean_accepted_length"], ".2f"),
        shown(row.get("num_draft_tokens_per_round"), ".1f"),
        shown(cost, ".2f"),
        f"{shown(row['ratio_to_off'], '.2f')} ({interval(row['ratio_low'], row['ratio_high'])})",
    )


def _task_table(rows: Sequence[Row]) -> list[str]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != OFF]
    rates = {(r["temperature"], r["task"], r["arm"]): r["tokens_per_second"] for r in rows}
    lines = list[Line]()
    for temperature in _temperatures(rows):
        for task in tasks:
            plain = rates.get((temperature, task, OFF))
            found = [rates.get((temperature, task, arm)) for arm in arms]
            ratios = [shown(rate / plain if rate and plain else None, ".2f") for rate in found]
            lines.append((f"{temperature:g}", task, *ratios))
    return _markdown_table(("T", "task", *(f"`{arm}`" for arm in arms)), lines)


def _choice_table(cells: Sequence[Row]) -> list[str]:
    headings = (
        "T", "task", "`auto` to plain (95 %)", "best single way, to plain",
        "`auto` to the best (95 %)", "to the best of the other prompts",
    )  # fmt: skip
    lines = [
        (
            f"{cell['temperature']:g}",
            cell["task"],
            _with_interval(cell, "auto_ratio"),
            f"`{cell['best']}` {shown(cell['best_ratio'], '.2f')}",
            _with_interval(cell, "auto_to_best"),
            shown(cell.get("auto_to_foreseen"), ".2f"),
        )
        for cell in cells
    ]
    return _markdown_table(headings, lines)


def _with_interval(cell: Row, name: str) -> str:
    limits = interval(cell.get(f"{name}_low"), cell.get(f"{name}_high"))
    return f"{shown(cell[name], '.2f')} ({limits})"


def _temperatures(rows: Sequence[Row]) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in rows))
