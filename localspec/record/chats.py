"""The replies of a log with the conversations before them, read for a personal draft.

Contract: one `LoggedReply` for each finished assistant message, oldest first, with every message
of its branch before it. The file is opened read-only, nothing is written or sent anywhere. Raises
StoreError.

Not here: what is learnt from them (training), rounds and costs (steps).
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from localspec.backend import Message
from localspec.record.steps import reading

FINISHED = ("complete", "stopped")

MESSAGES = "SELECT id, conversation_id, parent_id, role, text, text_exact, state FROM message"
COLUMNS = "PRAGMA table_info(conversation)"
DELETED = "SELECT id FROM conversation WHERE deleted_at_utc IS NOT NULL"
BEGUN = "SELECT continues_message_id FROM turn WHERE continues_message_id IS NOT NULL"
SYSTEM_PROMPTS = "SELECT message_id, system_prompt FROM turn"


@dataclass(frozen=True)
class LoggedReply:
    """before: the branch up to the question, system prompt first; it ends with the person."""

    conversation_id: int
    before: tuple[Message, ...]
    text: str


def read_replies(database: Path) -> list[LoggedReply]:
    """Every finished reply that says something and answers somebody."""
    with reading(database) as db:
        deleted, begun = _left_out(db)
        rows = {row["id"]: row for row in db.execute(MESSAGES)}
        systems = {row["message_id"]: row["system_prompt"] for row in db.execute(SYSTEM_PROMPTS)}
    found = []
    for row in rows.values():
        if row["role"] != "assistant" or row["state"] not in FINISHED or not row["text"].strip():
            continue
        if row["id"] in begun or row["conversation_id"] in deleted:
            continue
        before = _branch(rows, row["parent_id"])
        if before and before[-1].role == "user" and before[-1].content.strip():
            system = systems.get(row["id"])
            opening = (Message("system", system),) if system else ()
            found.append(LoggedReply(row["conversation_id"], (*opening, *before), _text(row)))
    return found


def _left_out(db: sqlite3.Connection) -> tuple[set[int], set[int]]:
    """Conversations that were deleted, and replies that are the beginning of another one; a log
    from before these could be has neither."""
    if not any(row["name"] == "deleted_at_utc" for row in db.execute(COLUMNS)):
        return set(), set()
    return {row[0] for row in db.execute(DELETED)}, {row[0] for row in db.execute(BEGUN)}


def _branch(rows: dict[int, sqlite3.Row], message_id: int | None) -> tuple[Message, ...]:
    branch = list[Message]()
    while message_id is not None:
        row = rows[message_id]
        branch.append(Message(row["role"], _text(row)))
        message_id = row["parent_id"]
    return tuple(reversed(branch))


def _text(row: sqlite3.Row) -> str:
    return str(row["text"] if row["text_exact"] is None else json.loads(row["text_exact"]))
