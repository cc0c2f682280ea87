"""The log: sessions, conversations, the tree of messages, turns and their steps.

Contract: every method may be called from any thread. A method that writes is one transaction: it
happened whole or, with a StoreError, not at all, and may then be called again with the same
arguments. A log locked by another program is waited for (5 seconds).

Life of a turn: 1 `add_user_message` commits the person's text; 2 `begin_turn` opens an empty
assistant message in state draft; 3 `checkpoint_reply` saves the growing text; 4 `finish_turn`
writes text, tokens, statistics and steps, whatever the ending. A crash between 2 and 4 leaves a
draft, which the next `open` marks interrupted.

Not here: files that cannot be opened (opening), tables (schema), nouns and their rows (rows),
transactions (connection), formats (export).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localspec.backend import Role, TurnStats
from localspec.core import Step
from localspec.record import queries
from localspec.record.connection import SharedConnection, Tables, missing
from localspec.record.opening import BUSY_TIMEOUT_MS, Opened, connect, create_private, open_log
from localspec.record.rows import (
    STATE_AFTER,
    Conversation,
    MessageState,
    SessionInfo,
    StoredMessage,
    Turn,
    TurnSettings,
    clean,
    message_from,
    stats_row,
    step_row,
    text_columns,
    turn_from,
)

__all__ = ["Conversation", "SessionInfo", "Store", "StoredMessage", "Turn", "TurnSettings"]

# A checkpoint must not hold up the reply it saves: the next one, or the end, carries its text.
CHECKPOINT_WAIT_MS = 100


class Store:
    """The log, open. Made by `Store.open`. path: None when it lives in memory."""

    def __init__(self, opened: Opened) -> None:
        self.path = opened.path
        self._db = SharedConnection(opened.writer.conn, opened.reader.conn, opened.path)
        self._notices = list(opened.notices)

    @classmethod
    def open(cls, path: Path, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> Store:
        """The log at `path`; see opening for what happens to a file that cannot be used."""
        return cls(open_log(path, busy_timeout_ms))

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the person about what could not be read or kept."""
        return tuple(self._notices)

    @property
    def is_persistent(self) -> bool:
        return self.path is not None

    def close(self) -> None:
        self._db.close()

    def snapshot(self) -> AbstractContextManager[None]:
        """Reads of this thread inside this `with` see one moment of the log."""
        return self._db.snapshot()

    # Sessions

    def start_session(self, info: SessionInfo) -> int:
        with self._db.writing() as tables:
            return tables.insert("session", {"started_at_utc": _now(), **asdict(info)})

    def session_rows(self) -> list[dict[str, Any]]:
        """Every start of the program, oldest first."""
        with self._db.reading() as tables:
            return tables.rows("SELECT * FROM session ORDER BY id")

    # Conversations

    def create_conversation(self, title: str) -> int:
        with self._db.writing() as tables:
            return tables.insert("conversation", {"title": title, "created_at_utc": _now()})

    def rename_conversation(self, conversation_id: int, title: str) -> None:
        with self._db.writing() as tables:
            tables.update("conversation", conversation_id, {"title": title})

    def conversations(self) -> list[Conversation]:
        """All of them, oldest first."""
        with self._db.reading() as tables:
            rows = tables.rows("SELECT * FROM conversation ORDER BY id")
        return [Conversation(**row) for row in rows]

    def set_tip(self, conversation_id: int, message_id: int) -> None:
        """Remember which branch the person looks at."""
        with self._db.writing() as tables:
            _check_belongs(tables, message_id, conversation_id)
            tables.update("conversation", conversation_id, {"tip_message_id": message_id})

    # The tree of messages

    def add_user_message(self, conversation_id: int, parent_id: int | None, text: str) -> int:
        """Commit the person's message and move the conversation's tip to it."""
        with self._db.writing() as tables:
            return _add_message(tables, conversation_id, parent_id, "user", text, "complete")

    def branch(self, tip_message_id: int) -> list[StoredMessage]:
        """The messages from the first to this one; none for an unknown id."""
        with self._db.reading() as tables:
            return [message_from(row) for row in tables.rows(queries.BRANCH, tip_message_id)]

    def messages(self, conversation_id: int) -> list[StoredMessage]:
        """Every message of a conversation, all branches, oldest first."""
        sql = "SELECT * FROM message WHERE conversation_id = ? ORDER BY id"
        with self._db.reading() as tables:
            return [message_from(row) for row in tables.rows(sql, conversation_id)]

    def siblings(self, message_id: int) -> list[int]:
        """Ids of the messages with the same parent, this one included, oldest first."""
        with self._db.reading() as tables:
            return [row["id"] for row in tables.rows(queries.SIBLINGS, message_id)]

    def newest_leaf(self, message_id: int) -> int:
        """The end of the newest branch that passes through this message; itself if it is one."""
        with self._db.reading() as tables:
            return int(tables.rows(queries.NEWEST_LEAF, message_id)[0]["id"])

    # Turns

    def begin_turn(
        self, session_id: int, conversation_id: int, parent_id: int | None, settings: TurnSettings
    ) -> Turn:
        """Open an empty reply in state draft, and the turn that will fill it."""
        with self._db.writing() as tables:
            message_id = _add_message(tables, conversation_id, parent_id, "assistant", "", "draft")
            links = {
                "session_id": session_id,
                "conversation_id": conversation_id,
                "message_id": message_id,
                "started_at_utc": _now(),
            }
            return Turn(tables.insert("turn", {**links, **asdict(settings)}), message_id)

    def checkpoint_reply(self, message_id: int, text: str) -> None:
        """Save the reply so far. Waits a tenth of a second at most for a locked log; a caller may
        go on after a StoreError, for the next checkpoint or the end carries the same text."""
        with self._db.writing(CHECKPOINT_WAIT_MS) as tables:
            tables.execute(queries.CHECKPOINT, *text_columns(text).values(), message_id)

    def finish_turn(
        self,
        turn: Turn,
        *,
        text: str,
        token_ids: Sequence[int],
        provenance: Sequence[str],
        stats: TurnStats | None,
        steps: Sequence[Step],
        finish_reason: str,
        error: str | None,
    ) -> None:
        """Record the end of a turn, whatever it was. Calling it again replaces what it wrote."""
        ending = {
            "finished_at_utc": _now(),
            "finish_reason": finish_reason,
            "error": error,
            "token_ids": json.dumps([int(token) for token in token_ids]),
            "provenance": json.dumps(list(provenance)),
        }
        reply = {**text_columns(text), "state": STATE_AFTER.get(finish_reason, "complete")}
        with self._db.writing() as tables:
            tables.update("message", turn.message_id, reply)
            tables.update("turn", turn.turn_id, {**ending, **stats_row(stats)})
            tables.execute("DELETE FROM step WHERE turn_id = ?", turn.turn_id)
            for n, step in enumerate(steps):
                tables.insert("step", step_row(turn.turn_id, n, step))

    def turn_rows(
        self, session_id: int | None = None, conversation_id: int | None = None
    ) -> list[dict[str, Any]]:
        """One flat row for each turn, oldest first: ids, state, settings and all named numbers.
        Without tokens (`reply_tokens`), texts (`messages`) and steps (`step_rows`)."""
        scope = {"session_id": session_id, "conversation_id": conversation_id}
        with self._db.reading() as tables:
            return [turn_from(row) for row in tables.named_rows(queries.TURNS, scope)]

    def reply_tokens(self, message_id: int) -> tuple[list[int], list[str]] | None:
        """Output ids and their provenance of a finished reply; None where there are none."""
        sql = "SELECT token_ids, provenance FROM turn WHERE message_id = ?"
        with self._db.reading() as tables:
            rows = tables.rows(sql, message_id)
        if not rows or rows[0]["token_ids"] is None:
            return None
        return json.loads(rows[0]["token_ids"]), json.loads(rows[0]["provenance"])

    def step_rows(self, turn_id: int) -> list[dict[str, Any]]:
        """The rounds of one turn in order."""
        with self._db.reading() as tables:
            return tables.rows("SELECT * FROM step WHERE turn_id = ? ORDER BY n", turn_id)

    # Controller state and costs

    def save_state(self, key: str, state: Mapping[str, Any]) -> None:
        """Keep plain JSON data (finite numbers) under `key`, replacing what was there."""
        text = json.dumps(state, allow_nan=False)
        with self._db.writing() as tables:
            tables.execute(queries.SAVE_STATE, clean(key), text, _now())

    def load_state(self, key: str) -> dict[str, Any] | None:
        """What was kept under `key`; None, with a notice, if it can no longer be read."""
        with self._db.reading() as tables:
            rows = tables.rows("SELECT state FROM calibration WHERE key = ?", clean(key))
        if not rows:
            return None
        try:
            state = json.loads(rows[0]["state"])
        except json.JSONDecodeError:
            state = None
        if isinstance(state, dict):
            return state
        self._notices.append(
            f"What the log kept about {key} could not be read; it will be measured again."
        )
        return None

    # Copies

    def backup(
        self, path: Path, session_id: int | None = None, conversation_id: int | None = None
    ) -> None:
        """Write a consistent copy, one private file, to `path` (absent or empty): of everything,
        or only of the turns of a session or a conversation with the conversations they are in.
        Raises StoreError; OSError if the file cannot be made."""
        with self._db.reading() as tables:
            create_private(path)
            tables.execute("VACUUM INTO ?", str(path))
        if session_id is not None or conversation_id is not None:
            with self._db.explained():
                _keep_only(path, session_id, conversation_id)
        with path.open("rb+") as copy:
            os.fsync(copy.fileno())  # VACUUM INTO does not


