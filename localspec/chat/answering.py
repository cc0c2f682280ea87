"""One reply, from the conversation to its end, on a backend that is there.

Contract: `answer` feeds the reply with what the backend yields and checkpoints it as it grows; it
returns how it ended and never raises, so that the turn after it works. What was written stays.

Not here: when it runs and what happens after an engine was lost (worker), the log (journal).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from localspec.backend import Backend, Description, Request
from localspec.chat.journal import Journal
from localspec.chat.turn import Reply, check_servable, turn_settings, unexpected
from localspec.core import FinishReason
from localspec.errors import EngineLost, LocalspecError

CHECKPOINT_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """How a reply ended. loss: set where the engine was lost over it. is_relieved: see Chunk.
    is_begun: whether the backend was asked to generate."""

    reason: FinishReason
    error: str | None = None
    loss: EngineLost | None = None
    is_relieved: bool | None = None
    is_begun: bool = True


def answer(
    reply: Reply,
    backend: Backend,
    loaded: Description,
    journal: Journal,
    make_request: Callable[[Reply], Request],
) -> Ended:
    """make_request: called when the turn begins, since replies before it in the queue belong to
    the conversation."""
    is_begun = False
    try:
        request = make_request(reply)
        check_servable(loaded, backend.count_tokens, request)
        reply.entry.settings = turn_settings(reply.settings, loaded)
        journal.update(reply.entry)
        is_begun = True
        return _generate(reply, backend, journal, request)
    except EngineLost as loss:
        return Ended("interrupted", _interrupted(loss), loss, is_begun=is_begun)
    except LocalspecError as fault:
        return Ended("error", str(fault))
    except Exception as fault:  # the edge of one turn: the next turn must work
        log.exception("a reply failed")
        return Ended("error", unexpected("The reply", fault))


def _generate(reply: Reply, backend: Backend, journal: Journal, request: Request) -> Ended:
    reply.view = replace(reply.view, phase="prefill", position=0)
    checkpoint_s = time.monotonic()
    is_relieved: bool | None = None
    with closing(backend.generate(request, reply.cancel)) as chunks:  # type: ignore[type-var]
        for chunk in chunks:
            reply.take(chunk)
            is_relieved = chunk.is_relieved
            if time.monotonic() - checkpoint_s >= CHECKPOINT_S:
                journal.checkpoint(reply.entry, reply.view.text)
                checkpoint_s = time.monotonic()
    if reply.view.finish_reason is None:
        return Ended("error", "The engine ended the reply without saying why. Send it again.")
    return Ended(reply.view.finish_reason, reply.view.error, None, is_relieved)


def _interrupted(loss: EngineLost) -> str:
    return f"{loss} What was written is kept. Continue it, or send the message again."
