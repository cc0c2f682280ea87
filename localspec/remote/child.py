"""A backend whose engine runs in its own process.

Contract: localspec.backend.Backend, every method passed on by name. A thread of this process
receives the engine's messages, so the engine never waits for the reader of a reply; the queue is
bounded by the length of the reply. A cancel reaches the engine within CANCEL_LOOK_S. When the
engine ends, is killed or reports that it is lost, every call raises EngineLost and `is_alive` is
False. Imports nothing heavy.

Not here: opening another engine (chat.backend_lifecycle), the other end (engine).
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any

from localspec.backend import Candidate, Chunk, Description, Message, Request
from localspec.errors import EngineLost
from localspec.remote import engine, wire

# A forked process could not use a GPU that this one has looked at.
PROCESSES = multiprocessing.get_context("spawn")
CANCEL_LOOK_S = 0.02
OPENING_LOOK_S = 0.2
CLOSE_S = 3.0
EXIT_S = 1.0  # from the end of the pipe to the exit code

log = logging.getLogger(__name__)


class _Pending:
    """One call that is not answered yet."""

    def __init__(self, cancel: threading.Event | None) -> None:
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.cancel = cancel
        self.is_cancel_sent = False


class ChildBackend:
    """See the module. Make one with `open`."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe
        self._sending = threading.Lock()
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._loss: EngineLost | None = None
        self._is_closed = False
        self._listener = threading.Thread(target=self._listen, name="engine", daemon=True)

    @classmethod
    def open(cls, opening: wire.Opening, report: Callable[[str], None]) -> ChildBackend:
        """Start the process and wait until its backend is open. Raises what opening it raised,
        EngineLost if the process ends, and whatever `report` raises, which ends the process;
        `report` is called several times a second, with a new phrase or the last one."""
        pipe, far_end = PROCESSES.Pipe()
        process = PROCESSES.Process(
            target=engine.run, args=(far_end, opening), name="localspec engine", daemon=True
        )
        process.start()
        far_end.close()
        backend = cls(process, pipe)
        try:
            backend._wait_until_open(report)
        except BaseException:
            backend._kill()
            raise
        backend._listener.start()
        return backend

    def _wait_until_open(self, report: Callable[[str], None]) -> None:
        phrase = "starting the engine"
        while True:
            report(phrase)
            if not self._pipe.poll(OPENING_LOOK_S):
                continue
            try:
                message = wire.receive(self._pipe)
            except wire.Hangup:
                raise self._how_it_ended() from None
            if isinstance(message, wire.Progress):
                phrase = message.phrase
            elif isinstance(message, wire.Fault):
                raise wire.error_of(message)
            else:
                assert isinstance(message, wire.Opened), f"{message} before the engine was open"
                return

    # the methods of a backend

    def is_alive(self) -> bool:
        return self._loss is None and not self._is_closed

    def describe(self) -> Description:
        found: Description = self._ask("describe")
        return found

    def count_tokens(self, messages: tuple[Message, ...]) -> int:
        found: int = self._ask("count_tokens", messages)
        return found

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        return self._stream("generate", cancel, request)

    def calibrate(self, cancel: threading.Event) -> Iterator[str]:
        return self._stream("calibrate", cancel)

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        found: tuple[Candidate, ...] = self._ask("candidates", messages, tokens, count)
        return found

    def pieces(self, tokens: tuple[int, ...]) -> tuple[str, ...]:
        found: tuple[str, ...] = self._ask("pieces", tokens)
        return found

    def snapshot(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("snapshot")
        return found

    def close(self) -> None:
        """End the process, by force after CLOSE_S. All its memory is free then."""
        self._is_closed = True
        try:
            self._send(wire.Close())
        except EngineLost:
            pass
        else:
            self._process.join(CLOSE_S)
        self._kill()

    # calls

    def _ask(self, method: str, *arguments: Any) -> Any:
        call_id, pending = self._begin(method, arguments, None)
        try:
            return self._value_of(pending.answers.get())
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

    def _value_of(self, message: wire.Returned | wire.Fault | EngineLost) -> Any:
        if isinstance(message, wire.Returned):
            return message.value
        error = message if isinstance(message, EngineLost) else wire.error_of(message)
        if isinstance(error, EngineLost):
            self._loss = error
        raise error

    def _pass_cancel_on(self, call_id: int, pending: _Pending) -> None:
        if pending.cancel is not None and pending.cancel.is_set() and not pending.is_cancel_sent:
            pending.is_cancel_sent = True
            self._send(wire.Cancel(call_id))

    def _send(self, message: object) -> None:
        try:
            with self._sending:
                wire.send(self._pipe, message)
        except wire.Hangup:
            raise self._loss or self._how_it_ended() from None

    def _listen(self) -> None:
        """Distribute the engine's messages until it hangs up."""
        while True:
            try:
                message = wire.receive(self._pipe)
            except wire.Hangup:
                break
            pending = self._pending.get(message.call_id)
            if pending is not None:
                pending.answers.put(message)
                self._pass_cancel_on_quietly(message.call_id, pending)
        self._loss = self._loss or self._how_it_ended()
        for pending in list(self._pending.values()):
            pending.answers.put(self._loss)

    def _pass_cancel_on_quietly(self, call_id: int, pending: _Pending) -> None:
        try:
            self._pass_cancel_on(call_id, pending)
        except EngineLost:
            log.debug("the engine ended before it could be cancelled")

    # the end of the process

    def _how_it_ended(self) -> EngineLost:
        self._process.join(EXIT_S)
        return EngineLost(f"The engine ended unexpectedly{_cause(self._process.exitcode)}.")

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(EXIT_S)
        if self._listener.is_alive():
            self._listener.join(EXIT_S)
        self._pipe.close()


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
