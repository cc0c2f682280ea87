"""A backend whose engine runs in its own process.

Contract: localspec.core.backend.Backend, every method passed on by name. One thread of this process
sends and one receives, so neither a caller nor the engine waits for the other; what is queued is
bounded by the length of the reply. A cancel reaches the engine within CANCEL_LOOK_S.

When the engine ends, is killed or reports that it is lost, every call raises EngineLost and
`is_alive` is False. A process that sends nothing for SILENT_S (stopped, or held by a lock) is
killed and counts as lost. A call that is not answered in its time, or goes on for STOP_S after its
cancel, raises EngineLost too; `close` ends such a process. A count of tokens is given up as soon as
the process is silent for COUNT_SILENT_S. A load may take as long as it works: one whose process
takes no processor time for STILL_S is ended. Imports nothing heavy.

Not here: opening another engine (chat.backend_lifecycle), the other end (engine).
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

import psutil

from localspec.core.backend import Candidate, Chunk, Description, Message, Request
from localspec.core.errors import EngineLost, LocalspecError
from localspec.core.hindsight import Hindsight
from localspec.core.interrupts import ENDINGS
from localspec.remote import engine, wire

# A forked process could not use a GPU that this one has looked at.
PROCESSES = multiprocessing.get_context("spawn")
CANCEL_LOOK_S = 0.02
OPENING_LOOK_S = 0.2
STILL_S = 120.0  # a disk that answers is never so slow, nor is a network's time-out so long
SILENT_S = 10.0  # long for a beat every wire.BEAT_S; a library that loads may hold the interpreter
COUNT_S = 3.0  # a page waits for the answer
COUNT_SILENT_S = 1.0  # and not for a process that missed four beats
ANSWER_S = 600.0  # a slow processor reads a whole context for `candidates`
STOP_S = 60.0  # a slow processor ends the forward under way first
EXIT_S = 1.0  # from the end of the pipe to the exit code
KILLED_S = 5.0  # for a driver to free the memory of a card

NO_ANSWER = "The engine does not answer."
SILENT = "The engine's process was stopped or stands still, so it was ended."
CLOSED = "The engine was closed."
STOOD_STILL = (
    "Loading stood still for {:.0f} seconds, so it was ended: its process was stopped, or a disk "
    "or network drive does not answer. See that the model's folder can be read, then load it again."
)


@contextmanager
def _endings_held_back() -> Iterator[None]:
    """Block the signals that end a program, which a terminal sends to all its processes. A process
    that is started here inherits the mask, so none reaches it before it ignores them. Windows has
    no such mask."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its start would unblock them again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Pending:
    """One call that is not answered yet."""

    def __init__(self, cancel: threading.Event | None) -> None:
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.cancel = cancel
        self.cancelled_s: float | None = None  # when the cancel was sent

    @property
    def is_overdue(self) -> bool:
        return self.cancelled_s is not None and time.monotonic() - self.cancelled_s > STOP_S


