"""Writes turns to the log in order, and keeps the chat going while the log fails.

Contract: one thread writes. A turn is a PendingTurn that knows how much of it is stored; `advance`
does the writes that are due and may be called again after a failure. While the store is locked,
full or read-only, turns wait in memory, `notice` says so, and writing is tried again. A
conversation is named by a handle: its stored id, or a negative number until the store has given
one.

Not here: a turn as the page sees it (turn), the tables (record.store).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from localspec.core.backend import Message, Role
from localspec.core.errors import StoreError
from localspec.record.conversations import ConversationList
from localspec.record.rows import MOST_OTHERS, PAGE, now
from localspec.record.store import ContinuedReply, SessionInfo, Store, Turn, TurnEnd, TurnSettings

RETRY_S = 2.0
COMMIT_WAIT_S = 8.0  # longer than the store's own wait for a lock, so that its answer is known

Change = Callable[[ConversationList, int], None]  # of a stored conversation, by its id

log = logging.getLogger(__name__)


@dataclass(eq=False)
class OpenConversation:
    """A conversation of this process. handle: 0 until its first turn is added, then negative where
    the store gave no id yet. tip: the turn at the end of the branch in use, None where the store
    knows it. changes: to be made once it is stored. settings: as this process kept them last.
    source: PAGE, or the program's that sent it; pages ask for their own only."""

    handle: int
    title: str
    stored_id: int | None = None
    tip: PendingTurn | None = None
    is_deleted: bool = False
    settings: dict[str, str] | None = None
    changes: list[Change] = field(default_factory=list)
    source: str = PAGE

    def is_named(self, handle: int) -> bool:
        """A page may still use the negative handle of a conversation that is stored by now."""
        return handle in (self.handle, self.stored_id)


def without_half_a_character(text: str) -> str:
    """The text of a reply to be continued: half a character at its end is generated again."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


@dataclass(eq=False)
class PendingTurn:
    """One turn on its way into the log.

    after: the turn before it, where that one is not stored yet; otherwise parent_id is known.
    prompt_id: the person's stored message; set from the start for another reply to it.
    reply_id: the stored reply, where a later message needed it before the turn began.
    asked_by: the unstored turn whose message gets another reply.
    continued: the reply that this one continues, by its turn where that is not stored yet, else by
    its message's id; begun_text, begun_thinking, begun_tokens: its text, what was thought before
    it, and its ids as far as they are known.
    role: of the message that is answered. history: messages that are to be stored before it.
    has_message: it brings that message, and is not another reply to an earlier one.
    """

    conversation: OpenConversation
    text: str
    parent_id: int | None = None
    after: PendingTurn | None = None
    prompt_id: int | None = None
    asked_by: PendingTurn | None = None
    settings: TurnSettings | None = None
    turn: Turn | None = None
    reply_id: int | None = None
    reply_text: str = ""
    reply_thinking: str = ""
    begun_text: str = ""
    begun_thinking: str = ""
    begun_tokens: tuple[int, ...] = ()
    continued: PendingTurn | int | None = None
    end: TurnEnd | None = None
    is_stored: bool = False
    asked_at_utc: str = field(default_factory=now)
    role: Role = "user"
    history: tuple[Message, ...] = ()
    has_message: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_message = self.prompt_id is None and self.asked_by is None

    def begin_with(
        self, text: str, thinking: str, tokens: Sequence[int], continued: PendingTurn | int
    ) -> None:
        """Continue this reply."""
        self.reply_text = self.begun_text = without_half_a_character(text)
        self.reply_thinking = self.begun_thinking = without_half_a_character(thinking)
        self.begun_tokens, self.continued = tuple(tokens), continued

    @property
    def has_begun(self) -> bool:
        """Whether it continues a reply."""
        return bool(self.begun_text or self.begun_thinking)

    def advance(self, store: Store, session_id: Callable[[], int]) -> None:
        """Write what is due and not yet written. Raises StoreError; may be called again.

        A message that follows a reply that was not begun keeps that reply its place in the tree:
        under an earlier parent, the reply would drop out of the branch.
        """
        conversation = self.conversation
        if self.after is not None:
            self.after.keep_place(store)
        if conversation.stored_id is None:
            conversation.stored_id = store.create_conversation(
                conversation.title, conversation.source
            )
        while conversation.changes:
            conversation.changes[0](store.conversation_list, conversation.stored_id)
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
                self.reply_id,
            )
        if self.end is not None and self.turn is not None:
            store.finish_turn(self.turn, self.end)
            self.is_stored = True

    def keep_place(self, store: Store) -> None:
        """Store the reply before its turn begins. Without that, a start finds it interrupted."""
        conversation_id = self.conversation.stored_id
        if self.turn is None and self.reply_id is None and conversation_id is not None:
            self.reply_id = store.add_message(
                conversation_id,
                self.prompt_id,
                "assistant",
                self.begun_text,
                state="draft",
                thinking=self.begun_thinking or None,
            )

    def _store_prompt(self, store: Store, conversation_id: int) -> int:
        if self.asked_by is not None:
            assert self.asked_by.prompt_id is not None, "turns are written in order"
            return self.asked_by.prompt_id
        while self.history:
            first, *rest = self.history
            self.parent_id = store.add_message(
                conversation_id, self.base_id, first.role, first.content
            )
            self.history = tuple(rest)
        return store.add_message(conversation_id, self.base_id, self.role, self.text)

    def _continued_reply(self) -> ContinuedReply | None:
        if not self.has_begun:
            return None
        found = self.continued
        if isinstance(found, PendingTurn):
            found = None if found.turn is None else found.turn.message_id
        assert found is not None, "turns are written in order"
        return ContinuedReply(found, self.begun_text, self.begun_thinking)

    def chain(self) -> tuple[int | None, list[PendingTurn]]:
        """The stored message that the first pending turn follows, and the turns up to this one."""
        chain, first = [self], self.asked_by or self
        while first.after is not None:
            chain.append(first.after)
            first = first.after.asked_by or first.after
        return first.parent_id, chain[::-1]

    @property
    def base_id(self) -> int | None:
        """The stored message that the person's message follows, None for the first."""
        first = self.asked_by or self
        return first.parent_id if first.after is None else first.after.tip_id

    @property
    def tip_id(self) -> int | None:
        """The newest stored message of this turn."""
        if self.turn is not None:
            return self.turn.message_id
        return self.prompt_id if self.reply_id is None else self.reply_id


