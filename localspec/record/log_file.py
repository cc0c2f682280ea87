"""Reads a log file without opening a Store: replies for training, learnt states.

Contract: the file is opened read-only, so a log in use is not touched, and none is made where there
is none. Replies come oldest first. Raises StoreError.

Not here: what is made of them (training), everything else of the log (store).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.core.backend import Message
from localspec.core.config import settings_for
from localspec.core.errors import StoreError
from localspec.record.connection import connect, diagnose, read_only
from localspec.record.rows import state_from, text_of
from localspec.record.schema import OlderLog, check_version
from localspec.record.store import STATE_KEY

log = logging.getLogger(__name__)

FINISHED = ("complete", "stopped")

MESSAGES = "SELECT id, conversation_id, parent_id, role, text, text_exact, state FROM message"
DELETED = "SELECT id FROM conversation WHERE deleted_at_utc IS NOT NULL"
DELETED_REPLIES = "SELECT id FROM message WHERE deleted_at_utc IS NOT NULL"
CONTINUED = "SELECT continues_message_id FROM turn WHERE continues_message_id IS NOT NULL"
SYSTEM_PROMPTS = "SELECT message_id, system_prompt FROM turn"


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


# replies


def read_replies(database: Path) -> list[LoggedReply]:
    """Every finished reply that has a text and answers a message that has one. Deleted
    ones, and replies that another one continues, are left out."""
    with reading(database) as db:
        deleted, left_out = _left_out(db)
        rows = {row["id"]: dict(row) for row in db.execute(MESSAGES)}
        systems = {row["message_id"]: row["system_prompt"] for row in db.execute(SYSTEM_PROMPTS)}
    found = []
    for row in rows.values():
        if row["role"] != "assistant" or row["state"] not in FINISHED or not row["text"].strip():
            continue
        if row["id"] in left_out or row["conversation_id"] in deleted:
            continue
        before = _branch(rows, row["parent_id"])
        if before and before[-1].role == "user" and before[-1].content.strip():
            system = systems.get(row["id"])
            opening = (Message("system", system),) if system else ()
            found.append(LoggedReply(row["conversation_id"], (*opening, *before), text_of(row)))
    return found


def _left_out(db: sqlite3.Connection) -> tuple[set[int], set[int]]:
    """Ids of deleted conversations, and of deleted and continued replies."""
    replies = {row[0] for row in db.execute(CONTINUED)}
    replies |= {row[0] for row in db.execute(DELETED_REPLIES)}
    return {row[0] for row in db.execute(DELETED)}, replies


def _branch(rows: dict[int, dict[str, Any]], message_id: int | None) -> tuple[Message, ...]:
    branch = list[Message]()
    while message_id is not None:
        row = rows[message_id]
        branch.append(Message(row["role"], text_of(row)))
        message_id = row["parent_id"]
    return tuple(reversed(branch))


# the file


@contextmanager
def reading(database: Path) -> Iterator[sqlite3.Connection]:
    if not database.is_file():
        raise StoreError(f"There is no log at {database}. Chat first, or name its --home.")
    try:
        with closing(connect(read_only(database.absolute()))) as db:
            check_version(db)
            db.conn.row_factory = sqlite3.Row
            yield db.conn
    except OlderLog as version:
        raise StoreError(
            f"{database} was written by a localspec from before November 2026 (it has {version}). "
            "Run `python -m localspec upgrade` once."
        ) from version
    except sqlite3.Error as error:
        if "no such" in str(error):
            raise StoreError(
                f"{database} holds no log of turns and steps ({error}). Give the file that the "
                "chat writes its turns to."
            ) from error
        fault = diagnose(error)
        raise StoreError(f"The log cannot be read: {fault.fact}. {fault.remedy}") from error
