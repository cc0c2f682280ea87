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
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

from localspec.chat.entries import Ending, Entry, Talk, title_line
from localspec.errors import RequestError, StoreError
from localspec.record.store import HistoryRow, Preset, SessionInfo, Store, StoredMessage

__all__ = ["Ending", "Entry", "HistoryRow", "Journal", "Preset", "Talk"]

RETRY_S = 2.0
COMMIT_WAIT_S = 8.0  # longer than the store's own wait for a lock, so that its answer is known

log = logging.getLogger(__name__)


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
        turns, they = ("turn is", "it is") if waiting == 1 else ("turns are", "they are")
        return (
            f"The chat goes on, but {waiting} {turns} not recorded yet: {self._failure} "
            f"localspec keeps trying; {they} lost only if it is closed before that succeeds."
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

    def conversations(self, search: str = "") -> list[HistoryRow]:
        """The stored conversations, pinned ones first, then the newest; those with all words of
        `search` in a message or the title."""
        return self._store.history.rows(search)

    def system_prompt(self, handle: int) -> str:
        """That of the conversation's latest turn."""
        talk = self.talk(handle)
        if talk.tip is not None and talk.tip.settings is not None:
            return talk.tip.settings.system_prompt or ""
        found = self._store.conversation(talk.stored_id) if talk.stored_id is not None else None
        return (found.system_prompt or "") if found is not None else ""

    def unstored_talks(self) -> list[Talk]:
        with self._lock:
            talks = list(self._talks.values())
        return [talk for talk in talks if talk.stored_id is None and not talk.is_deleted]

    def stored_tip(self, talk: Talk) -> int | None:
        """The end of the stored branch in use."""
        found = self._store.conversation(talk.stored_id) if talk.stored_id is not None else None
        return None if found is None else found.tip_message_id

    def stored_path(self, message_id: int | None) -> list[StoredMessage]:
        """The stored messages from the first to this one."""
        return [] if message_id is None else self._store.branch(message_id)

    def sibling_groups(self, talk: Talk) -> dict[int | None, tuple[int, ...]]:
        """The stored messages of a conversation by the one they follow."""
        return {} if talk.stored_id is None else self._store.sibling_groups(talk.stored_id)

    def tokens_of(self, message_id: int) -> tuple[int, ...]:
        """Every id of a stored reply, those of the replies it goes on with first; none at all
        where some are not known."""
        tokens = list[int]()
        for part in self._store.continued(message_id):
            found = self._store.reply_tokens(part)
            if found is None:
                return ()
            tokens += found[0]
        return tuple(tokens)

    def num_from(self, message_id: int, sources: Collection[str]) -> int:
        """How many tokens of a stored reply came from these drafters; of one that goes on with
        another, of its new part."""
        found = self._store.reply_tokens(message_id)
        return 0 if found is None else sum(source in sources for source in found[1])

    def turn_rows(self, handle: int | None, session_id: int | None) -> list[dict[str, Any]]:
        """Flat rows of turns, oldest first."""
        conversation_id = self.talk(handle).stored_id if handle is not None else None
        return self._store.turn_rows(session_id=session_id, conversation_id=conversation_id)

    def rounds(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rounds of these turns, oldest first."""
        return [step for row in rows for step in self._store.step_rows(row["turn_id"])]

    # the list of conversations. Raises StoreError when the log cannot take the change; one that is
    # not stored yet gets it with its first message.

    def rename(self, handle: int, title: str) -> None:
        """Raises RequestError for an empty title."""
        title = title_line(title)
        if not any(sign.isprintable() and not sign.isspace() for sign in title):
            raise RequestError("A title needs a character that can be seen. The old one stays.")
        talk = self.talk(handle)
        talk.title = title
        self._apply(talk, lambda store, stored_id: store.history.rename(stored_id, title))

    def pin(self, handle: int, is_pinned: bool) -> None:
        self._apply(
            self.talk(handle), lambda store, stored_id: store.history.pin(stored_id, is_pinned)
        )

    def delete(self, handle: int) -> None:
        """Take it out of every list, until `restore` or, at the next start, for good."""
        talk = self.talk(handle)
        self._apply(talk, lambda store, stored_id: store.history.delete(stored_id))
        talk.is_deleted = True

    def restore(self, handle: int) -> None:
        """Undo `delete`. Raises StoreError where it is gone for good."""
        talk = self.talk(handle)
        self._apply(talk, lambda store, stored_id: store.history.restore(stored_id))
        talk.is_deleted = False

    def _apply(self, talk: Talk, act: Callable[[Store, int], None]) -> None:
        if talk.stored_id is None:
            talk.due.append(act)
        else:
            act(self._store, talk.stored_id)

    def show_tip(self, talk: Talk, message_id: int) -> None:
        """Make the newest leaf below this stored message the end of the branch in use."""
        assert talk.stored_id is not None, "a stored message is of a stored conversation"
        self._store.set_tip(talk.stored_id, self._store.newest_leaf(message_id))

    def write_reply(self, talk: Talk, parent_id: int | None, text: str) -> None:
        """Store a reply as the person rewrote it."""
        assert talk.stored_id is not None, "only a stored reply can be rewritten"
        self._store.add_message(talk.stored_id, parent_id, "assistant", text)

    def purge(self) -> None:
        """Take what was deleted off the disk, soon; a failure waits for the next start."""

        def purge() -> None:
            try:
                self._store.history.purge()
            except StoreError:
                log.warning("deleted conversations were not purged", exc_info=True)

        self._submit(purge)

    @property
    def logs_text(self) -> bool:
        """False: texts are not written to the disk; this session keeps them in memory."""
        return self._store.logs_text

    def keep_text(self, is_wanted: bool) -> None:
        """Switch the writing of texts on or off from now on, and for later starts. What was
        written stays. Raises StoreError where it cannot be remembered; it holds all the same."""
        self._store.keep_text(is_wanted)

    def presets(self) -> list[Preset]:
        return self._store.presets.all()

    def save_preset(self, preset: Preset) -> None:
        self._store.presets.save(preset)

    def delete_preset(self, name: str) -> None:
        self._store.presets.delete(name)

    # writing

    def add(self, entry: Entry) -> None:
        """Take a new turn and commit the person's message before returning, if that is possible."""
        with self._lock:
            entry.talk.entries.append(entry)
            entry.talk.tip = entry
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
                    if entry.talk.tip is entry:
                        entry.talk.tip = None
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
