"""A result as text: the report that `bench` prints, and the Markdown of `bench table`.

Contract: pure functions of a result. Results of earlier versions are read too: what they do not
have is a dash, or a table that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localspec.bench.results import ALL
from localspec.bench.tables import (
    DASH,
    Column,
    Row,
    aligned,
    as_markdown,
    known,
    limits,
    number,
    shown,
    text,
    with_limits,
)
from localspec.core.arithmetic import ratio
from localspec.core.decoding import OFF
from localspec.core.units import gib

Result = Mapping[str, Any]

FLOOR = 0.97  # of plain decoding's rate: a cell that surely lies below it breaks a promise
TEMPERATURE = number("T", "temperature", "g")

ARMS = (
    text("arm"),
    TEMPERATURE,
    text("task"),
    text("prompts", "num_prompts"),
    number("tokens/s", "tokens_per_second", ".1f"),
    number("to off", "ratio_to_off", ".2f"),
    limits("95 % interval", "ratio"),
    number("accepted", "acceptance_rate", ".2f"),
    number("length", "mean_accepted_length", ".2f"),
    number("repeats", "repetition", ".2f"),
    number("differ", "identical_to_off", "d"),
)
COSTS = (
    Column("peak memory", lambda row: _size(row["peak_memory_bytes"])),
    number("joules a token", "energy_joules_per_token", ".3g"),
)
AUTO_TO_OFF = (
    TEMPERATURE,
    text("task"),
    number("auto to off", "auto_ratio", ".2f"),
    limits("95 % interval", "auto_ratio"),
)
AUTO_TO_BEST = (
    text("best single way", "best"),
    number("to off", "best_ratio", ".2f"),
    number("auto to best", "auto_to_best", ".2f"),
    limits("95 % interval", "auto_to_best"),
    number("to the best of other prompts", "auto_to_foreseen", ".2f"),
)


def render(result: Result) -> str:
    """The report for people: what ran where, the tables, and everything that was left out."""
    rows = result["rows"]
    return "\n".join(
        [
            *_heading(result["machine"]),
            "",
            *aligned(ARMS, rows),
            *_costs_table([row for row in rows if row["task"] == ALL and row["num_prompts"]]),
            *_auto_table(result["cells"]),
            *_notes(result),
        ]
    )


def _heading(machine: Mapping[str, Any]) -> list[str]:
    draft = f" with {machine['draft']}" if machine["draft"] else ""
    return [
        f"{machine['target']}{draft}, {machine['dtype']}, on {machine['device']}",
        f"{machine['num_threads']} threads, torch {machine['torch']}, controller "
        f"{machine['controller']}, at most {machine['max_tokens']} tokens a reply",
    ]


def _size(num_bytes: int | None) -> str:
    return DASH if num_bytes is None else gib(num_bytes)


def _costs_table(rows: Sequence[Row]) -> list[str]:
    """One line for each arm and temperature; columns that no arm knows are left out."""
    columns = known(COSTS, rows)
    if not columns:
        return []
    table = aligned((text("arm"), TEMPERATURE, *columns), rows)
    return ["", "Memory and energy, over all prompts", *table]


def _auto_table(cells: Sequence[Row]) -> list[str]:
    """`auto` against plain decoding and, where there was another one, the best single way."""
    if not cells:
        return []
    has_choice = any(cell["best"] != OFF for cell in cells)
    below = [f"T {cell['temperature']:g} {cell['task']}" for cell in cells if is_surely_below(cell)]
    known = sum(cell["auto_ratio_high"] is not None for cell in cells)  # one prompt has none
    surely = f"{len(below)} of {known} intervals lie below {FLOOR:g} of plain decoding"
    return [
        "",
        "auto by temperature and task, tokens over time of all prompts",
        *aligned((*AUTO_TO_OFF, *AUTO_TO_BEST) if has_choice else AUTO_TO_OFF, cells),
        f"{surely}{': ' + ', '.join(below) if below else ''}.",
    ]


def is_surely_below(cell: Row) -> bool:
    """Whether the whole 95 % interval of `auto` to plain decoding lies below FLOOR."""
    high = cell.get("auto_ratio_high")
    return high is not None and high < FLOOR


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

DRAFTERS = (
    Column("drafter", lambda row: f"`{row['arm']}`"),
    TEMPERATURE,
    Column("accepted at least 1 / 2 / 3 / 4", lambda row: _by_position(row)),
    number("mean accepted length", "mean_accepted_length", ".2f"),
    number("drafted a round", "num_draft_tokens_per_round", ".1f"),
    number("round, in plain steps", "round_cost", ".2f"),
    with_limits("to plain (95 %)", "ratio_to_off", "ratio"),
)
CELLS = (
    TEMPERATURE,
    text("task"),
    with_limits("`auto` to plain (95 %)", "auto_ratio"),
    Column(
        "best single way, to plain",
        lambda cell: f"`{cell['best']}` {shown(cell['best_ratio'], '.2f')}",
    ),
    with_limits("`auto` to the best (95 %)", "auto_to_best"),
    number("to the best of the other prompts", "auto_to_foreseen", ".2f"),
)


def markdown(result: Result) -> str:
    """Three tables: every way of drafting over all prompts; speedup by task, tokens over time of
    all of it; and `auto` by temperature and task, where it was an arm."""
    rows = [row for row in result["rows"] if row["num_prompts"]]
    rates = {(r["temperature"], r["task"], r["arm"]): r["tokens_per_second"] for r in rows}
    drafting = [
        {**row, "round_cost": _round_cost(row, rates.get((row["temperature"], ALL, OFF)))}
        for row in rows
        if row["task"] == ALL and row["arm"] != OFF
    ]
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != OFF]
    by_task = [
        {"temperature": temperature, "task": task}
        | {arm: ratio(rates.get((temperature, task, arm)), rates.get((temperature, task, OFF)))
           for arm in arms}
        for temperature in dict.fromkeys(row["temperature"] for row in rows)
        for task in dict.fromkeys(row["task"] for row in rows)
    ]  # fmt: skip
    of_tasks = (TEMPERATURE, text("task"), *(number(f"`{arm}`", arm, ".2f") for arm in arms))
    tables = [as_markdown(DRAFTERS, drafting), as_markdown(of_tasks, by_task)]
    if result.get("cells"):
        tables.append(as_markdown(CELLS, result["cells"]))
    return "\n\n".join(tables)


def _by_position(row: Row) -> str:
    shares = row.get("acceptance_by_position")
    return DASH if shares is None else " / ".join(f"{share:.2f}" for share in shares)


def _round_cost(row: Row, plain_rate: float | None) -> float | None:
    """What a round that drafted took, in plain steps."""
    draft_ms, verify_ms = row.get("draft_ms_per_round"), row.get("verify_ms_per_round")
    if draft_ms is None or verify_ms is None or plain_rate is None:
        return None
    return float((draft_ms + verify_ms) * plain_rate / 1000.0)
