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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from localspec.backend import Role, TurnStats
from localspec.core import Step
from localspec.record import queries
from localspec.record.connection import SharedConnection
from localspec.record.copies import copy_log
from localspec.record.history import History, HistoryRow
from localspec.record.imports import EXPORT_VERSION, ImportedConversation, ImportedMessage
from localspec.record.opening import BUSY_TIMEOUT_MS, Opened, open_log
from localspec.record.presets import Preset, Presets
from localspec.record.rows import (
    Begun,
    Conversation,
    SessionInfo,
    StoredMessage,
    Turn,
    TurnSettings,
    clean,
    conversation_from,
    message_from,
    now,
    text_columns,
    turn_from,
)
from localspec.record.withheld import UNTITLED, Withheld
from localspec.record.writes import Ended, add_message, add_turn, check_belongs, end_turn

__all__ = [
    "EXPORT_VERSION",
    "Begun",
    "Conversation",
    "HistoryRow",
    "ImportedConversation",
    "ImportedMessage",
    "Preset",
    "SessionInfo",
    "Store",
    "StoredMessage",
    "Turn",
    "TurnSettings",
]

# A checkpoint must not hold up the reply it saves: the next one, or the end, carries its text.
CHECKPOINT_WAIT_MS = 100
PRIVACY_KEY = "privacy"


