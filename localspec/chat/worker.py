"""The one thread that works with the backend: replies and tasks, one at a time, in their order.

Contract: while the queue is empty it measures costs, checks that the engine lives, and unloads the
model after a time without work; the next job loads it again. Whatever a job does, the next one
runs. An order (switch, unload, retry) goes before everything that waits and ends a load under way.
A job never raises: its error is a sentence, and what was generated of a reply is kept, and
checkpointed as it grows.

Not here: the backend's states (backend_lifecycle), the log (journal), what pages ask (service).
"""

from __future__ import annotations

import logging
import math
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
from localspec.chat.turn import Reply, TurnPhase, turn_settings, unexpected
from localspec.core import FinishReason
from localspec.errors import EngineLost, LocalspecError

WATCH_S = 0.5  # how often an idle engine is checked
CHECKPOINT_S = 1.0  # between two checkpoints of a reply that has run for 10 s or more
FIRST_CHECKPOINT_S = 0.1  # and of one that has just begun: a tenth of its time in between
IDLE_TASK_S = 1.5
CLOSE_S = 10.0  # for the forward under way to end
DIED_IDLE = "The engine ended while nothing was asked of it."

Job = Callable[[Backend, threading.Event], None]

log = logging.getLogger(__name__)


def checkpoint_every_s(age_s: float) -> float:
    """Between the checkpoints of a reply of this age, so that a crash costs about a tenth of it."""
    return min(CHECKPOINT_S, max(FIRST_CHECKPOINT_S, age_s / 10))


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


