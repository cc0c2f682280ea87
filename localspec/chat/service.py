"""One engine, one turn at a time, for every page and client.

`ChatService` loads the backend in a thread of its own, then measures costs whenever nobody
waits, and answers turns in the order they came. `submit` commits the person's message and
returns a `Reply` at once, also while the model still loads; the reply's `view` is replaced
as it grows, and readers look at it as often as they like: a slow reader never slows the
engine. Whatever the ending (end of text, stop, fault, closed page) the log has it.

Not here: the algorithm (engine), the tables (record), the page (web).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace

from localspec.backend import Backend, Description, Request
from localspec.chat.journal import Entry, Journal
from localspec.chat.turn import (
    Reply,
    ReplySettings,
    ServicePhase,
    ShownMessage,
    Status,
    TurnPhase,
    TurnView,
    check_servable,
    clean,
    conversation,
    decided,
    draft_prompt,
    request_of,
    title_of,
    turn_settings,
    unexpected,
)
from localspec.core import AUTO, FinishReason
from localspec.errors import LocalspecError
from localspec.record.learnt import STATE_KEY
from localspec.record.store import SessionInfo, Store
from localspec.workloads import Workload, load_workloads

CHECKPOINT_S = 1.0
SAVE_STATE_S = 10.0

log = logging.getLogger(__name__)


class ChatService:
    """Owns the backend, the journal and the queue of replies.

    open_backend(report) loads; `report` takes a phrase of progress at a time. session_info is
    asked after loading, when versions and device are known. drafter: what a page chooses first.
    workloads: None for those shipped. Call `start` once, `close` at the end.
    """

    def __init__(
        self,
        store: Store,
        session_info: Callable[[], SessionInfo],
        open_backend: Callable[[Callable[[str], None]], Backend],
        drafter: str = AUTO,
        workloads: Mapping[str, Workload] | None = None,
    ) -> None:
        self.store = store
        self.workloads = load_workloads() if workloads is None else workloads
        self.journal = Journal(store, session_info)
        self._open_backend = open_backend
        self.drafter = drafter
        self._backend: Backend | None = None
        self._loaded: Description | None = None  # as of the last turn: asked in one thread only
        self._waiting: deque[Reply] = deque()
        self._current: Reply | None = None
        self._latest: Reply | None = None
        self._changed = threading.Condition()
        self._pause_calibration = threading.Event()
        self._needs_calibration = False
        self._is_closed = False
        self._saved_s: float | None = None
        self._notices: tuple[str, ...] = ()
        self._phase: ServicePhase = "loading"
        self._phrase = "Loading the model"
        self._phase_since_s = time.monotonic()
        self._worker = threading.Thread(target=self._work, name="chat", daemon=True)

    def start(self) -> None:
        """Begin loading, in the background; once is enough."""
        if not self._worker.ident:
            self._worker.start()

    def close(self) -> None:
        """Stop the running reply, write what is left, release the backend."""
        with self._changed:
            self._is_closed = True
            for reply in (*self._waiting, self._current):
                if reply is not None:
                    reply.cancel.set()
            self._pause_calibration.set()
            self._changed.notify_all()
        if self._worker.is_alive():
            self._worker.join(timeout=10.0)
        self.journal.close()

    # what is there

    def status(self) -> Status:
        notices = (*self.store.notices, *self._notices)
        if self._loaded is not None:
            notices += self._loaded.notices
        if self.journal.notice is not None:
            notices += (self.journal.notice,)
        reply = self._current or self._latest
        return Status(
            phase=self._phase,
            phrase=self._phrase,
            seconds=time.monotonic() - self._phase_since_s,
            description=self._loaded,
            notices=notices,
            session_id=self.journal.session_id,
            num_waiting=len(self._waiting),
            reply=None if reply is None else reply.view,
        )

    def messages(self, handle: int | None) -> list[ShownMessage]:
        """The conversation from its root to its newest message, the growing reply included."""
        if handle is None:
            return []
        return conversation(self.journal, self.journal.talk(handle))

    def messages_before(self, reply: Reply) -> list[ShownMessage]:
        """The conversation up to the message that this reply answers."""
        return conversation(self.journal, reply.entry.talk, until=reply.entry)

    def running(self, handle: int | None) -> Reply | None:
        """The reply of this conversation that is queued or being written."""
        for reply in (self._current, *list(self._waiting)):
            if reply is not None and handle in (reply.handle, reply.entry.talk.handle):
                return reply
        return None

    # one turn

    def submit(self, handle: int | None, text: str, settings: ReplySettings) -> Reply | None:
        """Commit the person's message and queue its reply. handle None starts a conversation.

        Returns None for an empty message. Raises ContextOverflow or RequestError with nothing
        stored; while the model loads the check waits until the turn begins.
        """
        text = clean(text)
        if not text.strip():
            return None
        settings = decided(settings, self.workloads, text)
        self._check(request_of(settings, [*self.messages(handle), draft_prompt(text)]))
        turn_settings(settings, None)
        if handle is None:
            talk, parent_id, after = self.journal.new_talk(title_of(text)), None, None
        else:
            talk = self.journal.talk(handle)
            after = talk.entries[-1] if talk.entries else None
            parent_id = None if after else self._tip_id(handle)
        return self._queue(Entry(talk, text, parent_id=parent_id, after=after), settings)

    def regenerate(self, handle: int, settings: ReplySettings) -> Reply | None:
        """Queue another reply to the conversation's last message; the earlier one stays stored."""
        shown = self.messages(handle)
        while shown and shown[-1].role == "assistant":
            shown.pop()
        if not shown or self.running(handle) is not None:
            return None
        settings = decided(settings, self.workloads, shown[-1].text)
        self._check(request_of(settings, shown))
        turn_settings(settings, None)
        talk = self.journal.talk(handle)
        entry = Entry(talk, shown[-1].text)
        if talk.entries:
            entry.rephrases = talk.entries[-1]
        else:
            entry.prompt_id = shown[-1].message_id
            entry.parent_id = shown[-2].message_id if len(shown) > 1 else None
        return self._queue(entry, settings)

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
        with self._changed:
            was_waiting = reply in self._waiting
            if was_waiting:
                self._waiting.remove(reply)
                self._number_queue()
        if was_waiting:
            self._finish(reply, "cancelled", None)

    def _check(self, request: Request) -> None:
        if self._backend is not None and self._loaded is not None:
            check_servable(self._loaded, self._backend.count_tokens(request.messages), request)

    def _tip_id(self, handle: int) -> int | None:
        shown = self.messages(handle)
        return shown[-1].message_id if shown else None

    def _queue(self, entry: Entry, settings: ReplySettings) -> Reply:
        reply = Reply(entry, settings)
        self.journal.add(entry)
        with self._changed:
            self._waiting.append(reply)
            self._number_queue()
            self._pause_calibration.set()
            self._changed.notify_all()
        return reply

    def _number_queue(self) -> None:
        ahead = 0 if self._current is None else 1
        phase: TurnPhase = "loading" if self._phase == "loading" else "queued"
        for place, reply in enumerate(self._waiting):
            reply.view = replace(reply.view, phase=phase, position=ahead + place)

    # the worker thread

    def _work(self) -> None:
        self._load()
        while True:
            with self._changed:
                while not (self._waiting or self._is_closed or self._needs_calibration):
                    self._changed.wait()
                if self._is_closed and not self._waiting:
                    break
                self._current = self._waiting.popleft() if self._waiting else None
                self._number_queue()
                self._pause_calibration.clear()
            if self._current is None:
                self._calibrate()
            else:
                self._answer(self._current)
        if self._backend is not None:
            self._keep_state(at_most_every_s=0.0)
            self._backend.close()

    def _load(self) -> None:
        try:
            self._backend = self._open_backend(self._report)
            self._loaded = self._backend.describe()
        except LocalspecError as error:
            self._enter("failed", str(error))
        except Exception as error:  # the edge of this thread: the page stays up and says why
            log.exception("loading failed")
            self._enter("failed", unexpected("Loading the model", error))
        else:
            self._needs_calibration = True
            self._enter("ready", "Ready")

    def _report(self, phrase: str) -> None:
        self._phrase = phrase

    def _enter(self, phase: ServicePhase, phrase: str) -> None:
        self._phase_since_s = time.monotonic()
        self._phase, self._phrase = phase, phrase

    def _calibrate(self) -> None:
        assert self._backend is not None
        self._enter("calibrating", "Measuring this machine")
        try:
            for phrase in self._backend.calibrate(self._pause_calibration):
                self._phrase = phrase
        except Exception as error:  # measuring is a help, not a condition
            log.exception("calibration failed")
            self._notices += (unexpected("Measuring this machine", error),)
            self._needs_calibration = False
        else:
            self._needs_calibration = self._pause_calibration.is_set()
        self._keep_state(at_most_every_s=0.0)
        self._enter("ready", "Ready")

    def _answer(self, reply: Reply) -> None:
        reason: FinishReason = "error"
        error: str | None = None
        try:
            reason, error = self._generate(reply)
        except LocalspecError as fault:
            error = str(fault)
        except Exception as fault:  # the edge of one turn: the next turn must work
            log.exception("a reply failed")
            error = unexpected("The reply", fault)
        finally:
            self._finish(reply, reason, error)
        self._keep_state(at_most_every_s=SAVE_STATE_S)

    def _generate(self, reply: Reply) -> tuple[FinishReason, str | None]:
        if self._backend is None or reply.cancel.is_set():
            return ("error", self._phrase) if self._backend is None else ("cancelled", None)
        # Built now, not when it was sent: a reply before it in the queue belongs to it.
        request = request_of(reply.settings, self.messages_before(reply))
        self._check(request)
        reply.entry.settings = turn_settings(reply.settings, self._loaded)
        self.journal.update(reply.entry)
        reply.view = replace(reply.view, phase="prefill", position=0)
        checkpoint_s = time.monotonic()
        with closing(self._backend.generate(request, reply.cancel)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                reply.take(chunk)
                if time.monotonic() - checkpoint_s >= CHECKPOINT_S:
                    self.journal.checkpoint(reply.entry, reply.view.text)
                    checkpoint_s = time.monotonic()
        if reply.view.finish_reason is None:
            return "error", "The engine ended the reply without saying why. Send it again."
        return reply.view.finish_reason, reply.view.error

    def _finish(self, reply: Reply, reason: FinishReason, error: str | None) -> None:
        reply.end(reason, error)
        if reply.entry.settings is None:
            reply.entry.settings = turn_settings(reply.settings, self._loaded)
        self.journal.update(reply.entry)
        with self._changed:
            if self._current is reply:
                self._current = None
            self._latest = reply
        reply.done.set()

    def _keep_state(self, at_most_every_s: float) -> None:
        if self._backend is None:
            return
        now = time.monotonic()
        try:
            self._loaded = self._backend.describe()
            if self._saved_s is None or now - self._saved_s >= at_most_every_s:
                self._saved_s = now
                self.journal.save_state(STATE_KEY, self._backend.snapshot())
        except Exception:  # a colder next start must not end this one
            log.exception("the controller's state could not be kept")


__all__ = ["ChatService", "Reply", "ReplySettings", "ShownMessage", "Status", "TurnView"]