class Store:
    """The log, open. Made by `Store.open`. path: None when it lives in memory. history: the list
    of conversations. presets: named settings."""

    def __init__(self, opened: Opened) -> None:
        self.path = opened.path
        self._db = SharedConnection(opened.writer.conn, opened.reader.conn, opened.path)
        self._notices = list(opened.notices)
        self._withheld = Withheld()
        self.history = History(self._db, self._withheld, opened.is_indexed)
        self.presets = Presets(self._db)
        self.logs_text = (self.load_state(PRIVACY_KEY) or {}).get("logs_text") is not False

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

    @property
    def logs_text(self) -> bool:
        """False: from now on no text is written; this session has it in memory until its end.
        Numbers are written as ever."""
        return not self._withheld.is_on

    @logs_text.setter
    def logs_text(self, is_wanted: bool) -> None:
        self._withheld.is_on = not is_wanted

    def keep_text(self, is_wanted: bool) -> None:
        """Set `logs_text`, also for every later `open`."""
        self.logs_text = is_wanted
        self.save_state(PRIVACY_KEY, {"logs_text": is_wanted})

    def close(self) -> None:
        self._db.close()

    def snapshot(self) -> AbstractContextManager[None]:
        """Reads of this thread inside this `with` see one moment of the log."""
        return self._db.snapshot()

    # Sessions

    def start_session(self, info: SessionInfo) -> int:
        with self._db.writing() as tables:
            return tables.insert("session", {"started_at_utc": now(), **asdict(info)})

    def session_rows(self) -> list[dict[str, Any]]:
        """Every start of the program, oldest first."""
        with self._db.reading() as tables:
            return tables.rows("SELECT * FROM session ORDER BY id")

    # Conversations

    def create_conversation(self, title: str) -> int:
        written = title if self.logs_text else UNTITLED
        with self._db.writing() as tables:
            made = tables.insert("conversation", {"title": written, "created_at_utc": now()})
        if written is not title:
            self._withheld.titles[made] = title
        return made

    def conversations(self) -> list[Conversation]:
        """All that are not deleted, oldest first."""
        sql = "SELECT * FROM conversation WHERE deleted_at_utc IS NULL ORDER BY id"
        with self._db.reading() as tables:
            return [self._withheld.named(conversation_from(row)) for row in tables.rows(sql)]

    def conversation(self, conversation_id: int) -> Conversation | None:
        """One of them, also a deleted one; None for an unknown id."""
        with self._db.reading() as tables:
            rows = tables.rows("SELECT * FROM conversation WHERE id = ?", conversation_id)
        return self._withheld.named(conversation_from(rows[0])) if rows else None

    def set_tip(self, conversation_id: int, message_id: int) -> None:
        """Remember which branch the person looks at."""
        with self._db.writing() as tables:
            check_belongs(tables, message_id, conversation_id)
            tables.update("conversation", conversation_id, {"tip_message_id": message_id})

    # The tree of messages

    def add_user_message(self, conversation_id: int, parent_id: int | None, text: str) -> int:
        """Commit the person's message and move the conversation's tip to it."""
        return self.add_message(conversation_id, parent_id, "user", text)

    def add_message(
        self, conversation_id: int, parent_id: int | None, role: Role, text: str
    ) -> int:
        """The same for a message of anybody, complete as it is."""
        columns = self._columns(text)
        with self._db.writing() as tables:
            made = add_message(tables, conversation_id, parent_id, role, columns, "complete")
        self._withheld.keep(made, text)
        return made

    def branch(self, tip_message_id: int) -> list[StoredMessage]:
        """The messages from the first to this one; none for an unknown id."""
        with self._db.reading() as tables:
            rows = tables.rows(queries.BRANCH, tip_message_id)
        return [self._withheld.filled(message_from(row)) for row in rows]

    def messages(self, conversation_id: int) -> list[StoredMessage]:
        """Every message of a conversation, all branches, oldest first."""
        sql = "SELECT * FROM message WHERE conversation_id = ? ORDER BY id"
        with self._db.reading() as tables:
            rows = tables.rows(sql, conversation_id)
        return [self._withheld.filled(message_from(row)) for row in rows]

    def sibling_groups(self, conversation_id: int) -> dict[int | None, tuple[int, ...]]:
        """The messages of a conversation by the one they follow, each group oldest first. A reply
        that another one continues is left out: it is the beginning of that one."""
        groups = dict[int | None, tuple[int, ...]]()
        with self._db.reading() as tables:
            for row in tables.rows(queries.SIBLING_GROUPS, conversation_id):
                groups[row["parent_id"]] = (*groups.get(row["parent_id"], ()), row["id"])
        return groups

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
        self,
        session_id: int,
        conversation_id: int,
        parent_id: int | None,
        settings: TurnSettings,
        begun: Begun | None = None,
    ) -> Turn:
        """Open a reply in state draft, and the turn that will fill it. begun: what it begins
        with, where it goes on with another one."""
        text = begun.text if begun is not None else ""
        prompt = settings.system_prompt
        written = settings if self.logs_text else replace(settings, system_prompt=None)
        columns = self._columns(text)
        with self._db.writing() as tables:
            place = conversation_id, parent_id
            message_id = add_message(tables, *place, "assistant", columns, "draft")
            turn = add_turn(tables, session_id, conversation_id, message_id, written, begun)
        self._withheld.keep(message_id, text)
        self._withheld.keep_prompt(conversation_id, prompt)
        return turn

    def checkpoint_reply(self, message_id: int, text: str) -> None:
        """Save the reply so far. Waits a tenth of a second at most for a locked log; a caller may
        go on after a StoreError, for the next checkpoint or the end carries the same text."""
        self._withheld.keep(message_id, text)
        if self.logs_text:
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
        drafted: bytes | None = None,
    ) -> None:
        """Record the end of a turn, whatever it was. Calling it again replaces what it wrote."""
        ended = Ended(token_ids, provenance, drafted, finish_reason, error)
        if not self.logs_text:  # ids and guesses spell the text
            ended = replace(ended, token_ids=None, drafted=None)
        columns = self._columns(text)
        with self._db.writing() as tables:
            end_turn(tables, turn, columns, ended, stats, steps)
        self._withheld.keep(turn.message_id, text)
        self._withheld.keep_tokens(turn.message_id, token_ids, provenance, drafted)

    def turn_rows(
        self, session_id: int | None = None, conversation_id: int | None = None
    ) -> list[dict[str, Any]]:
        """One flat row for each turn, oldest first: ids, state, settings and all named numbers.
        Without tokens (`reply_tokens`), texts (`messages`) and steps (`step_rows`)."""
        scope = {"session_id": session_id, "conversation_id": conversation_id}
        with self._db.reading() as tables:
            return [turn_from(row) for row in tables.named_rows(queries.TURNS, scope)]

    def reply_tokens(self, message_id: int) -> tuple[list[int], list[str]] | None:
        """Output ids and their provenance of a finished reply, of one that goes on with another
        those of the new part; None where there are none."""
        if message_id in self._withheld.tokens:
            return self._withheld.tokens[message_id]
        sql = "SELECT token_ids, provenance FROM turn WHERE message_id = ?"
        with self._db.reading() as tables:
            rows = tables.rows(sql, message_id)
        if not rows or rows[0]["token_ids"] is None:
            return None
        return json.loads(rows[0]["token_ids"]), json.loads(rows[0]["provenance"])

    def turn_of(self, message_id: int) -> dict[str, Any] | None:
        """The row that `turn_rows` would give of this reply's turn."""
        with self._db.reading() as tables:
            rows = tables.rows(queries.TURN_OF, message_id)
        return turn_from(rows[0]) if rows else None

    def drafted(self, message_id: int) -> bytes | None:
        """What its rounds proposed, packed (record.drafted); None where nothing was kept."""
        if message_id in self._withheld.drafted:
            return self._withheld.drafted[message_id]
        with self._db.reading() as tables:
            rows = tables.rows("SELECT drafted FROM turn WHERE message_id = ?", message_id)
        return rows[0]["drafted"] if rows else None

    def continued(self, message_id: int) -> list[int]:
        """The replies whose text this one begins with, oldest first, and itself."""
        with self._db.reading() as tables:
            return [row["message_id"] for row in tables.rows(queries.CONTINUED, message_id)]

    def step_rows(self, turn_id: int) -> list[dict[str, Any]]:
        """The rounds of one turn in order."""
        with self._db.reading() as tables:
            return tables.rows("SELECT * FROM step WHERE turn_id = ? ORDER BY n", turn_id)

    # Controller state and costs

    def save_state(self, key: str, state: Mapping[str, Any]) -> None:
        """Keep plain JSON data (finite numbers) under `key`, replacing what was there."""
        text = json.dumps(state, allow_nan=False)
        with self._db.writing() as tables:
            tables.execute(queries.SAVE_STATE, clean(key), text, now())

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
        copy_log(self._db, path, session_id, conversation_id)

    def _columns(self, text: str) -> dict[str, object]:
        """What the file gets of a text."""
        written = text if self.logs_text else ""
        return {**text_columns(written), "is_logged": int(self.logs_text)}
