"""The log: sessions, conversations, the tree of messages, turns and their steps.

Contract: every method may be called from any thread. A method that writes is one transaction: it
happened whole or, with a StoreError, not at all, and may then be called again with the same
arguments. A log locked by another program is waited for (5 seconds).

Life of a turn: 1 `add_message` commits the person's text; 2 `begin_turn` inserts an empty
assistant message in state draft; 3 `checkpoint_reply` saves the growing text; 4 `finish_turn`
writes text, tokens, statistics and steps, however it ended. A crash between 2 and 4 leaves a
draft, which the next `tidy` marks interrupted.

Not here: files that cannot be opened (opening), tables (schema), conversion to rows (rows),
transactions (connection), the list of conversations (conversations), formats (export).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from localspec.core.backend import Role
from localspec.core.errors import StoreError
from localspec.core.speculation import MIN_COMPARED_TOKENS
from localspec.record import queries
from localspec.record.api_keys import ApiKeys
from localspec.record.connection import BUSY_TIMEOUT_MS, SharedConnection, Tables
from localspec.record.conversations import ConversationList, Folders
from localspec.record.hindsight import HindsightTable
from localspec.record.kept_settings import KeptSettings
from localspec.record.message_tree import MessageTree, check_belongs
from localspec.record.opening import create_private, open_log
from localspec.record.rows import (
    LEFT_OUT_OF_TURNS,
    PAGE,
    STATE_AFTER,
    ContinuedReply,
    Conversation,
    MessageState,
    RecentGain,
    SessionInfo,
    StoredMessage,
    Turn,
    TurnEnd,
    TurnSettings,
    clean,
    conversation_from,
    json_column,
    message_from,
    now,
    state_from,
    stats_row,
    step_row,
    text_columns,
    turn_from,
)
from localspec.record.unlogged import UNTITLED, UnloggedTexts

__all__ = [
    "ContinuedReply",
    "SessionInfo",
    "StoredMessage",
    "Turn",
    "TurnEnd",
    "TurnSettings",
]

# A checkpoint must not hold up the reply it saves: the next one, or the end, has its text too.
CHECKPOINT_WAIT_MS = 100
STATE_KEY = "controller"  # what controllers learnt, by combination of models and machine
PRIVACY_KEY = "privacy"


class Store:
    """The log, open. Made by `Store.open`. path: None for a log in memory."""

    def __init__(self, db: SharedConnection) -> None:
        self.path = db.path
        self._db = db
        self._notices = list(db.notices)
        self._unlogged = UnloggedTexts()
        self.conversation_list = ConversationList(self._db, self._unlogged)
        self.message_tree = MessageTree(self._db, self._unlogged)
        self.folders = Folders(self._db)
        self.prompts = KeptSettings(self._db, "prompt")
        self.defaults = KeptSettings(self._db, "model")
        self.api_keys = ApiKeys(self._db)
        self.hindsight = HindsightTable(self._db)
        self.logs_text = self._is_text_wanted()

    @classmethod
    def open(cls, path: Path, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> Store:
        """See opening for what happens to a file that cannot be used."""
        return cls(open_log(path, busy_timeout_ms))

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for the person about what could not be read or kept."""
        return tuple(self._notices)

    @property
    def logs_text(self) -> bool:
        """False: from now on no text is written; this session has it in memory until its end.
        Numbers are always written."""
        return not self._unlogged.is_on

    @logs_text.setter
    def logs_text(self, is_wanted: bool) -> None:
        self._unlogged.is_on = not is_wanted

    def keep_text(self, is_wanted: bool) -> None:
        """Set `logs_text`, also for every later `open`."""
        self.logs_text = is_wanted
        self.save_state(PRIVACY_KEY, {"logs_text": is_wanted})

    def close(self) -> None:
        self._db.close()

    def tidy(self) -> None:
        """Mark the drafts that a crash left, and delete for good what was deleted. Only for the one
        program that has the sole use of the log."""
        self._db.execute(queries.INTERRUPT)
        self.conversation_list.purge()

    def snapshot(self) -> AbstractContextManager[None]:
        """Reads of this thread inside this `with` see one moment of the log; others do not wait."""
        return self._db.snapshot()

    # Sessions

    def start_session(self, info: SessionInfo) -> int:
        return self._db.insert("session", {"started_at_utc": now(), **asdict(info)})

    def session_rows(self) -> list[dict[str, Any]]:
        return self._db.rows("SELECT * FROM session ORDER BY id")

    # Conversations

    def create_conversation(self, title: str, source: str = PAGE) -> int:
        written = title if self.logs_text else UNTITLED
        row = {"title": written, "created_at_utc": now(), "title_by": "words", "source": source}
        made = self._db.insert("conversation", row)
        self._unlogged.keep_title(made, title)
        return made

    def conversations(self) -> list[Conversation]:
        """All that are not deleted, oldest first."""
        rows = self._db.rows(queries.CONVERSATIONS)
        return [self._unlogged.named(conversation_from(row)) for row in rows]

    def conversation(self, conversation_id: int) -> Conversation | None:
        """Also a deleted one; None for an unknown id."""
        rows = self._db.rows("SELECT * FROM conversation WHERE id = ?", conversation_id)
        return self._unlogged.named(conversation_from(rows[0])) if rows else None

    def has_all_texts(self, conversation_id: int) -> bool:
        """Return whether every text of a conversation is in the log."""
        sql = "SELECT 1 FROM message WHERE conversation_id = ? AND is_logged = 0 LIMIT 1"
        return not self._db.rows(sql, conversation_id)

    # The tree of messages

    def add_message(
        self,
        conversation_id: int,
        parent_id: int | None,
        role: Role,
        text: str,
        **more: str | int | None,
    ) -> int:
        """Commit a message and make it the conversation's tip; its id. more: further columns."""
        with self._db.writing() as tables:
            made = self._insert(tables, conversation_id, parent_id, role, text, "complete", more)
        self._unlogged.keep(made, text)
        return made

    def branch(self, tip_message_id: int | None) -> list[StoredMessage]:
        """The messages from the first to this one; none for None and for an unknown id."""
        rows = self._db.rows(queries.BRANCH, tip_message_id)
        return [self._unlogged.filled(message_from(row)) for row in rows]

    def messages(self, conversation_id: int) -> list[StoredMessage]:
        """Every message of a conversation, all branches, oldest first."""
        rows = self._db.rows(queries.MESSAGES, conversation_id)
        return [self._unlogged.filled(message_from(row)) for row in rows]

    # Turns

    def begin_turn(
        self,
        session_id: int,
        conversation_id: int,
        parent_id: int | None,
        settings: TurnSettings,
        continued: ContinuedReply | None = None,
        reply_id: int | None = None,
    ) -> Turn:
        """Insert a reply in state draft, unless it has its place (reply_id) already, and the turn
        that will fill it. continued: the reply that it begins with."""
        text, thinking = ("", "") if continued is None else (continued.text, continued.thinking)
        place, more = (conversation_id, parent_id), {"thinking": thinking}
        written = settings if self.logs_text else settings.without_texts()
        with self._db.writing() as tables:
            message_id = reply_id or self._insert(tables, *place, "assistant", text, "draft", more)
            tables.update("message", message_id, {"model": settings.model})
            row = {
                "session_id": session_id,
                "conversation_id": conversation_id,
                "message_id": message_id,
                "started_at_utc": now(),
                "continues_message_id": None if continued is None else continued.message_id,
                **asdict(written),
            }
            tables.update("conversation", conversation_id, {"system_prompt": written.system_prompt})
            turn = Turn(tables.insert("turn", row), message_id)
        self._unlogged.keep(message_id, text, thinking)
        self._unlogged.keep_prompt(conversation_id, settings.system_prompt)
        return turn

    def checkpoint_reply(self, message_id: int, text: str, thinking: str = "") -> None:
        """Save the reply so far. A caller may continue after a StoreError."""
        self._unlogged.keep(message_id, text, thinking)
        if self.logs_text:
            columns = (*text_columns(text).values(), clean(thinking) or None)
            with self._db.writing(CHECKPOINT_WAIT_MS) as tables:
                tables.execute(queries.CHECKPOINT, *columns, message_id)

    def finish_turn(self, turn: Turn, end: TurnEnd) -> None:
        """Record the end of a turn, whatever it was. Calling it again replaces what it wrote."""
        has_ids = self.logs_text and "token_ids" not in (end.stats.untold if end.stats else ())
        ids = json.dumps([int(token) for token in end.token_ids])
        row = {
            "finished_at_utc": now(),
            "finish_reason": end.finish_reason,
            "error": end.error,
            "token_ids": ids if has_ids else None,  # ids and drafts spell the text
            "provenance": json.dumps(list(end.provenance)),
            "drafted": end.drafted if self.logs_text else None,
            **stats_row(end.stats),
        }
        state = STATE_AFTER.get(end.finish_reason, "complete")
        with self._db.writing() as tables:
            row_of_reply = {**self._columns(end.text, end.thinking), "state": state}
            tables.update("message", turn.message_id, row_of_reply)
            tables.update("turn", turn.turn_id, row)
            tables.execute("DELETE FROM step WHERE turn_id = ?", turn.turn_id)
            for n, step in enumerate(end.steps):
                tables.insert("step", step_row(turn.turn_id, n, step))
        self._unlogged.keep_end(turn.message_id, end)

    def turn_rows(
        self,
        session_id: int | None = None,
        conversation_id: int | None = None,
        since: str | None = None,
    ) -> list[dict[str, Any]]:
        """One flat row a turn, oldest first: ids, state, settings, numbers; no tokens, no texts.
        since: a day or a time in UTC, as the log writes them."""
        return self._turns(queries.TURNS, session_id, conversation_id, since)

    def _turns(self, query: str, *values: object) -> list[dict[str, Any]]:
        with self._db.reading() as tables:
            sql = query.format(columns=tables.columns("turn", LEFT_OUT_OF_TURNS))
            rows = tables.rows(sql, *values)
        return [turn_from(row) for row in rows]

    def models(self) -> list[str]:
        return [row["model"] for row in self._db.rows(queries.MODELS)]

    def recent_gains(self) -> list[RecentGain]:
        """What drafting brought in the newest compared replies of each model."""
        return [
            RecentGain(**row) for row in self._db.rows(queries.RECENT_GAINS, MIN_COMPARED_TOKENS)
        ]

    def turn_of(self, message_id: int) -> dict[str, Any] | None:
        """The row that `turn_rows` has of this reply's turn."""
        return next(iter(self._turns(queries.TURN_OF, message_id)), None)

    def reply_tokens(self, message_id: int) -> tuple[list[int], list[str]] | None:
        """Output ids and provenance of a finished reply, without those of a reply that it
        continues; None where there are none."""
        end = self._unlogged.ends.get(message_id)
        if end is not None:
            return [int(token) for token in end.token_ids], list(end.provenance)
        rows = self._db.rows(queries.TOKENS, message_id)
        if not rows or rows[0]["token_ids"] is None:
            return None
        found = json_column(rows[0]["token_ids"]), json_column(rows[0]["provenance"])
        return None if None in found else found

    def drafted(self, message_id: int) -> bytes | None:
        """What its rounds proposed, packed (record.drafted); None where nothing was kept."""
        end = self._unlogged.ends.get(message_id)
        if end is not None:
            return end.drafted
        rows = self._db.rows("SELECT drafted FROM turn WHERE message_id = ?", message_id)
        return rows[0]["drafted"] if rows else None

    def step_rows(self, turn_id: int) -> list[dict[str, Any]]:
        """The rounds of one turn in order."""
        with self._db.reading() as tables:
            columns = tables.columns("step", ())
            sql = f"SELECT {columns} FROM step WHERE turn_id = ? ORDER BY n"
            return tables.rows(sql, turn_id)

    # Controller state and settings

    def save_state(self, key: str, state: Mapping[str, Any], num_others: int = 0) -> None:
        """Keep plain JSON data (finite numbers) under `key` in place of what was there, but for so
        many of its newest other entries: another program may have kept some meanwhile."""
        with self._db.writing() as tables:
            kept = (self.load_state(key) or {}).items() if num_others else ()
            others = [(name, one) for name, one in kept if name not in state]
            text = json.dumps({**dict(others[-num_others:]), **state}, allow_nan=False)
            tables.execute(queries.SAVE_STATE, clean(key), text, now())

    def load_state(self, key: str) -> dict[str, Any] | None:
        """What was kept under `key`; None where nothing was or, with a notice, where it can no
        longer be read."""
        try:
            return self._read_state(key)
        except (StoreError, ValueError):
            self._notify(f"What the log kept about {key} could not be read; it is measured again.")
            return None

    def _read_state(self, key: str) -> dict[str, Any] | None:
        """Raises StoreError, ValueError."""
        rows = self._db.rows("SELECT state FROM calibration WHERE key = ?", clean(key))
        return state_from(rows[0]["state"]) if rows else None

    def _is_text_wanted(self) -> bool:
        """The kept choice; False where it cannot be read: what is not written can be switched on,
        what is written cannot be taken back."""
        try:
            kept = self._read_state(PRIVACY_KEY)
            is_wanted = True if kept is None else kept.get("logs_text")
        except (StoreError, ValueError):
            is_wanted = None
        if not isinstance(is_wanted, bool):
            self._notify(
                "Whether texts are to be logged could not be read, so none are written. To write "
                "them again, start localspec once with --log-text."
            )
        return is_wanted is True

    def _notify(self, notice: str) -> None:
        if notice not in self._notices:
            self._notices.append(notice)

    # Copies

    def backup(self, path: Path) -> None:
        """Write a consistent copy, one private file, to `path` (absent or empty). Raises
        StoreError; OSError if the file cannot be made."""
        with self._db.apart() as tables:
            create_private(path)
            tables.execute("VACUUM INTO ?", path.absolute().as_uri())

    def _insert(
        self,
        tables: Tables,
        conversation_id: int,
        parent_id: int | None,
        role: Role,
        text: str,
        state: MessageState,
        more: Mapping[str, str | int | None],
    ) -> int:
        """Insert a message and make it the conversation's tip; its id."""
        if parent_id is not None:
            check_belongs(tables, parent_id, conversation_id)
        row = {
            "conversation_id": conversation_id,
            "parent_id": parent_id,
            "role": role,
            "state": state,
            "created_at_utc": now(),
            **more,
            **self._columns(text, more.get("thinking")),
        }
        message_id = tables.insert("message", row)
        tables.update("conversation", conversation_id, {"tip_message_id": message_id})
        return message_id

    def _columns(self, text: str, thinking: object = None) -> dict[str, object]:
        """The columns of a text and its thought, empty where it is not to be written."""
        said, thought = (text, thinking or None) if self.logs_text else ("", None)
        return {**text_columns(said), "thinking": thought, "is_logged": int(self.logs_text)}