class ChildBackend:
    """See the module. Make one with `open`."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._loss: EngineLost | None = None
        self._silent_s = 0.0  # by waits and not by the clock: a computer that slept was not silent
        self._threads = [
            threading.Thread(target=self._listen, name="engine", daemon=True),
            threading.Thread(target=self._dispatch, name="to engine", daemon=True),
        ]

    @classmethod
    def open(cls, opening: wire.Opening, report: Callable[[str], None]) -> ChildBackend:
        """Start the process and wait until its backend is open. Raises what opening it raised,
        EngineLost if the process ends, LocalspecError if it stands still, and whatever `report`
        raises, which ends the process; `report` is called several times a second, with a new phrase
        or the last one."""
        pipe, far_end = PROCESSES.Pipe()
        process = PROCESSES.Process(
            target=engine.run, args=(far_end, opening), name="localspec engine", daemon=True
        )
        with _endings_held_back():
            process.start()
        far_end.close()
        backend = cls(process, pipe)
        try:
            backend._wait_until_open(report)
        except BaseException:
            backend.close()
            raise
        backend.start()
        return backend

    def start(self) -> None:
        """Begin to pass messages on, once the backend at the other end is open."""
        for thread in self._threads:
            thread.start()

    def _wait_until_open(self, report: Callable[[str], None]) -> None:
        phrase, still_s, used_s = "starting the engine", 0.0, 0.0
        while still_s < STILL_S:
            report(phrase)
            try:
                message = wire.receive(self._pipe, OPENING_LOOK_S)
            except wire.Hangup:
                raise self._how_it_ended() from None
            before_s, used_s = used_s, self._processor_s()
            still_s = 0.0 if message or used_s > before_s else still_s + OPENING_LOOK_S
            if isinstance(message, wire.Items):
                (phrase,) = message.values
            elif message is not None:
                self._value_of(message)
                return
        raise LocalspecError(STOOD_STILL.format(STILL_S))

    def _processor_s(self) -> float:
        """What the process has taken so far; 0 where it has just ended."""
        try:
            used = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)

    # the methods of a backend

    def is_alive(self) -> bool:
        return self._loss is None

    def describe(self) -> Description:
        found: Description = self._ask("describe")
        return found

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        limits = {"limit_s": COUNT_S, "silent_s": COUNT_SILENT_S}
        found: int = self._ask("count_tokens", messages, tools, **limits)
        return found

    def prompt_tokens(self, request: Request) -> tuple[int, ...]:
        limits = {"limit_s": COUNT_S, "silent_s": COUNT_SILENT_S}
        found: tuple[int, ...] = self._ask("prompt_tokens", request, **limits)
        return found

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        return self._stream("generate", cancel, request)

    def calibrate(self, cancel: threading.Event) -> Iterator[str]:
        return self._stream("calibrate", cancel)

    def review(self, request: Request, cancel: threading.Event) -> Iterator[Hindsight]:
        return self._stream("review", cancel, request)

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        found: tuple[Candidate, ...] = self._ask("candidates", messages, tokens, count)
        return found

    def keep_read(self, disk_bytes: int | None, cancel: threading.Event) -> Iterator[str]:
        return self._stream("keep_read", cancel, disk_bytes)

    def forget(self, chat: int) -> None:
        self._ask("forget", chat, limit_s=COUNT_S, silent_s=COUNT_SILENT_S)

    def snapshot(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("snapshot")
        return found

    def close(self) -> None:
        """End the process at once, with all that it started. All its memory is free then."""
        self._loss = self._loss or EngineLost(CLOSED)
        self._kill()
        self._process.join(KILLED_S)
        self._outgoing.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(EXIT_S)
        self._pipe.close()

    def _kill(self) -> None:
        """Kill the process and all that it started, of which a stopped one would stay."""
        if not self._process.is_alive():
            return
        started = list[psutil.Process]()
        with suppress(psutil.Error):
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for process in started:
            with suppress(psutil.Error):
                process.kill()

    # calls

    def _ask(
        self,
        method: str,
        *arguments: Any,
        limit_s: float = ANSWER_S,
        silent_s: float = math.inf,
    ) -> Any:
        """silent_s: wait no longer where the process has sent nothing for so long."""
        call_id, pending = self._begin(method, arguments, None)
        waited_s = 0.0
        try:
            while waited_s < limit_s and self._silent_s < silent_s:
                with suppress(Empty):
                    return self._value_of(pending.answers.get(timeout=wire.BEAT_S))
                waited_s += wire.BEAT_S
            raise EngineLost(NO_ANSWER)
        finally:
            self._pending.pop(call_id, None)

    def _stream(self, method: str, cancel: threading.Event, *arguments: Any) -> Iterator[Any]:
        call_id, pending = self._begin(method, arguments, cancel)
        is_over = False
        try:
            while not is_over:
                try:
                    message = pending.answers.get(timeout=CANCEL_LOOK_S)
                except Empty:
                    self._pass_cancel_on(call_id, pending)
                    if pending.is_overdue:
                        raise EngineLost(NO_ANSWER) from None
                    continue
                if isinstance(message, wire.Items):
                    yield from message.values
                else:
                    is_over = True
                    self._value_of(message)
        finally:
            self._pending.pop(call_id, None)
            if not is_over and self.is_alive():
                self._send(wire.Cancel(call_id))

    def _begin(
        self, method: str, arguments: tuple[Any, ...], cancel: threading.Event | None
    ) -> tuple[int, _Pending]:
        call_id, pending = next(self._ids), _Pending(cancel)
        self._pending[call_id] = pending
        if self._loss is not None:  # after the entry: the listener may have informed all others
            self._pending.pop(call_id, None)
            raise self._loss
        self._send(wire.Call(call_id, method, arguments, cancel is not None))
        return call_id, pending

    def _value_of(self, message: wire.Returned | wire.Failed | EngineLost) -> Any:
        if isinstance(message, wire.Returned):
            return message.value
        error = message if isinstance(message, EngineLost) else wire.error_of(message)
        if isinstance(error, EngineLost):
            self._loss = error
        raise error

    def _pass_cancel_on(self, call_id: int, pending: _Pending) -> None:
        is_set = pending.cancel is not None and pending.cancel.is_set()
        if is_set and pending.cancelled_s is None:
            pending.cancelled_s = time.monotonic()
            self._send(wire.Cancel(call_id))

    # messages

    def _send(self, message: object) -> None:
        self._outgoing.put(wire.packed(message))

    def _dispatch(self) -> None:
        """Send what is queued. In a thread of its own, since a stopped process empties no pipe."""
        while (data := self._outgoing.get()) is not None:
            try:
                wire.send(self._pipe, data)
            except wire.Hangup:  # the listener says so to all who wait
                return

    def _listen(self) -> None:
        """Distribute the engine's messages until it hangs up or falls silent."""
        try:
            while self._silent_s < SILENT_S:
                message = wire.receive(self._pipe, wire.BEAT_S)
                self._silent_s = self._silent_s + wire.BEAT_S if message is None else 0.0
                if message is not None:
                    self._hand_over(message)
            self._loss = self._loss or EngineLost(SILENT)
            self._kill()
        except wire.Hangup:
            pass  # how it ended is said below
        finally:
            self._loss = self._loss or self._how_it_ended()
            for pending in list(self._pending.values()):
                pending.answers.put(self._loss)

    def _hand_over(self, message: wire.Returned | wire.Items | wire.Failed) -> None:
        pending = self._pending.get(message.call_id)
        if pending is not None:
            pending.answers.put(message)
            self._pass_cancel_on(message.call_id, pending)

    def _how_it_ended(self) -> EngineLost:
        self._process.join(EXIT_S)
        return EngineLost(f"The engine ended unexpectedly{_cause(self._process.exitcode)}.")


def _cause(exit_code: int | None) -> str:
    if exit_code is None or exit_code == 0:
        return ""
    if exit_code > 0:
        return f" (exit code {exit_code})"
    name = signal.Signals(-exit_code).name
    if name == "SIGKILL":
        return ": it was killed, as the system does when memory runs out"
    if name == "SIGSEGV":
        return ": it crashed (SIGSEGV), in a driver or a library"
    return f" ({name})"
