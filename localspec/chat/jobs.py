"""What the worker runs beside replies, and how a job that failed is told.

Contract: `attempted` never raises: whatever a job raises is returned as an error that can be shown.

Not here: the queue and its thread (worker).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from localspec.chat.turn import unexpected
from localspec.core.backend import Backend
from localspec.core.errors import LocalspecError, UnexpectedFault

Job = Callable[[Backend, threading.Event], None]

log = logging.getLogger(__name__)


class Task:
    """A job that needs the backend to itself. error: the sentence to show when it failed, None
    otherwise; final once `done` is set. gives_way: it is cancelled where anything else waits."""

    def __init__(self, name: str, job: Job, gives_way: bool = False) -> None:
        self.name = name
        self.gives_way = gives_way
        self.cancel = threading.Event()
        self.done = threading.Event()
        self.error: str | None = None
        self.job = job


def attempted(name: str, act: Callable[[], None]) -> LocalspecError | None:
    """Run it; why it failed, None where it did not."""
    try:
        act()
    except LocalspecError as fault:
        return fault
    except Exception as fault:  # the edge of one job: the next one must run
        log.exception("a job failed: %s", name)
        return UnexpectedFault(unexpected(name, fault))
    return None