def _add_message(
    tables: Tables,
    conversation_id: int,
    parent_id: int | None,
    role: Role,
    text: str,
    state: MessageState,
) -> int:
    if parent_id is not None:
        _check_belongs(tables, parent_id, conversation_id)
    row = {
        "conversation_id": conversation_id,
        "parent_id": parent_id,
        "role": role,
        **text_columns(text),
        "state": state,
        "created_at_utc": _now(),
    }
    message_id = tables.insert("message", row)
    tables.update("conversation", conversation_id, {"tip_message_id": message_id})
    return message_id


def _check_belongs(tables: Tables, message_id: int, conversation_id: int) -> None:
    rows = tables.rows("SELECT conversation_id FROM message WHERE id = ?", message_id)
    if not rows or rows[0]["conversation_id"] != conversation_id:
        raise missing("message", message_id)


def _keep_only(path: Path, session_id: int | None, conversation_id: int | None) -> None:
    """Delete what lies outside the scope from a copy, and its pages with it."""
    conn = connect(str(path)).conn
    try:
        conn.execute("BEGIN IMMEDIATE")
        scope = {"session_id": session_id, "conversation_id": conversation_id}
        for statement in queries.KEEP_ONLY:
            conn.execute(statement, scope)
        conn.execute("COMMIT")
        conn.execute("VACUUM")
    finally:
        conn.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
