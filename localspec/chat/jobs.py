"""What the worker runs beside replies, and how a job that failed is told.

Contract: `attempted` never raises: whatever a job raises becomes a `Failure` with its sentence.

Not here: the queue and its thread (worker).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from localspec.backend import Backend
from localspec.chat.turn import Reply, unexpected
from localspec.errors import EngineLost, LocalspecError

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


def no_task(latest: Reply | None) -> Task | None:
    """Nothing to do when idle."""
    return None


@dataclass(frozen=True)
class Failure:
    """Why a job failed. error: as a sentence. loss: set where the engine was lost. fault: the
    other errors of ours."""

    error: str
    loss: EngineLost | None = None
    fault: LocalspecError | None = None


def attempted(name: str, act: Callable[[], None]) -> Failure | None:
    """Run it; why it failed, None where it did not."""
    try:
        act()
    except EngineLost as loss:
        return Failure(str(loss), loss)
    except LocalspecError as fault:
        return Failure(str(fault), fault=fault)
    except Exception as fault:  # the edge of one job: the next one must run
        log.exception("a job failed: %s", name)
        return Failure(unexpected(name, fault))
    return None
