"""Writes turns to the log in order, and keeps the chat going while the log fails.

Contract: one thread writes. A turn is a PendingTurn that knows how much of it is stored; `advance`
does the writes that are due and may be called again after a failure. While the store is locked,
full or read-only, turns wait in memory, `notice` says so, and writing is tried again. A
conversation is named by a handle: its stored id, or a negative number until the store has given
one.

Not here: a turn as the page sees it (turn), the tables (record.store).
"""

from __future__ import annotations

import logging
import threading
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from localspec.errors import StoreError
from localspec.record.store import ContinuedReply, SessionInfo, Store, Turn, TurnEnd, TurnSettings

RETRY_S = 2.0
COMMIT_WAIT_S = 8.0  # longer than the store's own wait for a lock, so that its answer is known
MAX_TITLE_LENGTH = 200
CONTROL_CATEGORIES = ("Cc", "Cs")  # of Unicode

Change = Callable[[Store, int], None]  # of a stored conversation, by its id

log = logging.getLogger(__name__)


def title_line(text: str) -> str:
    """A title as one line of text without control characters."""
    kept = (
        c if c.isspace() or unicodedata.category(c) not in CONTROL_CATEGORIES else " " for c in text
    )
    return " ".join("".join(kept).split())[:MAX_TITLE_LENGTH]


@dataclass
class OpenConversation:
    """A conversation of this process. pending: its turns not yet wholly stored, oldest first.
    tip: the turn at the end of the branch in use, None where the store knows it. changes: to be
    made once it is stored."""

    handle: int
    title: str
    stored_id: int | None = None
    pending: list[PendingTurn] = field(default_factory=list)
    tip: PendingTurn | None = None
    is_deleted: bool = False
    changes: list[Change] = field(default_factory=list)


@dataclass
class PendingTurn:
    """One turn on its way into the log.

    after: the turn before it, where that one is not stored yet; otherwise parent_id is known.
    prompt_id: the person's stored message; set from the start for another reply to it.
    regenerates: the unstored turn whose message gets another reply.
    begun_text, begun_tokens, continues_id: of the reply that this one continues (`begin_with`).
    """

    conversation: OpenConversation
    text: str
    parent_id: int | None = None
    after: PendingTurn | None = None
    prompt_id: int | None = None
    regenerates: PendingTurn | None = None
    settings: TurnSettings | None = None
    turn: Turn | None = None
    reply_text: str = ""
    begun_text: str = ""
    begun_tokens: tuple[int, ...] = ()
    continues_id: int | None = None
    end: TurnEnd | None = None
    is_stored: bool = False

    def begin_with(self, text: str, tokens: Sequence[int], message_id: int | None) -> None:
        """Continue this reply. tokens: its ids, none where they are not known. message_id: None
        for the reply of the unstored turn in `regenerates`."""
        # Half a character at its end is generated again, and whole.
        self.reply_text = self.begun_text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        self.begun_tokens, self.continues_id = tuple(tokens), message_id

    def advance(self, store: Store, session_id: Callable[[], int]) -> None:
        """Write what is due and not yet written. Raises StoreError; may be called again.

        A message that follows a reply waits until that reply has its place in the tree: under an
        earlier parent, the reply would drop out of the branch.
        """
        conversation = self.conversation
        if self.after is not None and self.after.turn is None:
            return
        if conversation.stored_id is None:
            conversation.stored_id = store.create_conversation(conversation.title)
        while conversation.changes:
            conversation.changes[0](store, conversation.stored_id)
            conversation.changes.pop(0)
        if self.prompt_id is None:
            self.prompt_id = self._store_prompt(store, conversation.stored_id)
        if self.settings is not None and self.turn is None:
            self.turn = store.begin_turn(
                session_id(),
                conversation.stored_id,
                self.prompt_id,
                self.settings,
                self._continued_reply(),
            )
        if self.end is not None and self.turn is not None:
            store.finish_turn(self.turn, self.end)
            self.is_stored = True

    def _store_prompt(self, store: Store, conversation_id: int) -> int:
        if self.regenerates is not None:
            assert self.regenerates.prompt_id is not None, "turns are written in order"
            return self.regenerates.prompt_id
        return store.add_user_message(conversation_id, self.base_id, self.text)

    def _continued_reply(self) -> ContinuedReply | None:
        if not self.begun_text:
            return None
        before = self.regenerates.turn if self.regenerates is not None else None
        message_id = before.message_id if before is not None else self.continues_id
        assert message_id is not None, "turns are written in order"
        return ContinuedReply(message_id, self.begun_text)

    def chain(self) -> tuple[int | None, list[PendingTurn]]:
        """The stored message that the first pending turn follows, and the turns up to this one."""
        chain, at = [self], self
        while True:
            at = at._first()
            if at.after is None:
                return at.parent_id, chain[::-1]
            at = at.after
            chain.append(at)

    def _first(self) -> PendingTurn:
        """The turn that asked what this one answers."""
        at = self
        while at.regenerates is not None:
            at = at.regenerates
        return at

    @property
    def base_id(self) -> int | None:
        """The stored message that the person's message follows, None for the first."""
        first = self._first()
        return first.parent_id if first.after is None else first.after.tip_id

    @property
    def tip_id(self) -> int | None:
        """The newest stored message of this turn."""
        return self.prompt_id if self.turn is None else self.turn.message_id


