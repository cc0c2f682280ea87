"""The rounds of a log, read for replay.

Contract: one `LoggedTurn` for each exact turn that has steps, oldest first, with what tells apart
the combinations of models and machine. The file is opened read-only: a log in use is not touched,
and none is made where there is none. Raises StoreError.

Not here: what is made of them (bench.logged), anything else the log holds (store).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Hashable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from localspec.errors import StoreError
from localspec.record.faults import diagnose
from localspec.record.learnt import STATE_KEY

BUSY_TIMEOUT_S = 5.0

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
    """One turn with its rounds in order."""

    turn_id: int
    model: str | None
    draft: str | None
    device: str | None
    dtype: str | None
    temperature: float | None
    steps: tuple[LoggedStep, ...]
    workload: str = ""  # none in particular

    @property
    def combination(self) -> tuple[str | None, ...]:
        """What must be the same for rounds to be comparable."""
        return (self.model, self.draft, self.device, self.dtype)


def read_turns(database: Path) -> list[LoggedTurn]:
    """Every turn that has steps, but lenient ones: what they accepted says nothing here."""
    with reading(database) as db:
        columns = {row["name"] for row in db.execute("PRAGMA table_info(turn)")}
        workload = "turn.workload" if "workload" in columns else "NULL"  # a log of an old version
        rows = db.execute(STEPS.format(workload=workload)).fetchall()
    return [_turn(list(group)) for _, group in groupby(rows, key=lambda row: row["turn_id"])]


def read_states(database: Path) -> dict[str, Any]:
    """What controllers learnt, by combination; empty where it is absent or cannot be read."""
    with reading(database) as db:
        sql = "SELECT state FROM calibration WHERE key = ?"
        row = db.execute(sql, (STATE_KEY,)).fetchone()
    try:
        found = json.loads(row["state"]) if row is not None else {}
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _turn(rows: list[Mapping[str, Any]]) -> LoggedTurn:
    first = rows[0]
    return LoggedTurn(
        first["turn_id"],
        first["model"],
        first["draft"],
        first["device"],
        first["dtype"],
        first["temperature"],
        tuple(_step(row) for row in rows),
        first["kind"] or "",
    )


def _step(row: Mapping[str, Any]) -> LoggedStep:
    signal = None if row["signal"] is None else json.loads(row["signal"])
    return LoggedStep(
        row["drafter"],
        row["num_draft_tokens"],
        row["num_accepted_tokens"],
        row["num_output_tokens"],
        row["draft_ms"],
        row["verify_ms"],
        row["context_length"],
        signal if isinstance(signal, str | int | float | None) else json.dumps(signal),
    )


@contextmanager
def reading(database: Path) -> Iterator[sqlite3.Connection]:
    if not database.is_file():
        raise StoreError(
            f"There is no log at {database}. Give the file that the chat writes its turns to."
        )
    try:
        address = f"{database.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, BUSY_TIMEOUT_S, uri=True)) as db:
            db.row_factory = sqlite3.Row
            yield db
    except sqlite3.Error as error:
        if "no such" in str(error):
            raise StoreError(
                f"{database} holds no log of turns and steps ({error}). Give the file that the "
                "chat writes its turns to."
            ) from error
        fault = diagnose(error)
        raise StoreError(f"The log cannot be read: {fault.fact}. {fault.remedy}") from error
