"""Chat templates run in a process of their own, where their time and memory have limits.

Contract: `TemplateProcess.render` gives what transformers makes of a conversation, by its own code.
A template is a program of strangers: one that runs longer than LIMIT_S, holds more than MOST_BYTES
or makes a text out of proportion is stopped, and RequestError says so. The next call starts another
process. The process ends with this one.

Not here: what is rendered (template), the other end (template_child).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from localspec.errors import RequestError

CHILD = Path(__file__).with_name("template_child.py")
LIMIT_S, MOST_BYTES = 5.0, 512 * 2**20
LOOK_S = 0.02  # between looks at its memory

Child = subprocess.Popen[str]


class TemplateProcess:
    """One process for all templates; it is started ahead of the first call, since it takes a
    moment to be there. limit_s: of one call."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="template")
        self._child = _started(self)

    def render(self, asked: Mapping[str, Any]) -> str:
        """asked: the arguments of transformers' render_jinja_template. Raises RequestError."""
        with self._lock:
            if self._child.poll() is not None:
                self._child = _started(self)
            answer = self._answer(json.dumps(asked, default=str))
        if "refusal" in answer:
            raise RequestError(
                f"This model's chat template refuses the conversation: {answer['refusal']} "
                "If a system prompt is set, clear it; otherwise start a new chat."
            )
        if "fault" in answer:
            raise _unusable(f"is damaged: {answer['fault'].rstrip('.')}")
        return str(answer["text"])

    def _answer(self, line: str) -> dict[str, Any]:
        child = self._child
        assert child.stdin is not None and child.stdout is not None, "both are pipes"
        try:
            child.stdin.write(f"{line}\n")
            child.stdin.flush()
        except OSError:  # it ended while nothing was asked
            raise _stopped("its process ended") from None
        reading = self._readers.submit(child.stdout.readline)
        while True:
            try:
                answer = reading.result(timeout=LOOK_S)
            except TimeoutError:
                if _held_bytes(child) > MOST_BYTES:
                    child.kill()
                    child.wait()
                    raise _stopped(f"it took more than {MOST_BYTES >> 20} MiB of memory") from None
                continue
            if not answer:
                child.wait()
                raise _stopped(f"it ran for more than {self.limit_s:.0f} seconds")
            return dict(json.loads(answer))


def template_process() -> TemplateProcess:
    """The one of this process; a fork has one of its own."""
    return _process_of(os.getpid())


@cache  # one that is let go is ended, and a fork holds its parent's
def _process_of(_pid: int) -> TemplateProcess:
    return TemplateProcess()


def _started(owner: TemplateProcess) -> Child:
    # -P: the folder of the file is no place to import from.
    child = subprocess.Popen(
        [sys.executable, "-P", str(CHILD), str(owner.limit_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    weakref.finalize(owner, _end, child)
    return child


def _end(child: Child) -> None:
    child.kill()
    child.communicate()


def _held_bytes(child: Child) -> int:
    try:
        return int(psutil.Process(child.pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _stopped(reason: str) -> RequestError:
    return _unusable(f"was stopped: {reason}, as no published template does")


def _unusable(what: str) -> RequestError:
    return RequestError(
        f"This model's chat template {what}. Fetch the model again, or choose another one."
    )
