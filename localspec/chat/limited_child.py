"""A child process with limits of time and memory, for input that strangers made.

`LimitedChild` is the parent's end: it asks one question at a time and waits for the answer no
longer than its own limit, whatever the child is doing. `answer_questions` is the child's end. A
question and an answer are each a line of JSON. The child ends when its input ends, and by limits of
its own when the parent was killed.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
# Seconds between two looks at the child's memory.
LOOK_S = 0.02
# Seconds by which the child's own limits are wider, so that the parent's act first and are named.
GRACE_S = 2.0


@dataclass(frozen=True)
class Limits:
    """What the answer to one question may take: seconds, and bytes of memory."""

    seconds: float
    num_bytes: int


class ChildEnded(Exception):
    """The child was ended without an answer. The message is a clause: "it ran for more than".

    may_pass: the question did not end it, as far as can be known: somebody killed or stopped the
    child, and another one may answer."""

    def __init__(self, reason: str, may_pass: bool = False) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


class LimitedChild:
    """A child that runs a module of localspec, which calls `answer_questions`."""

    def __init__(self, module: str, limits: Limits) -> None:
        self._limits = limits
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, str(limits.seconds), str(limits.num_bytes)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",  # what json.dumps writes
            start_new_session=True,  # a group of its own: `close` ends what the child started, too
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(
        self,
        question: Mapping[str, Any],
        stop: threading.Event | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Return the answer. Raise ChildEnded, after which the child is gone, if it takes too much,
        if it ends, or if `stop` is set. seconds: less than the limits have."""
        limit_s = self._limits.seconds if seconds is None else seconds
        answers: SimpleQueue[str] = SimpleQueue()
        line = f"{json.dumps(question)}\n"
        self._thread = threading.Thread(target=self._exchange, args=(line, answers), daemon=True)
        self._thread.start()
        used_s = _processor_s(self._child.pid)
        waited_s = 0.0  # by waits and not by the clock: a computer that slept did not wait
        while True:
            with suppress(Empty):
                answer = answers.get(timeout=LOOK_S)
                break
            waited_s += LOOK_S
            excess = self._excess(waited_s, limit_s)
            if stop is not None and stop.is_set():
                excess = "it was stopped"
            if excess is not None:
                is_still = _processor_s(self._child.pid) - used_s < waited_s / 2
                self.close()
                raise ChildEnded(excess, may_pass=waited_s > limit_s and is_still)
        if not answer:
            self.close()
            raise ChildEnded("its process ended", may_pass=True)
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the child and all that it started, whatever it is doing. A second call does nothing:
        the number of the process may be another's by then."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._child.pid, signal.SIGKILL)
        self._child.kill()
        self._child.wait()
        if self._thread is not None:
            self._thread.join()  # both pipes are at their end
        for pipe in (self._child.stdin, self._child.stdout):
            with suppress(OSError):  # what was not written yet has no reader
                pipe.close()  # type: ignore[union-attr]

    def _exchange(self, line: str, answers: SimpleQueue[str]) -> None:
        """Put the child's answer, or "" if it ended. Both pipes may block: a thread does this."""
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        try:
            stdin.write(line)
            stdin.flush()
            answers.put(stdout.readline())
        except (OSError, ValueError):
            answers.put("")

    def _excess(self, waited_s: float, limit_s: float) -> str | None:
        """Return the limit that is passed, as a clause; None while there is none."""
        if waited_s > limit_s:
            return f"it ran for more than {limit_s:.0f} seconds"
        if _held_bytes(self._child.pid) > self._limits.num_bytes:
            return f"it took more than {self._limits.num_bytes >> 20} MiB of memory"
        return None


def _held_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _processor_s(pid: int) -> float:
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0
    return float(used.user + used.system)


def answer_questions(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer each line of the input until the input ends. The limits are the module's arguments."""
    limits = Limits(float(sys.argv[1]), int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            _limit(limits)
            faulthandler.dump_traceback_later(limits.seconds + GRACE_S, exit=True, file=nowhere)
            answers.write(f"{json.dumps(answer(json.loads(line)))}\n")
            answers.flush()
            faulthandler.cancel_dump_traceback_later()


def _limit(limits: Limits) -> None:
    """Set the system's own limits, where it has them; macOS refuses the one of memory."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        end_s = math.ceil(time.process_time() + limits.seconds + GRACE_S)
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (limits.num_bytes, resource.RLIM_INFINITY))