class Journal:
    """The writer. All methods may be called from any thread; none waits for a slow disk but
    `add`, which waits until the person's message is committed or cannot be, and `take_back`."""

    def __init__(self, store: Store, session_info: Callable[[], SessionInfo]) -> None:
        self.session_id: int | None = None  # in the log; None until the first turn began
        self._store = store
        self._session_info = session_info
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._lock = threading.Lock()
        self._handles = itertools.count(-1, -1)
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
        num_waiting = len(self._pending)
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
                if one.is_named(handle):
                    return one
            assert handle > 0, "a negative handle comes from a turn that was added"
            found = self._conversations[handle] = OpenConversation(handle, "", stored_id=handle)
            return found

    def unstored_conversations(self) -> list[OpenConversation]:
        with self._lock:
            found = list(self._conversations.values())
        return [one for one in found if one.stored_id is None and not one.is_deleted]

    def change(self, handle: int, act: Change) -> OpenConversation:
        """Change a stored conversation now; another one when it is stored. Raises StoreError."""
        conversation = self.conversation(handle)
        if conversation.stored_id is None:
            conversation.changes.append(act)
        else:
            act(self._store.conversation_list, conversation.stored_id)
        return conversation

    # writing

    def add(self, turn: PendingTurn) -> None:
        """Take a new turn, and commit the person's message before returning if possible."""
        conversation = turn.conversation
        with self._lock:
            if not conversation.handle:
                conversation.handle = next(self._handles)
                if conversation.source == PAGE:
                    self._conversations[conversation.handle] = conversation
            conversation.tip = turn
            self._pending.append(turn)
        try:
            self._writer.submit(self._write_pending).result(COMMIT_WAIT_S)
        except FutureTimeout:
            self._failure = "the disk does not answer."

    def take_back(self, turn: PendingTurn) -> None:
        """Forget a turn that was not begun, its message too; what waits behind it follows what was
        before it. Raises StoreError; then nothing has changed."""
        self._writer.submit(partial(self._drop, turn)).result()

    def update(self) -> None:
        """Write what changed on pending turns (their settings or their end), soon."""
        self._submit(self._write_pending)

    def checkpoint(self, turn: PendingTurn) -> None:
        """Keep the growing reply; skipped while an earlier checkpoint is under way."""
        if self._checkpoint is None or self._checkpoint.done():
            said = (turn.reply_text, turn.reply_thinking)
            self._checkpoint = self._submit(partial(self._write_checkpoint, turn, *said))

    def save_state(self, key: str, state: dict[str, Any]) -> None:
        """Keep the controller's state, which a model that is loaded next reads; where that takes
        too long, soon. Without it the next start measures again."""
        save = partial(self._store.save_state, key, state, MOST_OTHERS)
        saving = self._submit(partial(self._guard, save))
        if saving is not None:
            with suppress(FutureTimeout):
                saving.result(COMMIT_WAIT_S)

    def once(self, write: Callable[[Store], None]) -> None:
        """Write soon what the chat can do without; a failure is only logged."""

        def attempt() -> None:
            try:
                write(self._store)
            except StoreError:
                log.warning("something was not written to the log", exc_info=True)

        self._submit(attempt)

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

    def _submit(self, work: Callable[[], object]) -> Future[Any] | None:
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
                with self._lock:
                    self._pending.remove(turn)
                    for later in self._pending:  # which would keep every turn before it alive
                        if later.after is turn:
                            later.parent_id, later.after = turn.tip_id, None
                    if turn.conversation.tip is turn:
                        turn.conversation.tip = None
        self._failure = None

    def _drop(self, turn: PendingTurn) -> None:
        brought = (turn.reply_id, turn.prompt_id if turn.has_message else None)
        self._store.message_tree.delete(*(one for one in brought if one is not None))
        conversation = turn.conversation
        with self._lock:
            self._pending.remove(turn)
            for later in self._pending:
                if later.after is turn:
                    later.after, later.parent_id = turn.after, turn.parent_id
            if conversation.tip is turn:
                others = [one for one in self._pending if one.conversation is conversation]
                conversation.tip = others[-1] if others else None

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

    def _write_checkpoint(self, pending: PendingTurn, text: str, thinking: str) -> None:
        turn = pending.turn  # its end may have been written by what stood before this in the queue
        if turn is not None and not pending.is_stored and self._failure is None:
            self._guard(lambda: self._store.checkpoint_reply(turn.message_id, text, thinking))

    def _session(self) -> int:
        if self.session_id is None:
            self.session_id = self._store.start_session(self._session_info())
        return self.session_id

    def _retry_later(self) -> None:
        if self._is_closed:
            return
        if self._retry is not None:
            self._retry.cancel()
        self._retry = threading.Timer(RETRY_S, self.update)
        self._retry.daemon = True
        self._retry.start()
