"""Keeps the log in step with the chat, and the chat going when the log fails.

One thread writes, in order. Each turn is an Entry that knows how far it got into the store;
`advance` does whichever writes are due and may be called again after a failure. While the
store is locked, full or read-only the entries wait in memory, a notice says so, and writing
is tried again. Conversations are named by a handle: the stored id, or a negative number
until the store has given one.

Not here: what a turn is (chat/service), what a table is (record/store).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from localspec.backend import TurnStats
from localspec.core import Step
from localspec.errors import StoreError
from localspec.record.store import (
    Conversation,
    SessionInfo,
    Store,
    StoredMessage,
    Turn,
    TurnSettings,
)

RETRY_S = 2.0
COMMIT_WAIT_S = 8.0  # longer than the store's own wait for a lock, so that its answer is known

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ending:
    """How a reply ended: everything the store is told about it."""

    text: str
    token_ids: Sequence[int]
    provenance: Sequence[str]
    stats: TurnStats | None
    steps: Sequence[Step]
    finish_reason: str
    error: str | None


@dataclass
class Talk:
    """A conversation of this process. entries: its turns not yet wholly stored, oldest first."""

    handle: int
    title: str
    stored_id: int | None = None
    entries: list[Entry] = field(default_factory=list)


@dataclass
class Entry:
    """One turn on its way into the log.

    after: the turn before it, where that one is not stored yet; else parent_id is known.
    prompt_id: the person's stored message; given from the start for another reply to it.
    rephrases: the unstored turn whose message gets another reply.
    """

    talk: Talk
    text: str
    parent_id: int | None = None
    after: Entry | None = None
    prompt_id: int | None = None
    rephrases: Entry | None = None
    settings: TurnSettings | None = None
    turn: Turn | None = None
    reply_text: str = ""
    ending: Ending | None = None
    is_stored: bool = False

    def advance(self, store: Store, session_id: Callable[[], int]) -> None:
        """Write what is due and not yet written. Raises StoreError; may be called again.

        A message that follows a reply is due once that reply has its place in the tree: hung
        on anything earlier, the reply would drop out of the branch.
        """
        if self.after is not None and self.after.turn is None:
            return
        if self.talk.stored_id is None:
            self.talk.stored_id = store.create_conversation(self.talk.title)
        if self.prompt_id is None:
            self.prompt_id = self._store_prompt(store, self.talk.stored_id)
        if self.settings is not None and self.turn is None:
            self.turn = store.begin_turn(
                session_id(), self.talk.stored_id, self.prompt_id, self.settings
            )
        if self.ending is not None and self.turn is not None:
            end = self.ending
            store.finish_turn(
                self.turn,
                text=end.text,
                token_ids=end.token_ids,
                provenance=end.provenance,
                stats=end.stats,
                steps=end.steps,
                finish_reason=end.finish_reason,
                error=end.error,
            )
            self.is_stored = True

    def _store_prompt(self, store: Store, conversation_id: int) -> int:
        if self.rephrases is not None:
            assert self.rephrases.prompt_id is not None, "entries are written in order"
            return self.rephrases.prompt_id
        return store.add_user_message(conversation_id, self.base_id, self.text)

    @property
    def base_id(self) -> int | None:
        """The stored message that the person's message follows, None for the first."""
        if self.rephrases is not None:
            return self.rephrases.base_id
        return self.parent_id if self.after is None else self.after.tip_id

    @property
    def tip_id(self) -> int | None:
        """The newest stored message of this turn."""
        return self.prompt_id if self.turn is None else self.turn.message_id