class Journal:
    """The writer. All methods may be called from any thread; none waits for a slow disk but
    `add`, which waits until the person's message is committed or cannot be."""

    def __init__(self, store: Store, session_info: Callable[[], SessionInfo]) -> None:
        self.session_id: int | None = None  # in the log; None until the first turn began
        self._store = store
        self._session_info = session_info
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._lock = threading.Lock()
        self._conversations: dict[int, OpenConversation] = {}
        self._pending: list[PendingTurn] = []
        self._checkpoint: Future[None] | None = None
        self._retry: threading.Timer | None = None
        self._failure: str | None = None
        self._is_closed = False

    @property
    def notice(self) -> str | None:
        """What is not recorded at this moment, and why; None when everything is."""
        if self._failure is None:
            return None
        num_waiting = len([turn for turn in self._pending if not turn.is_stored])
        turns, they = ("turn is", "it is") if num_waiting == 1 else ("turns are", "they are")
        return (
            f"The chat goes on, but {num_waiting} {turns} not recorded yet: {self._failure} "
            f"localspec keeps trying; {they} lost only if it is closed before that succeeds."
        )

    # conversations of this process

    def conversation(self, handle: int) -> OpenConversation:
        """A positive handle is a stored conversation's id."""
        with self._lock:
            for one in self._conversations.values():
                if handle in (one.handle, one.stored_id):
                    return one
            assert handle > 0, "a negative handle comes from new_conversation only"
            found = self._conversations[handle] = OpenConversation(handle, "", stored_id=handle)
            return found

    def new_conversation(self, title: str) -> OpenConversation:
        """A conversation that is stored with its first message."""
        with self._lock:
            handle = min(self._conversations, default=0)
            made = OpenConversation(min(handle, 0) - 1, title)
            self._conversations[made.handle] = made
            return made

    def unstored_conversations(self) -> list[OpenConversation]:
        with self._lock:
            found = list(self._conversations.values())
        return [one for one in found if one.stored_id is None and not one.is_deleted]

    def change(self, conversation: OpenConversation, act: Change) -> None:
        """Change a stored conversation now; another one when it is stored. Raises StoreError."""
        if conversation.stored_id is None:
            conversation.changes.append(act)
        else:
            act(self._store, conversation.stored_id)

    # writing

    def add(self, turn: PendingTurn) -> None:
        """Take a new turn, and commit the person's message before returning if possible."""
        with self._lock:
            turn.conversation.pending.append(turn)
            turn.conversation.tip = turn
            self._pending.append(turn)
        try:
            self._writer.submit(self._write_pending).result(COMMIT_WAIT_S)
        except FutureTimeout:
            self._failure = "the disk does not answer."

    def update(self) -> None:
        """Write what changed on pending turns (their settings or their end), soon."""
        self._submit(self._write_pending)

    def checkpoint(self, turn: PendingTurn, text: str) -> None:
        """Keep the growing reply; skipped while an earlier checkpoint is under way."""
        if self._checkpoint is None or self._checkpoint.done():
            self._checkpoint = self._submit(lambda: self._write_checkpoint(turn, text))

    def save_state(self, key: str, state: dict[str, Any]) -> None:
        """Keep the controller's state, soon. Without it the next start measures again."""

        def save() -> None:
            self._guard(lambda: self._store.save_state(key, state))

        self._submit(save)

    def purge(self) -> None:
        """Take deleted conversations off the disk, soon; a failure waits for the next start."""

        def purge() -> None:
            try:
                self._store.conversation_list.purge()
            except StoreError:
                log.warning("deleted conversations were not purged", exc_info=True)

        self._submit(purge)

    def flush(self, wait_s: float = COMMIT_WAIT_S) -> bool:
        """Wait until everything due was tried; False if something could not be written."""
        try:
            self._writer.submit(self._write_pending).result(wait_s)
        except FutureTimeout:
            return False
        return self._failure is None

    def close(self) -> None:
        """Write what is left and stop. The store stays open; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._writer.submit(self._write_pending)
        self._writer.shutdown(wait=True)

    # the writer thread

    def _submit(self, work: Callable[[], None]) -> Future[None] | None:
        try:
            return self._writer.submit(work)
        except RuntimeError:  # the writer was shut down: the program is ending
            log.warning("a late write was dropped at the end of the program")
            return None

    def _write_pending(self) -> None:
        """Advance every pending turn in order; stop at the first that cannot be written."""
        for turn in list(self._pending):
            if not self._guard(partial(turn.advance, self._store, self._session)):
                self._retry_later()
                return
            if turn.is_stored:
                conversation = turn.conversation
                with self._lock:
                    self._pending.remove(turn)
                    conversation.pending.remove(turn)
                    if conversation.tip is turn:
                        conversation.tip = None
        self._failure = None

    def _guard(self, write: Callable[[], None]) -> bool:
        """Whether the write succeeded. A failure becomes the notice; a bug is also logged."""
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

    def _write_checkpoint(self, pending: PendingTurn, text: str) -> None:
        turn = pending.turn
        if turn is not None and self._failure is None:
            self._guard(lambda: self._store.checkpoint_reply(turn.message_id, text))

    def _session(self) -> int:
        if self.session_id is None:
            self.session_id = self._store.start_session(self._session_info())
        return self.session_id

    def _retry_later(self) -> None:
        if self._is_closed:
            return
        if self._retry is not None:
            self._retry.cancel()
        self._retry = threading.Timer(RETRY_S, lambda: self._submit(self._write_pending))
        self._retry.daemon = True
        self._retry.start()
