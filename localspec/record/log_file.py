"""Reads a log file without opening a Store: rounds for replay, replies for training, learnt states.

Contract: the file is opened read-only, so a log in use is not touched, and none is made where there
is none. Turns and replies come oldest first. Raises StoreError.

Not here: what is made of them (training, tools.replay), everything else of the log (store).
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Hashable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from localspec.backend import Message
from localspec.config import settings_for
from localspec.errors import StoreError
from localspec.record.faults import diagnose
from localspec.record.rows import json_column, state_from
from localspec.record.store import STATE_KEY

log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0
FINISHED = ("complete", "stopped")

STEPS = """
SELECT step.*, turn.model, turn.draft, turn.device, turn.dtype, turn.temperature, {workload} AS kind
FROM step JOIN turn ON turn.id = step.turn_id
WHERE turn.exact IS NOT 0
ORDER BY step.turn_id, step.n
"""
MESSAGES = "SELECT id, conversation_id, parent_id, role, text, text_exact, state FROM message"
DELETED = "SELECT id FROM conversation WHERE deleted_at_utc IS NOT NULL"
CONTINUED = "SELECT continues_message_id FROM turn WHERE continues_message_id IS NOT NULL"
SYSTEM_PROMPTS = "SELECT message_id, system_prompt FROM turn"


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


@dataclass(frozen=True)
class LoggedReply:
    """before: the branch that the reply answers, system prompt first, a user message last."""

    conversation_id: int
    before: tuple[Message, ...]
    text: str


def learnt_states(home: Path | None) -> dict[str, Any]:
    """`read_states` of a home's log; none without a home or a log in it, and, with a warning, none
    where the log cannot be read: plans and comparisons are made without it too."""
    database = None if home is None else settings_for(home).database
    if database is None or not database.is_file() or database.stat().st_size == 0:
        return {}
    try:
        return read_states(database)
    except StoreError as error:
        log.warning("nothing that earlier runs measured is used: %s", error)
        return {}


def read_states(database: Path) -> dict[str, Any]:
    """What controllers learnt, by combination; empty where there is none or it cannot be read."""
    with reading(database) as db:
        sql = "SELECT state FROM calibration WHERE key = ?"
        row = db.execute(sql, (STATE_KEY,)).fetchone()
    try:
        return {} if row is None else state_from(row["state"])
    except ValueError:
        return {}


# rounds


def read_turns(database: Path) -> list[LoggedTurn]:
    """Every turn that has steps; not lenient ones, whose acceptance says nothing of exact ones."""
    with reading(database) as db:
        workload = "turn.workload" if _has_column(db, "turn", "workload") else "NULL"
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


# replies


def read_replies(database: Path) -> list[LoggedReply]:
    """Every finished reply that has a text and answers a message that has one. Deleted
    conversations, and replies that another one continues, are left out."""
    with reading(database) as db:
        deleted, continued = _left_out(db)
        rows = {row["id"]: row for row in db.execute(MESSAGES)}
        systems = {row["message_id"]: row["system_prompt"] for row in db.execute(SYSTEM_PROMPTS)}
    found = []
    for row in rows.values():
        if row["role"] != "assistant" or row["state"] not in FINISHED or not row["text"].strip():
            continue
        if row["id"] in continued or row["conversation_id"] in deleted:
            continue
        before = _branch(rows, row["parent_id"])
        if before and before[-1].role == "user" and before[-1].content.strip():
            system = systems.get(row["id"])
            opening = (Message("system", system),) if system else ()
            found.append(LoggedReply(row["conversation_id"], (*opening, *before), _text(row)))
    return found


def _left_out(db: sqlite3.Connection) -> tuple[set[int], set[int]]:
    """Ids of deleted conversations and of continued replies; an older log has neither."""
    if not _has_column(db, "conversation", "deleted_at_utc"):
        return set(), set()
    return {row[0] for row in db.execute(DELETED)}, {row[0] for row in db.execute(CONTINUED)}


def _branch(rows: dict[int, sqlite3.Row], message_id: int | None) -> tuple[Message, ...]:
    branch = list[Message]()
    while message_id is not None:
        row = rows[message_id]
        branch.append(Message(row["role"], _text(row)))
        message_id = row["parent_id"]
    return tuple(reversed(branch))


def _text(row: sqlite3.Row) -> str:
    exact = json_column(row["text_exact"])
    return exact if isinstance(exact, str) else str(row["text"])


# the file


@contextmanager
def reading(database: Path) -> Iterator[sqlite3.Connection]:
    if not database.is_file():
        raise StoreError(f"There is no log at {database}. Chat first, or name its --home.")
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


def _has_column(db: sqlite3.Connection, table: str, column: str) -> bool:
    return any(row["name"] == column for row in db.execute(f"PRAGMA table_info({table})"))
