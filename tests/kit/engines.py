"""Backends for the engine's process of the tests, opened there by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localspec.core.backend import Chunk, Description, Message, Request
from localspec.core.errors import ContextOverflow, EngineLost, MemoryShortage
from localspec.core.hindsight import Hindsight
from localspec.remote import child
from localspec.remote.wire import Opening
from tests.kit.fakes import FIVE_WORDS, REPLY, FakeBackend, Script
from tests.kit.waiting import until

Report = Callable[[str], None]

# What a message asks of `playing`, beside the deeds of Playing.
HI, SLOW, LONG = "hi", "slow", "long"
CONTEXT_LENGTH = 9000
JUDGED = Hindsight("ngram", 9, 2, 4, 3, None, None)
PHRASES = tuple(f"Measuring {number}" for number in range(20))


@contextmanager
def forked_quickly() -> Iterator[None]:
    """Engines' processes begin as copies of one that has imported what they need."""
    multiprocessing.set_forkserver_preload(["pytest", __name__, "localspec.remote.engine"])
    with pytest.MonkeyPatch.context() as patch:
        if "forkserver" in multiprocessing.get_all_start_methods():
            patch.setattr(child, "PROCESSES", multiprocessing.get_context("forkserver"))
        yield


def opening(name: str, **keywords: Any) -> Opening:
    """Of a function below."""
    return Opening(f"tests.kit.engines:{name}", keywords)


@dataclass
class Playing(FakeBackend):
    """A fake that does what the newest message says, after `at_round` rounds of the reply.

    notes: a file that gets a line for each round, so that the other process can count them.
    """

    notes: Path | None = None
    at_round: int = 3
    deeds: dict[str, Callable[[], None]] = field(
        default_factory=lambda: {
            "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "exit": lambda: os._exit(7),
            "lost": _lose,
            "shortage": _run_short,
            "bug": _divide,
            "odd": _odd,
            "panic": _panic,
        }
    )

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        if messages[-1].content == "panic in counting":
            _panic()
        return super().count_tokens(messages, tools)

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        chunks = super().generate(request, cancel)
        return self._played(chunks, request.messages[-1].content)

    def _played(self, chunks: Iterator[Chunk], asked: str) -> Iterator[Chunk]:
        for number, chunk in enumerate(chunks, -1):
            if self.notes is not None:
                with self.notes.open("a") as file:
                    file.write(f"{chunk.phase} {os.getpid()}\n")
            if number == self.at_round and asked in self.deeds:
                self.deeds[asked]()
            yield chunk


def _lose() -> None:
    raise EngineLost("The device stopped computing: an illegal memory access.")


def _run_short() -> None:
    raise MemoryShortage("The cache needs 1 GiB more. Shorten the context.")


def _divide() -> None:
    raise ZeroDivisionError("division by zero")


class OddError(Exception):
    """An error that the page's process does not know."""


def _odd() -> None:
    raise OddError("who am I?")


class PanicException(BaseException):
    """As libraries in Rust raise it: no Exception."""


def _panic() -> None:
    raise PanicException("index out of bounds")


def playing(report: Report, notes: Path | None = None, **script: Any) -> Playing:
    """A reply is short, takes seconds, or has thousands of tokens, as the message says."""
    report("Loading the target")
    usual = {
        "reply": lambda asked: "word " * 3000 if asked.messages[-1].content == LONG else REPLY,
        "round_s": lambda asked: 0.05 if asked.messages[-1].content == SLOW else 0.001,
        "context_length": CONTEXT_LENGTH,
        "hindsight": (JUDGED,),
        "calibration": PHRASES,
        "calibration_step_s": 0.05,
    }
    return Playing(Script(**{**usual, **script}), notes=notes)


def with_a_stopped_child(report: Report, notes: Path) -> Playing:
    """Starts a process that no end of a pipe reaches, and notes its number."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(child.pid, signal.SIGSTOP)
    notes.write_text(str(child.pid))
    return Playing()


def overflowing(report: Report) -> FakeBackend:
    raise ContextOverflow(700, 512, 1024)


def dying(report: Report, counter: Path, num_deaths: int = 99) -> Playing:
    """Ends while it loads, the first `num_deaths` times."""
    report("Loading the target")
    with counter.open("a") as file:
        file.write("x")
    if len(counter.read_text()) <= num_deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return playing(report)


def slow_to_open(report: Report, notes: Path | str) -> FakeBackend:
    Path(notes).write_text(str(os.getpid()))
    report("Loading slowly")
    time.sleep(60)
    return FakeBackend()


def silent_to_open(report: Report, go_on: Path) -> FakeBackend:
    """Says nothing while it loads, until the file `go_on` is there."""
    until(go_on.exists)
    return FakeBackend()


def busy(report: Report) -> Playing:
    """Talks on the channels that libraries talk on."""
    print("a library prints", flush=True)
    print("and complains", file=sys.stderr, flush=True)
    return playing(report)


class DyingAt(FakeBackend):
    """Ends its process at the `at`-th of all calls and chunks of all engines that count in one
    file; not any more once a file "healed" is beside it."""

    def __init__(self, script: Script, calls: Path, at: int) -> None:
        super().__init__(script)
        self._calls, self._at = calls, at

    def _count(self) -> None:
        with self._calls.open("a") as file:
            file.write("x")
        is_healed = self._calls.with_name("healed").exists()
        if self._calls.stat().st_size == self._at and not is_healed:
            os.kill(os.getpid(), signal.SIGKILL)

    def describe(self) -> Description:
        self._count()
        return super().describe()

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        self._count()
        return super().count_tokens(messages, tools)

    def snapshot(self) -> dict[str, Any]:
        self._count()
        return super().snapshot()

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        for chunk in super().generate(request, cancel):
            self._count()
            yield chunk


def dying_at(report: Report, calls: Path, at: int) -> DyingAt:
    return DyingAt(FIVE_WORDS, calls, at)
