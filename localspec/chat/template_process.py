"""Chat templates run in a process of their own, where their time and memory have limits.

`TemplateProcess.render` gives what transformers makes of a conversation, by its own code. A
template is a program of strangers: one that runs longer than LIMIT_S, holds more than MOST_BYTES or
makes a text out of proportion is stopped, and RequestError says so. A process that was killed or
stopped by somebody else is replaced and asked once more; the template is not blamed for it.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

from localspec.chat.limited_child import ChildEnded, LimitedChild, Limits
from localspec.core.errors import RequestError

MODULE = "localspec.chat.template_child"
# Seconds for one text, and the memory of the process; published templates need far less of both.
LIMIT_S, MOST_BYTES = 5.0, 512 * 2**20
# Seconds for the start of the process, which reads many files from a disk that may be busy.
START_S = 30.0


class TemplateProcess:
    """One process for all templates; it is started ahead of the first call, since it takes a
    moment to be there. limit_s: of one call."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._start()

    def render(self, asked: Mapping[str, Any]) -> str:
        """asked: the arguments of transformers' render_jinja_template. Raises RequestError."""
        question = json.loads(json.dumps(asked, default=str))
        with self._lock:
            answer = self._answer(question)
        if "refusal" in answer:
            raise RequestError(
                f"This model's chat template refuses the conversation: {answer['refusal']} "
                "If a system prompt is set, clear it; otherwise start a new chat."
            )
        if "fault" in answer:
            raise _unusable(f"is damaged: {answer['fault'].rstrip('.')}")
        return str(answer["text"])

    def _start(self) -> None:
        self._child = LimitedChild(MODULE, Limits(START_S, MOST_BYTES))
        self._is_ready = False
        weakref.finalize(self, self._child.close)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._asked(question)
        except ChildEnded as ended:
            if not ended.may_pass:
                raise _stopped(ended) from None
        try:
            return self._asked(question)
        except ChildEnded as ended:
            if not ended.may_pass:
                raise _stopped(ended) from None
            raise RequestError(
                f"The process that applies chat templates gave no answer, at a second try too: "
                f"{ended}. Something stopped it, or memory ran short. Close other programs, then "
                "send again."
            ) from None

    def _asked(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask the process; another one is started where it ended."""
        try:
            if not self._is_ready:
                self._child.ask({})
                self._is_ready = True
            return self._child.ask(question, seconds=self.limit_s)
        except ChildEnded:
            self._start()
            raise


def template_process() -> TemplateProcess:
    """The one of this process; a fork has one of its own."""
    return _process_of(os.getpid())


@cache  # one that is let go is ended, and a fork holds its parent's
def _process_of(_pid: int) -> TemplateProcess:
    return TemplateProcess()


def _stopped(ended: ChildEnded) -> RequestError:
    return _unusable(f"was stopped: {ended}, as no published template does")


def _unusable(what: str) -> RequestError:
    return RequestError(
        f"This model's chat template {what}. Fetch the model again, or choose another one."
    )
