"""One engine, one turn at a time, for every page and client.

`ChatService` is the front room: `submit` commits the person's message and returns a `Reply` at
once, also while the model loads; the reply's `view` is replaced as it grows, and readers look at
it as often as they like: a slow reader never slows the engine. `enqueue` gives anything else the
backend to itself in the same order. `switch`, `unload` and `retry` say what is loaded. Whatever
the ending of a turn (end of text, stop, fault, lost engine, closed page), the log has it.

Not here: the thread (worker), the backend's states (keeper), the algorithm (engine), the tables
(record), the page (web).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

from localspec.backend import Backend, Request
from localspec.chat import branches
from localspec.chat.answering import Ended
from localspec.chat.backend_lifecycle import Keeper, Opener, Smaller
from localspec.chat.context_usage import Gauge, gauge
from localspec.chat.importing import read_conversations
from localspec.chat.journal import Entry, Journal, Talk
from localspec.chat.log_service import (
    Format,
    HistoryRow,
    LogService,
    Preset,
    ReplyRecord,
    Scope,
    TokenRecord,
)
from localspec.chat.off_reasons import off_now
from localspec.chat.turn import (
    Reply,
    ReplySettings,
    ShownMessage,
    Status,
    TurnView,
    check_servable,
    clean,
    decided,
    request_of,
    title_of,
    turn_settings,
)
from localspec.chat.worker import Task, Worker
from localspec.core import AUTO
from localspec.errors import EngineLost, RequestError
from localspec.options import LoadOptions
from localspec.record.learnt import STATE_KEY
from localspec.record.store import SessionInfo, Store
from localspec.workloads import Workload, load_workloads


class ChatService(LogService):
    """Owns the worker, the keeper of the backend, and the journal.

    open_backend(report) loads; `report` takes a phrase of progress at a time, and may raise to
    give the loading up. session_info is asked when the first turn begins. drafter: what a page
    chooses first. workloads: None for those shipped. options: what open_backend loads, None where
    the caller does not say. opener_for: opens other options; without it nothing can be switched.
    unload_after_s: without work for so long the model is let go; None never. smaller: see Keeper.
    Call `start` once, `close` at the end.
    """

    def __init__(
        self,
        store: Store,
        session_info: Callable[[], SessionInfo],
        open_backend: Opener,
        drafter: str = AUTO,
        workloads: Mapping[str, Workload] | None = None,
        *,
        options: LoadOptions | None = None,
        opener_for: Callable[[LoadOptions], Opener] | None = None,
        unload_after_s: float | None = None,
        smaller: Smaller | None = None,
    ) -> None:
        super().__init__(store, session_info)
        self.workloads = load_workloads() if workloads is None else workloads
        self.drafter = drafter
        save_state = self._save_state
        self.keeper = Keeper(open_backend, save_state, options, opener_for, smaller)
        self._asking = threading.Lock()
        self.worker = Worker(self.keeper, self.journal, self._request_now, unload_after_s)

    def start(self) -> None:
        """Begin loading, in the background; once is enough."""
        self.journal.purge()
        self.worker.start()

    def close(self) -> None:
        """Stop the running reply, write what is left, release the backend."""
        self.worker.close()
        self.journal.close()

    # what is there

    def status(self) -> Status:
        keeper = self.keeper
        notices = (*self.store.notices, *keeper.notices)
        if keeper.loaded is not None:
            notices += keeper.loaded.notices
        if self.journal.notice is not None:
            notices += (self.journal.notice,)
        reply = self.current or self.latest
        view = None if reply is None else reply.view
        is_of_this = view is not None and (view.ended_s is None or view.ended_s > keeper.opened_s)
        return Status(
            phase=keeper.phase,
            phrase=keeper.phrase,
            seconds=keeper.seconds,
            description=keeper.loaded,
            notices=notices,
            session_id=self.journal.session_id,
            num_waiting=self.worker.num_waiting,
            reply=view,
            off=off_now(
                keeper.loaded,
                view.stats if view and is_of_this else None,
                keeper.was_lost,
                is_over=view is None or view.ended_s is not None,
            ),
            offer=keeper.offer,
        )

    @property
    def backend(self) -> Backend | None:
        """What is loaded. Only count_tokens and is_alive may be asked outside of a job."""
        return self.keeper.backend

    @property
    def options(self) -> LoadOptions | None:
        """What is loaded or is being loaded; None when unloaded, or where nobody said."""
        return None if self.keeper.is_unloaded else self.keeper.options

    @property
    def current(self) -> Reply | None:
        """The reply being written."""
        job = self.worker.current
        return job if isinstance(job, Reply) else None

    @property
    def latest(self) -> Reply | None:
        """The reply that ended last."""
        return self.worker.latest

    def messages(self, handle: int | None) -> list[ShownMessage]:
        """The conversation from its root to its newest message, the growing reply included."""
        if handle is None:
            return []
        return branches.conversation(self.journal, self.journal.talk(handle))

    def messages_before(self, reply: Reply) -> list[ShownMessage]:
        """The conversation up to the message that this reply answers."""
        return branches.conversation(self.journal, reply.entry.talk, until=reply.entry)

    def running(self, handle: int | None) -> Reply | None:
        """The reply of this conversation that is queued or being written."""
        for reply in self.worker.replies:
            if handle in (reply.handle, reply.entry.talk.handle):
                return reply
        return None

    # what is loaded

    def switch(self, options: LoadOptions) -> None:
        """Free what is loaded, then load this, after the reply under way and before those that
        wait. What comes of it is in `status`."""
        self.worker.order(lambda: self.keeper.switch(options))

    def unload(self) -> None:
        """Free what is loaded, after the reply under way; the next message loads it again."""
        self.worker.order(
            lambda: self.keeper.release("Unloaded; the next message loads the model again.")
        )

    def retry(self) -> None:
        """Load again what could not be loaded, or was lost too often."""
        self.worker.order(self.keeper.reload)

    def enqueue(self, name: str, job: Callable[[Backend, threading.Event], None]) -> Task:
        """Run `job(backend, cancel)` in the worker's thread, in one queue with replies, with the
        backend to itself. A waiting reply does not interrupt it; its `cancel` asks it to end."""
        task = Task(name, job)
        self.worker.queue(task)
        return task

    # one turn

    def submit(self, handle: int | None, text: str, settings: ReplySettings) -> Reply | None:
        """Commit the person's message and queue its reply. handle None starts a conversation.

        Returns None for an empty message. Raises ContextOverflow or RequestError with nothing
        stored; while the model loads the check waits until the turn begins.
        """
        text = clean(text)
        if not text.strip():
            return None
        with self._asking:  # of two pages that send at once, one follows the other
            talk = Talk(0, title_of(text)) if handle is None else self.journal.talk(handle)
            return self._ask(branches.follow_up(self.journal, talk, text), settings)

    def regenerate(self, handle: int, settings: ReplySettings) -> Reply | None:
        """Queue another reply to the conversation's last message; the earlier one stays stored.
        None while a reply is being written, or where there is nothing to answer."""
        return self._answer_again(handle, branches.rephrased, settings)

    def proceed(self, handle: int, settings: ReplySettings) -> Reply | None:
        """Go on writing the last reply, whatever ended it; what comes of it is one text with the
        old one. None as for `regenerate`."""
        return self._answer_again(handle, branches.continued, settings)

    def edit(
        self, handle: int, message_id: int, text: str, settings: ReplySettings
    ) -> Reply | None:
        """Put a message in another one's place, on a branch of its own. One of the person's is
        answered; a reply is only stored as rewritten, and None returned, as for an empty text and
        while a reply is being written. Raises RequestError, StoreError."""
        text = clean(text)
        with self._asking:
            if not text.strip() or self.running(handle) is not None:
                return None
            talk = self.journal.talk(handle)
            message = branches.message_of(self.journal, talk, message_id)
            if message.role == "user":
                return self._ask(branches.edited(message, talk, text), settings)
            self.journal.write_reply(talk, message.parent_id, text)
            return None

    def show_branch(self, handle: int, message_id: int) -> None:
        """Go to the newest end of the branch through this message. Raises RequestError while a
        reply is being written or waits to be recorded; StoreError."""
        talk = self.journal.talk(handle)
        if self.running(handle) is not None or (talk.entries and not self.journal.flush()):
            raise RequestError(
                "A reply of this conversation is still being written or recorded. Wait for its "
                "end or stop it, then choose another branch."
            )
        branches.message_of(self.journal, talk, message_id)
        self.journal.show_tip(talk, message_id)

    def gauge(self, handle: int | None, text: str, settings: ReplySettings) -> Gauge | None:
        """How much of the context this message would take; None while that cannot be known."""
        return gauge(self.keeper.backend, self.keeper.loaded, self.messages(handle), text, settings)

    def import_conversations(self, data: bytes) -> list[int]:
        """Take in an exported file, all of it or nothing; the handles of the new conversations.
        Raises RequestError, StoreError."""
        return self.store.history.take_in(read_conversations(data))

    def send(
        self, handle: int | None, text: str, settings: ReplySettings, interval_s: float = 0.08
    ) -> Iterator[TurnView]:
        """`submit`, then the views until the end. Closing the iterator stops the reply."""
        reply = self.submit(handle, text, settings)
        if reply is None:
            return
        try:
            while not reply.done.wait(interval_s):
                yield reply.view
            yield reply.view
        finally:
            self.stop(reply)

    def stop(self, reply: Reply) -> None:
        """End a reply within one round, or take it out of the queue. Harmless when it is over."""
        reply.cancel.set()
        if self.worker.take_out(reply):
            self.worker.finish(reply, Ended("cancelled"))

    def _check(self, request: Request) -> None:
        """Refuse at once what cannot be served, as far as that is known now."""
        backend, loaded = self.keeper.backend, self.keeper.loaded
        if backend is None or loaded is None:
            return
        try:
            check_servable(loaded, backend.count_tokens, request)
        except EngineLost:  # it is being started again; the turn checks once more
            return

    def _request_now(self, reply: Reply) -> Request:
        return request_of(reply.settings, self.messages_before(reply), reply.entry)

    def _answer_again(
        self,
        handle: int,
        make_entry: Callable[[Journal, Talk], Entry | None],
        settings: ReplySettings,
    ) -> Reply | None:
        with self._asking:  # a double click asks once
            if self.running(handle) is not None:
                return None
            entry = make_entry(self.journal, self.journal.talk(handle))
            return None if entry is None else self._ask(entry, settings)

    def _ask(self, entry: Entry, settings: ReplySettings) -> Reply:
        """Queue this turn, unless it cannot be served as far as that is known now."""
        if entry.talk.is_deleted:
            raise RequestError(
                "This conversation was deleted. Bring it back, or write in a new chat."
            )
        settings = decided(settings, self.workloads, entry.text)
        shown = branches.conversation(self.journal, entry.talk, until=entry)
        self._check(request_of(settings, shown, entry))
        turn_settings(settings, None)
        if not entry.talk.handle:
            entry.talk = self.journal.new_talk(entry.talk.title)
        return self._queue(entry, settings)

    def _queue(self, entry: Entry, settings: ReplySettings) -> Reply:
        reply = Reply(entry, settings)
        self.journal.add(entry)
        self.worker.queue(reply)
        return reply

    def _save_state(self, state: dict[str, object]) -> None:
        self.journal.save_state(STATE_KEY, state)


__all__ = [
    "ChatService",
    "Format",
    "HistoryRow",
    "Preset",
    "Reply",
    "ReplyRecord",
    "ReplySettings",
    "Scope",
    "ShownMessage",
    "Status",
    "Task",
    "TokenRecord",
    "TurnView",
    "clean",
]
