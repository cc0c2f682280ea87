"""Backends for the engine's process of the tests, opened there by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localspec.backend import Chunk, Request
from localspec.errors import ContextOverflow, EngineLost, MemoryShortage
from localspec.remote.wire import Opening
from tests.fakes import FakeBackend, Script

Report = Callable[[str], None]


def opening(name: str, **keywords: Any) -> Opening:
    """Of a function below."""
    return Opening(f"tests.remote.engines:{name}", keywords)


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
        }
    )

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


def playing(report: Report, notes: Path | None = None, at_round: int = 3, **script: Any) -> Playing:
    report("Loading the target")
    return Playing(Script(**{"round_s": 0.005, **script}), notes=notes, at_round=at_round)


def refusing(report: Report) -> FakeBackend:
    raise MemoryShortage("demo needs 9 GiB, and 2 GiB is free. A smaller model would fit.")


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


def busy(report: Report) -> Playing:
    """Talks on the channels that libraries talk on."""
    print("a library prints", flush=True)
    print("and complains", file=sys.stderr, flush=True)
    return playing(report)
