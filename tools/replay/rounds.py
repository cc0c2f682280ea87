"""The rounds of a log file, to be replayed.

Contract: `read_turns` opens the file read-only, so a log in use is not touched. Turns come oldest
first. Raises StoreError.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from localspec.record.log_file import has_column, reading
from localspec.record.rows import json_column

STEPS = """
SELECT step.*, turn.model, turn.draft, turn.device, turn.dtype, turn.temperature, {workload} AS kind
FROM step JOIN turn ON turn.id = step.turn_id
WHERE turn.exact IS NOT 0
ORDER BY step.turn_id, step.n
"""


@dataclass(frozen=True)
class LoggedStep:
    """One round as it was logged; None where the log does not know."""

    drafter: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_output_tokens: int
    draft_ms: float | None
    verify_ms: float | None
    context_length: int | None
    signal: Hashable


@dataclass(frozen=True)
class LoggedTurn:
    """One turn with its rounds in order. workload: "" where it is not known."""

    turn_id: int
    model: str | None
    draft: str | None
    device: str | None
    dtype: str | None
    temperature: float | None
    steps: tuple[LoggedStep, ...]
    workload: str = ""

    @property
    def combination(self) -> tuple[str | None, ...]:
        """What must be the same for rounds to be comparable."""
        return (self.model, self.draft, self.device, self.dtype)


def read_turns(database: Path) -> list[LoggedTurn]:
    """Every turn that has steps; not lenient ones, whose acceptance says nothing of exact ones."""
    with reading(database) as db:
        workload = "turn.workload" if has_column(db, "turn", "workload") else "NULL"
        rows = db.execute(STEPS.format(workload=workload)).fetchall()
    return [_turn(list(group)) for _, group in groupby(rows, key=lambda row: row["turn_id"])]


def _turn(rows: list[Mapping[str, Any]]) -> LoggedTurn:
    of_turn = ("turn_id", "model", "draft", "device", "dtype", "temperature")
    facts: dict[str, Any] = {name: rows[0][name] for name in of_turn}
    steps = tuple(_step(row) for row in rows)
    return LoggedTurn(**facts, steps=steps, workload=rows[0]["kind"] or "")


def _step(row: Mapping[str, Any]) -> LoggedStep:
    signal = json_column(row["signal"])
    is_hashable = isinstance(signal, str | int | float | None)
    facts: dict[str, Any] = {one.name: row[one.name] for one in fields(LoggedStep)}
    return LoggedStep(**{**facts, "signal": signal if is_hashable else json.dumps(signal)})