class Journal:
    """The writer. All methods may be called from any thread; none waits for a slow disk but
    `add`, which waits until the person's message is committed or cannot be."""

    def __init__(self, store: Store, session_info: Callable[[], SessionInfo]) -> None:
        self._store = store
        self._session_info = session_info
        self._session_id: int | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._lock = threading.Lock()
        self._talks: dict[int, Talk] = {}
        self._backlog: list[Entry] = []
        self._checkpoint: Future[None] | None = None
        self._retry: threading.Timer | None = None
        self._failure: str | None = None
        self._is_closed = False

    # what the person should know

    @property
    def notice(self) -> str | None:
        """What is not recorded at this moment, and why; None when all is well."""
        if self._failure is None:
            return None
        waiting = len([entry for entry in self._backlog if not entry.is_stored])
        return (
            f"The chat goes on, but {waiting} turn(s) are not recorded yet: {self._failure} "
            "localspec keeps trying; they are lost only if it is closed before that succeeds."
        )

    @property
    def session_id(self) -> int | None:
        """The session in the log, None until the first turn began."""
        return self._session_id

    # reading

    def talk(self, handle: int) -> Talk:
        """The conversation of a handle; a positive one is a stored conversation's id."""
        with self._lock:
            for talk in self._talks.values():
                if handle in (talk.handle, talk.stored_id):
                    return talk
            assert handle > 0, "a negative handle is given out by new_talk only"
            self._talks[handle] = Talk(handle, "", stored_id=handle)
            return self._talks[handle]

    def new_talk(self, title: str) -> Talk:
        """A conversation that is stored with its first message."""
        with self._lock:
            handle = min(self._talks, default=0)
            talk = Talk(min(handle, 0) - 1, title)
            self._talks[talk.handle] = talk
            return talk

    def conversations(self) -> list[Conversation]:
        """Every stored conversation, as the store orders them."""
        return self._store.conversations()

    def unstored_talks(self) -> list[Talk]:
        with self._lock:
            return [talk for talk in self._talks.values() if talk.stored_id is None]

    def stored_branch(self, talk: Talk) -> list[StoredMessage]:
        """The stored messages before the first unstored turn of a conversation, root first."""
        entries = list(talk.entries)
        tip = entries[0].base_id if entries else self._stored_tip(talk)
        return self._store.branch(tip) if tip is not None else []

    def _stored_tip(self, talk: Talk) -> int | None:
        for conversation in self._store.conversations():
            if conversation.id == talk.stored_id:
                return conversation.tip_message_id
        return None

    def turn_rows(self, handle: int | None, session_id: int | None) -> list[dict[str, Any]]:
        """Flat rows of turns, oldest first."""
        conversation_id = self.talk(handle).stored_id if handle is not None else None
        return self._store.turn_rows(session_id=session_id, conversation_id=conversation_id)

    def rounds(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rounds of these turns, oldest first."""
        return [step for row in rows for step in self._store.step_rows(row["turn_id"])]

    # writing

    def add(self, entry: Entry) -> None:
        """Take a new turn and commit the person's message before returning, if that is possible."""
        with self._lock:
            entry.talk.entries.append(entry)
            self._backlog.append(entry)
        try:
            self._writer.submit(self._pump).result(COMMIT_WAIT_S)
        except FutureTimeout:
            self._failure = "the disk does not answer."

    def update(self, entry: Entry) -> None:
        """Write what changed on an entry (its settings or its ending), soon."""
        self._submit(self._pump)

    def checkpoint(self, entry: Entry, text: str) -> None:
        """Keep the growing reply; skipped while an earlier checkpoint is still under way."""
        if self._checkpoint is None or self._checkpoint.done():
            self._checkpoint = self._submit(lambda: self._write_checkpoint(entry, text))

    def save_state(self, key: str, state: dict[str, Any]) -> None:
        """Keep the controller's state, soon; a failure costs nothing but a colder next start."""

        def save() -> None:
            self._guard(lambda: self._store.save_state(key, state))

        self._submit(save)

    def flush(self, wait_s: float = COMMIT_WAIT_S) -> bool:
        """Wait until everything due was tried; True if nothing is left unwritten by a failure."""
        try:
            self._writer.submit(self._pump).result(wait_s)
        except FutureTimeout:
            return False
        return self._failure is None

    def close(self) -> None:
        """Write what is left and stop. The store itself stays open; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._writer.submit(self._pump)
        self._writer.shutdown(wait=True)

    # the writer thread

    def _submit(self, work: Callable[[], None]) -> Future[None] | None:
        try:
            return self._writer.submit(work)
        except RuntimeError:  # the writer was shut down: the program is ending
            log.warning("a late write was dropped at the end of the program")
            return None

    def _pump(self) -> None:
        """Advance every waiting turn in order, stop at the first that cannot be written."""
        for entry in list(self._backlog):
            if not self._guard(partial(entry.advance, self._store, self._session)):
                self._retry_later()
                return
            if entry.is_stored:
                with self._lock:
                    self._backlog.remove(entry)
                    entry.talk.entries.remove(entry)
        self._failure = None

    def _guard(self, write: Callable[[], None]) -> bool:
        """True if the write succeeded. A failure becomes the notice; a bug is also logged."""
        try:
            write()
        except StoreError as error:
            self._failure = str(error)
            return False
        except Exception as error:  # the edge of the writer thread: the chat must go on
            log.exception("writing to the log failed")
            self._failure = f"an unexpected fault ({type(error).__name__}) in the log."
            return False
        return True

    def _write_checkpoint(self, entry: Entry, text: str) -> None:
        turn = entry.turn
        if turn is not None and self._failure is None:
            self._guard(lambda: self._store.checkpoint_reply(turn.message_id, text))

    def _session(self) -> int:
        if self._session_id is None:
            self._session_id = self._store.start_session(self._session_info())
        return self._session_id

    def _retry_later(self) -> None:
        if self._is_closed:
            return
        if self._retry is not None:
            self._retry.cancel()
        self._retry = threading.Timer(RETRY_S, lambda: self._submit(self._pump))
        self._retry.daemon = True
        self._retry.start()


def entries_of(talk: Talk) -> Iterator[Entry]:
    """The unstored turns in the order they are shown; another reply replaces the earlier one."""
    shown: list[Entry] = []
    for entry in list(talk.entries):
        if entry.rephrases is not None and entry.rephrases in shown:
            shown[shown.index(entry.rephrases)] = entry
        else:
            shown.append(entry)
    return iter(shown)