class Worker:
    """See the module. make_request: the request of a reply at the moment its turn begins, for the
    replies before it in the queue belong to the conversation. unload_after_s: None never unloads.
    when_idle: a task that gives way, after this latest reply and IDLE_TASK_S without work."""

    def __init__(
        self,
        lifecycle: BackendLifecycle,
        journal: Journal,
        make_request: Callable[[Reply], Request],
        unload_after_s: float | None = None,
        when_idle: Callable[[Reply | None], Task | None] = no_task,
    ) -> None:
        self.current: Reply | Task | None = None
        self.latest: Reply | None = None
        self._lifecycle = lifecycle
        self._journal = journal
        self._make_request = make_request
        self._unload_after_s = unload_after_s
        self._when_idle = when_idle
        self.when_ended: Callable[[Reply], None] = lambda reply: None  # from the worker's thread
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
            self._thread.join(CLOSE_S)
        backend = self._lifecycle.backend
        if self._thread.is_alive() and backend is not None:
            backend.close()  # it does not answer, and must not outlive this process
            self._thread.join(CLOSE_S)

    def queue(self, job: Reply | Task) -> None:
        with self._changed:
            self._waiting.append(job)
            self._number_queue()
            self._make_way()
            self._lifecycle.pause.set()
            self._changed.notify_all()

    def order(self, act: Callable[[], None]) -> None:
        """Change the lifecycle before any other job."""
        with self._changed:
            self._orders.append(act)
            self._interrupt()

    def stop(self, reply: Reply) -> None:
        """End a reply within one round, or take it out of the queue."""
        reply.cancel.set()
        if self._withdraw(reply):
            self._finish(reply, "cancelled")

    def take_back(self, reply: Reply) -> bool:
        """Drop a reply that still waits and its turn, as if it had never been asked for; False once
        it began. Raises StoreError; then it waits again."""
        if not self._withdraw(reply):
            return False
        try:
            self._journal.take_back(reply.pending)
        except BaseException:
            self.queue(reply)
            raise
        reply.cancel.set()
        reply.done.set()
        return True

    def _withdraw(self, reply: Reply) -> bool:
        with self._changed:
            if reply not in self._waiting:
                return False
            self._waiting.remove(reply)
            self._number_queue()
        return True

    @property
    def replies(self) -> list[Reply]:
        """The reply under way and those that wait."""
        return [job for job in (self.current, *list(self._waiting)) if isinstance(job, Reply)]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _make_way(self) -> None:
        if isinstance(self.current, Task) and self.current.gives_way:
            self.current.cancel.set()

    def _interrupt(self) -> None:
        self._make_way()
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
                return partial(self._work_on, order)
            job = self.current = self._waiting.popleft() if self._waiting else None
            self._number_queue()
            self._lifecycle.pause.clear()
        if job is None:
            return self._idle
        act = partial(self._answer, job) if isinstance(job, Reply) else partial(self._run, job)
        return partial(self._work_on, act, needs_backend=not job.cancel.is_set())

    def _work_on(self, act: Callable[[], None], needs_backend: bool = False) -> None:
        if needs_backend and self._lifecycle.phase == "unloaded":
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
        elif idle_s >= IDLE_TASK_S and (task := self._when_idle(self.latest)) is not None:
            with self._changed:
                if self._waiting or self._orders or self._is_closed:
                    return
                self.current = task
            self._run(task)

    # one job

    def _attempt(self, name: str, act: Callable[[], None]) -> Failure | None:
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

    def _after_job(self, failure: Failure | None) -> None:
        if failure is not None and failure.loss is not None:
            raise failure.loss
        if self._lifecycle.backend is not None:
            self._lifecycle.went_well()

    def _run(self, task: Task) -> None:
        failure = self._attempt(task.name, partial(self._run_job, task))
        if self._lifecycle.phase == "busy":
            self._lifecycle.enter("ready", "Ready")
        task.error = None if failure is None else failure.error
        with self._changed:
            self.current = None
        task.done.set()
        self._after_job(failure)

    def _run_job(self, task: Task) -> None:
        backend, _ = self._lifecycle.require()
        if not task.cancel.is_set():
            if not task.gives_way:  # else nobody has to wait for it
                self._lifecycle.enter("busy", task.name)
            task.job(backend, task.cancel)

    def _answer(self, reply: Reply) -> None:
        if reply.cancel.is_set():
            self._finish(reply, "cancelled")
            return
        failure = self._attempt("The reply", partial(self._generate, reply))
        if failure is not None and failure.loss is not None and reply.pending.settings is None:
            reply.view = replace(reply.view, phase="loading")
            self._lifecycle.restart(failure.loss)  # lost before it was asked: the message can wait
            failure = self._attempt("The reply", partial(self._generate, reply))
        if failure is None and reply.is_relieved is False:
            self._finish_short_of_memory(reply)
        elif failure is None:
            self._finish(reply, reply.view.finish_reason or "error", reply.view.error)
        elif failure.loss is None:
            reply.fault = failure.fault
            self._finish(reply, "error", failure.error)
        else:
            kept = "What was written is kept. Continue it, or send the message again."
            self._finish(reply, "interrupted", f"{failure.error} {kept}")
        self._after_job(failure)

    def _generate(self, reply: Reply) -> None:
        backend, loaded = self._lifecycle.require()
        request = self._make_request(reply)
        reply.view = replace(reply.view, phase="prefill", position=0)
        started_s, checkpoint_s = time.monotonic(), -math.inf  # the first words are kept at once
        with closing(backend.generate(request, reply.cancel)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                if reply.pending.settings is None:  # the request was taken
                    reply.pending.settings = turn_settings(reply.settings, loaded)
                    self._journal.update()
                reply.add(chunk)
                now_s = time.monotonic()
                due_s = checkpoint_s + checkpoint_every_s(now_s - started_s)
                if reply.view.text and now_s >= due_s:
                    self._journal.checkpoint(reply.pending)
                    checkpoint_s = now_s
        if reply.view.finish_reason is None:
            raise LocalspecError("The engine ended the reply without a reason. Send it again.")

    def _finish_short_of_memory(self, reply: Reply) -> None:
        """The backend can free no more: load a shorter context, or offer a smaller model."""
        lifecycle, stats, error = self._lifecycle, reply.view.stats, reply.view.error
        used = 0 if stats is None else stats.num_prompt_tokens + stats.num_output_tokens
        options = lifecycle.shorter(used + (reply.settings.max_tokens or 0))
        if options is None:
            self._finish(reply, "error", f"{error} {lifecycle.offer_smaller()}")
            return
        before = lifecycle.loaded.context_length if lifecycle.loaded is not None else None
        notice = (
            f"The model is loaded again with a context of {options.context} instead of {before} "
            "tokens; the next message uses it."
        )
        self._finish(reply, "error", f"{error} {notice}")
        lifecycle.switch(options)
        lifecycle.notices += (f"Memory ran out. {notice}",)

    def _finish(self, reply: Reply, reason: FinishReason, error: str | None = None) -> None:
        """Record the end of a reply and wake those who wait for it."""
        reply.end(reason, error)
        if reply.pending.settings is None:
            reply.pending.settings = turn_settings(reply.settings, self._lifecycle.loaded)
        self._journal.update()
        with self._changed:
            if self.current is reply:
                self.current = None
            self.latest = reply
        reply.done.set()
        self.when_ended(reply)
