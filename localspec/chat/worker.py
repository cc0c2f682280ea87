"""The one thread that works with the backend: replies and tasks, one at a time, in their order.

Contract: while the queue is empty it measures costs, checks that the engine lives, and unloads the
model after a time without work; the next job loads it again. Whatever a job does, the next one
runs. An order (switch, unload, retry) goes before everything that waits and ends a load under way.
A reply never raises: what was generated is kept, and checkpointed as it grows.

Not here: the backend's states (backend_lifecycle), the log (journal), what pages ask (service).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from localspec.backend import Backend, Request
from localspec.chat.backend_lifecycle import BackendLifecycle
from localspec.chat.journal import Journal
from localspec.chat.turn import Reply, TurnPhase, check_servable, turn_settings, unexpected
from localspec.core import FinishReason
from localspec.errors import EngineLost, LocalspecError

WATCH_S = 0.5  # how often an idle engine is checked
CHECKPOINT_S = 1.0
DIED_IDLE = "The engine ended while nothing was asked of it."

Job = Callable[[Backend, threading.Event], None]

log = logging.getLogger(__name__)


class Task:
    """A job that needs the backend to itself. error: the sentence to show when it failed, None
    otherwise; final once `done` is set."""

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self.cancel = threading.Event()
        self.done = threading.Event()
        self.error: str | None = None
        self.job = job


@dataclass(frozen=True)
class ReplyEnd:
    """How a reply ended. loss: set where the engine was lost meanwhile. is_relieved: see Chunk.
    was_asked: whether the backend was asked to generate."""

    reason: FinishReason
    error: str | None = None
    loss: EngineLost | None = None
    is_relieved: bool | None = None
    was_asked: bool = True


class Worker:
    """See the module. make_request: the request of a reply at the moment its turn begins, for the
    replies before it in the queue belong to the conversation. unload_after_s: None never unloads.
    """

    def __init__(
        self,
        lifecycle: BackendLifecycle,
        journal: Journal,
        make_request: Callable[[Reply], Request],
        unload_after_s: float | None = None,
    ) -> None:
        self.current: Reply | Task | None = None
        self.latest: Reply | None = None
        self._lifecycle = lifecycle
        self._journal = journal
        self._make_request = make_request
        self._unload_after_s = unload_after_s
        self._waiting: deque[Reply | Task] = deque()
        self._orders: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._worked_s = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="chat", daemon=True)

    # called from any thread

    def start(self) -> None:
        if not self._thread.ident:
            self._thread.start()

    def close(self) -> None:
        """End what runs and waits, release the backend."""
        with self._changed:
            self._is_closed = True
            for job in (*self._waiting, self.current):
                if job is not None:
                    job.cancel.set()
            self._interrupt()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def queue(self, job: Reply | Task) -> None:
        with self._changed:
            self._waiting.append(job)
            self._number_queue()
            self._lifecycle.pause.set()
            self._changed.notify_all()

    def order(self, act: Callable[[], None]) -> None:
        """Change the lifecycle before any other job."""
        with self._changed:
            self._orders.append(act)
            self._interrupt()

    def remove(self, job: Reply | Task) -> bool:
        """Take a waiting job out of the queue; False where it does not wait."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            self._number_queue()
            return True

    @property
    def replies(self) -> list[Reply]:
        """The reply under way and those that wait."""
        return [job for job in (self.current, *list(self._waiting)) if isinstance(job, Reply)]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def finish(self, reply: Reply, end: ReplyEnd) -> None:
        """Record the end of a reply and wake those who wait for it."""
        reply.end(end.reason, end.error)
        if reply.pending.settings is None:
            reply.pending.settings = turn_settings(reply.settings, self._lifecycle.loaded)
        self._journal.update()
        with self._changed:
            if self.current is reply:
                self.current = None
            self.latest = reply
        reply.done.set()

    def _interrupt(self) -> None:
        self._lifecycle.pause.set()
        self._lifecycle.abandon.set()
        self._changed.notify_all()

    def _number_queue(self) -> None:
        ahead = 0 if self.current is None else 1
        is_loading = self._lifecycle.phase in ("loading", "unloaded", "restarting")
        phase: TurnPhase = "loading" if is_loading else "queued"
        for place, job in enumerate(self._waiting):
            if isinstance(job, Reply):
                job.view = replace(job.view, phase=phase, position=ahead + place)

    # the thread

    def _work(self) -> None:
        if not self._is_closed:
            self._lifecycle.load()
        while (act := self._next()) is not None:
            try:
                act()
            except EngineLost as loss:
                self._lifecycle.restart(loss)
            except Exception:  # the edge of the thread: the chat must go on
                log.exception("the worker failed")
        self._lifecycle.close()

    def _next(self) -> Callable[[], None] | None:
        """What to do now; None at the end."""
        with self._changed:
            has_work = self._waiting or self._orders or self._is_closed
            if not has_work and not self._lifecycle.needs_calibration:
                self._changed.wait(WATCH_S)
            if self._is_closed and not self._waiting:
                return None
            order = self._orders.popleft() if self._orders else None
            if not self._orders and not self._is_closed:
                self._lifecycle.abandon.clear()
            if order is not None:
                return partial(self._do, order)
            self.current = self._waiting.popleft() if self._waiting else None
            self._number_queue()
            self._lifecycle.pause.clear()
            job = self.current
        if job is None:
            return self._idle
        act = partial(self._answer, job) if isinstance(job, Reply) else partial(self._run, job)
        return partial(self._do, act, is_needed=not job.cancel.is_set())

    def _do(self, act: Callable[[], None], is_needed: bool = False) -> None:
        if is_needed and self._lifecycle.is_unloaded:
            self._lifecycle.load()
        act()
        self._worked_s = time.monotonic()

    def _idle(self) -> None:
        lifecycle = self._lifecycle
        if lifecycle.backend is None:
            return
        if not lifecycle.backend.is_alive():
            raise EngineLost(DIED_IDLE)
        idle_s = time.monotonic() - self._worked_s
        if lifecycle.needs_calibration:
            lifecycle.calibrate()
        elif self._unload_after_s is not None and idle_s >= self._unload_after_s:
            lifecycle.release(
                "Nothing was asked for a while; the next message loads the model again."
            )

    def _finish_job(self, loss: EngineLost | None) -> None:
        if loss is not None:
            raise loss
        self._lifecycle.went_well()

    # one task

    def _run(self, task: Task) -> None:
        lifecycle, loss = self._lifecycle, None
        try:
            if lifecycle.backend is None:
                task.error = lifecycle.refusal
            elif not task.cancel.is_set():
                lifecycle.enter("busy", task.name)
                task.job(lifecycle.backend, task.cancel)
        except EngineLost as error:
            loss, task.error = error, str(error)
        except LocalspecError as error:
            task.error = str(error)
        except Exception as error:  # the edge of one task: the next job must run
            log.exception("a task failed: %s", task.name)
            task.error = unexpected(task.name, error)
        if lifecycle.phase == "busy":
            lifecycle.enter("ready", "Ready")
        with self._changed:
            self.current = None
        task.done.set()
        self._finish_job(loss)

    # one reply

    def _answer(self, reply: Reply) -> None:
        if reply.cancel.is_set():
            self.finish(reply, ReplyEnd("cancelled"))
            return
        end = self._try_to_answer(reply)
        if end.loss is not None and not end.was_asked:
            reply.view = replace(reply.view, phase="loading")
            self._lifecycle.restart(end.loss)  # lost before it was asked: the message can wait
            end = self._try_to_answer(reply)
        if end.is_relieved is False:
            self._finish_short_of_memory(reply, end)
        else:
            self.finish(reply, end)
        if self._lifecycle.backend is not None:
            self._finish_job(end.loss)

    def _try_to_answer(self, reply: Reply) -> ReplyEnd:
        backend, loaded = self._lifecycle.backend, self._lifecycle.loaded
        if backend is None or loaded is None:
            return ReplyEnd("error", self._lifecycle.refusal, was_asked=False)
        was_asked = False
        try:
            request = self._make_request(reply)
            check_servable(loaded, backend.count_tokens, request)
            reply.pending.settings = turn_settings(reply.settings, loaded)
            self._journal.update()
            was_asked = True
            return self._generate(reply, backend, request)
        except EngineLost as loss:
            error = f"{loss} What was written is kept. Continue it, or send the message again."
            return ReplyEnd("interrupted", error, loss, was_asked=was_asked)
        except LocalspecError as fault:
            return ReplyEnd("error", str(fault))
        except Exception as fault:  # the edge of one turn: the next turn must work
            log.exception("a reply failed")
            return ReplyEnd("error", unexpected("The reply", fault))

    def _generate(self, reply: Reply, backend: Backend, request: Request) -> ReplyEnd:
        reply.view = replace(reply.view, phase="prefill", position=0)
        checkpoint_s = time.monotonic()
        is_relieved: bool | None = None
        with closing(backend.generate(request, reply.cancel)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                reply.add(chunk)
                is_relieved = chunk.is_relieved
                if time.monotonic() - checkpoint_s >= CHECKPOINT_S:
                    self._journal.checkpoint(reply.pending, reply.view.text)
                    checkpoint_s = time.monotonic()
        if reply.view.finish_reason is None:
            return ReplyEnd("error", "The engine ended the reply without a reason. Send it again.")
        return ReplyEnd(reply.view.finish_reason, reply.view.error, is_relieved=is_relieved)

    def _finish_short_of_memory(self, reply: Reply, end: ReplyEnd) -> None:
        """The backend can free no more: load a shorter context, or offer a smaller model."""
        lifecycle, stats = self._lifecycle, reply.view.stats
        used = 0 if stats is None else stats.num_prompt_tokens + stats.num_output_tokens
        options = lifecycle.shorter(used + reply.settings.max_tokens)
        if options is None:
            error = f"{end.error} {lifecycle.offer_smaller()}"
            self.finish(reply, replace(end, error=error))
            return
        before = lifecycle.loaded.context_length if lifecycle.loaded is not None else None
        notice = (
            f"The model is loaded again with a context of {options.context} instead of {before} "
            "tokens; the next message uses it."
        )
        self.finish(reply, replace(end, error=f"{end.error} {notice}"))
        lifecycle.switch(options)
        lifecycle.notices += (f"Memory ran out. {notice}",)
