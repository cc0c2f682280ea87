"""The engine's process: opens a backend and answers calls over a pipe until it is killed.

Contract: one thread calls the backend. It asks the streams of TOGETHER for their next item in turn,
so that replies run beside each other; of all else the backend gets one call at a time, in order,
and those in BETWEEN are answered while streams go on. Calls in BESIDE, which need no engine, have a
thread of their own. The items of a stream are sent in groups within FLUSH_S, the first few at once;
the engine waits for its reader only when the pipe is full. Whatever a call raises, it is answered.
When the other end hangs up, this process ends at once: no engine outlives its page.

Not here: the other end (child).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from localspec.core.backend import Backend
from localspec.core.errors import EngineLost, LocalspecError
from localspec.core.interrupts import ENDINGS
from localspec.remote import wire

BESIDE = frozenset({"count_tokens", "prompt_tokens", "forget"})
TOGETHER = frozenset({"generate"})
BETWEEN = frozenset({"describe", "snapshot"})
FLUSH_S = 0.04  # a page reads about twelve times a second
AT_ONCE = 4  # items at the start of a stream, for the first words
LOST_CODE = 3  # exit code after the engine reported that it is lost

log = logging.getLogger(__name__)


def run(pipe: Connection, opening: wire.Opening) -> None:
    """The main function of the process."""
    for number in ENDINGS:  # for the page, which then ends this
        signal.signal(number, signal.SIG_IGN)
    if sys.stderr is not None:  # a program without a console has none
        faulthandler.enable()
    engine = _Engine(pipe)
    threading.Thread(target=engine.listen, name="listen", daemon=True).start()
    backend = engine.open(opening)
    if backend is None:
        return
    beside = threading.Thread(
        target=engine.serve, args=(backend, engine.beside), name="beside", daemon=True
    )
    beside.start()
    threading.Thread(target=engine.beat, name="beat", daemon=True).start()
    engine.serve(backend, engine.calls)


class _Engine:
    """The queues between the thread that listens and those that work."""

    def __init__(self, pipe: Connection) -> None:
        self.calls: SimpleQueue[wire.Call] = SimpleQueue()
        self.beside: SimpleQueue[wire.Call] = SimpleQueue()
        self._pipe = pipe
        self._sending = threading.Lock()
        self._cancels: dict[int, threading.Event] = {}

    def listen(self) -> None:
        """Queue incoming messages until the other end hangs up."""
        while True:
            try:
                message = wire.receive(self._pipe)
            except wire.Hangup:
                os._exit(0)  # nobody is left to read a reply
            if isinstance(message, wire.Call):
                if message.is_stream:
                    self._cancels[message.call_id] = threading.Event()
                queue = self.beside if message.method in BESIDE else self.calls
                queue.put(message)
            else:
                cancel = self._cancels.get(message.call_id)
                if cancel is not None:
                    cancel.set()

    def beat(self) -> None:
        """Say that this process runs, until it ends."""
        while True:
            self._send(wire.Items(wire.OPEN_CALL, []))
            time.sleep(wire.BEAT_S)

    def open(self, opening: wire.Opening) -> Backend | None:
        """The backend; None, with the reason sent, when it cannot be opened."""
        module, _, name = opening.function.partition(":")
        try:
            function: Callable[..., Backend] = vars(importlib.import_module(module))[name]
            backend = function(**opening.keywords, report=self._report)
        except BaseException as error:  # the edge of this process: the other one shows it
            self._send(_explained(wire.OPEN_CALL, error))
            return None
        self._send(wire.Returned(wire.OPEN_CALL, None))
        return backend

    def serve(self, backend: Backend, queue: SimpleQueue[wire.Call]) -> None:
        """Answer the calls of one queue until this process ends."""
        streams, call = list[_Stream](), None
        while True:
            if call is None and not (streams and queue.empty()):
                call = queue.get()
            if call is not None and _may_begin(call, streams):
                streams += self._begun(backend, call)
                call = None
                if not queue.empty():  # all that were asked at once begin at once
                    continue
            streams = [stream for stream in streams if self._goes_on(stream)]

    def _begun(self, backend: Backend, call: wire.Call) -> list[_Stream]:
        """The stream of a call; one without a stream is answered."""
        with self._explaining(call):
            method = getattr(backend, call.method)
            if call.is_stream:
                values = method(*call.arguments, self._cancels[call.call_id])
                return [_Stream(call, iter(values))]
            self._send(wire.Returned(call.call_id, method(*call.arguments)))
        return []

    def _goes_on(self, stream: _Stream) -> bool:
        """Take a stream's next item; False after the last."""
        with self._explaining(stream.call):
            for value in stream.values:
                stream.waiting.append(value)
                if stream.is_due:
                    self._send(stream.group())
                return True
            if stream.waiting:
                self._send(stream.group())
            self._send(wire.Returned(stream.call.call_id, None))
        self._cancels.pop(stream.call.call_id, None)
        return False

    @contextlib.contextmanager
    def _explaining(self, call: wire.Call) -> Iterator[None]:
        """Whatever the call raises is its answer."""
        try:
            yield
        except EngineLost as error:
            self._send(wire.fault_of(call.call_id, error))
            os._exit(LOST_CODE)  # a lost device may hang an orderly exit
        except BaseException as error:  # a panic of a Rust library is no Exception
            self._cancels.pop(call.call_id, None)
            self._send(_explained(call.call_id, error))

    def _report(self, phrase: str) -> None:
        self._send(wire.Items(wire.OPEN_CALL, [phrase]))

    def _send(self, message: object) -> None:
        data = wire.packed(message)
        try:
            with self._sending:
                wire.send(self._pipe, data)
        except wire.Hangup:
            os._exit(0)


@dataclass(eq=False)
class _Stream:
    """The items of one call. waiting: those that are not sent yet."""

    call: wire.Call
    values: Iterator[Any]
    waiting: list[Any] = field(default_factory=list)
    num_groups: int = 0
    sent_s: float = 0.0

    @property
    def is_due(self) -> bool:
        return self.num_groups < AT_ONCE or time.monotonic() - self.sent_s >= FLUSH_S

    def group(self) -> wire.Items:
        """What is waiting, to be sent now."""
        found, self.waiting = self.waiting, []
        self.num_groups, self.sent_s = self.num_groups + 1, time.monotonic()
        return wire.Items(self.call.call_id, found)


def _may_begin(call: wire.Call, streams: Sequence[_Stream]) -> bool:
    """Whether a call may be answered while these streams are open."""
    are_together = all(stream.call.method in TOGETHER for stream in streams)
    return not streams or (are_together and call.method in TOGETHER | BETWEEN)


def _explained(call_id: int, error: BaseException) -> wire.Failed:
    if not isinstance(error, LocalspecError):
        log.error("a call of the engine failed", exc_info=error)
    return wire.fault_of(call_id, error)
