"""The queue of replies and tasks, and the thread that gives them the backend in their order.

Contract: as many replies run at the same time as the backend has slots, each in a thread of its
own; of one conversation of a page one at a time, or those that were asked for together. A task and
an order have the backend alone. While nothing runs or waits it measures costs, checks that the
engine lives, and unloads the model after a time without work; the next job loads it again. Whatever
a job does, the next one runs. An order (switch, unload, retry) goes before everything that waits,
after what runs, and ends a load under way. A job never raises: its error is a sentence, and what
was generated of a reply is kept, and checkpointed as it grows.

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
from dataclasses import replace
from functools import partial

from localspec.chat.backend_lifecycle import BackendLifecycle
from localspec.chat.jobs import Task, attempted
from localspec.chat.journal import Journal
from localspec.chat.turn import Reply, TurnPhase, turn_settings
from localspec.core.backend import Request
from localspec.core.decoding import FinishReason
from localspec.core.errors import EngineLost, LocalspecError

WATCH_S = 0.5  # how often an idle engine is checked
CHECKPOINT_S = 1.0  # between two checkpoints of a reply that has run for 10 s or more
FIRST_CHECKPOINT_S = 0.1  # and of one that has just begun: a tenth of its time in between
IDLE_TASK_S = 1.5
CLOSE_S = 10.0  # for the forward under way to end
DIED_IDLE = "The engine ended while nothing was asked of it."

log = logging.getLogger(__name__)


def checkpoint_every_s(age_s: float) -> float:
    """Between the checkpoints of a reply of this age, so that a crash costs about a tenth of it."""
    return min(CHECKPOINT_S, max(FIRST_CHECKPOINT_S, age_s / 10))


class Worker:
    """See the module. make_request: the request of a reply at the moment its turn begins, for the
    replies before it in the queue belong to the conversation. unload_after_s: None never unloads.
    when_idle: a task that gives way, after this latest reply; whether IDLE_TASK_S went by without
    work."""

    def __init__(
        self,
        lifecycle: BackendLifecycle,
        journal: Journal,
        make_request: Callable[[Reply], Request],
        unload_after_s: float | None,
        when_idle: Callable[[Reply | None, bool], Task | None],
    ) -> None:
        self.running: list[Reply] = []  # oldest first
        self.task: Task | None = None  # the one that runs
        self.latest: Reply | None = None
        self._lifecycle = lifecycle
        self._journal = journal
        self._make_request = make_request
        self._unload_after_s = unload_after_s
        self._when_idle = when_idle
        self.when_ended: Callable[[Reply], None] = lambda reply: None  # from the worker's thread
        self._waiting: deque[Reply | Task] = deque()
        self._orders: deque[Callable[[], None]] = deque()
        self._losses: deque[EngineLost] = deque()  # that replies met
        self._went_well = False  # a reply, since the last look
        self._unreviewed: tuple[Reply, Request] | None = None  # the newest reply
        self._asked_again: set[int] = set()  # numbers of replies that met one before they began
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
            for job in (*self._waiting, *self.running, self.task):
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
        """Those under way, oldest first, and those that wait."""
        waiting = (job for job in list(self._waiting) if isinstance(job, Reply))
        return [*self.running, *waiting]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _make_way(self) -> None:
        if self.task is not None and self.task.gives_way:
            self.task.cancel.set()

    def _interrupt(self) -> None:
        self._make_way()
        self._lifecycle.pause.set()
        self._lifecycle.abandon.set()
        self._changed.notify_all()

    def _number_queue(self) -> None:
        num_free = self._lifecycle.num_slots - len(self.running)
        is_held = self.task is not None and not self.task.gives_way
        is_loading = self._lifecycle.phase in ("loading", "unloaded", "restarting")
        phase: TurnPhase = "loading" if is_loading else "queued"
        for place, job in enumerate(self._waiting):
            if isinstance(job, Reply):
                ahead = max(0, place + 1 - num_free) + is_held
                job.view = replace(job.view, phase=phase, position=ahead)

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
            act = self._due()
            if act is None and (self.running or not self._lifecycle.needs_calibration):
                if not self._is_closed or self.running:
                    self._changed.wait(WATCH_S)
                act = self._due()
            if act is not None or self.running:
                return act or (lambda: None)
            self._lifecycle.pause.clear()
            return None if self._is_closed else self._idle

    def _due(self) -> Callable[[], None] | None:
        """The first thing that may begin now."""
        if self._went_well:
            self._went_well = False
            return self._lifecycle.went_well
        if not self.running and not self._is_closed:
            if self._losses:
                act = partial(self._lifecycle.restart, self._losses[0])
                self._losses.clear()  # one engine was lost, however many replies met it
                return act
            if self._orders:
                order = self._orders.popleft()
                if not self._orders:
                    self._lifecycle.abandon.clear()
                return partial(self._work_on, order)
            self._lifecycle.abandon.clear()
        return self._job_due()

    def _job_due(self) -> Callable[[], None] | None:
        """The first job that may begin: where others run, a reply of another conversation."""
        job = next(iter(self._waiting), None)
        if isinstance(job, Task):
            if self.running:
                return None
            self.task, act = job, partial(self._run, job)
        elif (job := self._reply_due()) is None:
            return None
        else:
            self.running.append(job)
            act = partial(threading.Thread(target=self._answer, args=(job,), daemon=True).start)
        self._waiting.remove(job)
        self._number_queue()
        self._lifecycle.pause.clear()
        return partial(self._work_on, act, needs_backend=not job.cancel.is_set())

    def _reply_due(self) -> Reply | None:
        is_held_up = self.running and (self._orders or self._losses)
        if is_held_up or len(self.running) >= self._lifecycle.num_slots:
            return None
        for job in self._waiting:
            if isinstance(job, Task):
                return None
            others = (one.pending for one in self.running if one not in job.together)
            if all(one.conversation is not job.pending.conversation for one in others):
                return job
        return None

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
        if self._unreviewed is not None:  # first, since measuring writes over the reply
            (reply, request), self._unreviewed = self._unreviewed, None
            self._journal.once(partial(reply.record, lifecycle.review(request)))
        elif (task := self._when_idle(self.latest, idle_s >= IDLE_TASK_S)) is not None:
            with self._changed:
                if self._waiting or self._orders or self._is_closed:
                    return
                self.task = task
            self._run(task)
        elif lifecycle.needs_calibration:
            lifecycle.calibrate()
        elif self._unload_after_s is not None and idle_s >= self._unload_after_s:
            lifecycle.release(
                "Nothing was asked for a while; the next message loads the model again."
            )

    # one job

    def _run(self, task: Task) -> None:
        fault = attempted(task.name, partial(self._run_job, task))
        if self._lifecycle.phase == "busy":
            self._lifecycle.enter("ready", "Ready")
        task.error = None if fault is None else str(fault)
        with self._changed:
            self.task = None
        task.done.set()
        if isinstance(fault, EngineLost):
            raise fault
        if self._lifecycle.backend is not None:
            self._lifecycle.went_well()

    def _run_job(self, task: Task) -> None:
        backend, _ = self._lifecycle.require()
        if not task.cancel.is_set():
            if not task.gives_way:  # else nobody has to wait for it
                self._lifecycle.enter("busy", task.name)
            task.job(backend, task.cancel)

    def _answer(self, reply: Reply) -> None:
        """The whole life of a reply's thread."""
        if reply.cancel.is_set():
            self._finish(reply, "cancelled")
            return
        fault = attempted("The reply", partial(self._generate, reply))
        loss = fault if isinstance(fault, EngineLost) else None
        if loss is not None and reply.pending.settings is None and self._queue_again(reply, loss):
            return
        if fault is None and reply.is_relieved is False:
            self._finish_short_of_memory(reply)
        elif fault is None:
            self._finish(reply, reply.view.finish_reason or "error", reply.view.error)
        elif loss is None:
            reply.fault = fault
            self._finish(reply, "error", str(fault))
        else:
            kept = "What was written is kept. Continue it, or send the message again."
            self._finish(reply, "interrupted", f"{fault} {kept}", loss)

    def _queue_again(self, reply: Reply, loss: EngineLost) -> bool:
        """Let a reply whose engine was lost before it was asked wait for the next one; False where
        it has waited so already."""
        if reply.number in self._asked_again or reply.cancel.is_set():
            return False
        with self._changed:
            self._asked_again.add(reply.number)
            self._losses.append(loss)
            self.running.remove(reply)
            self._waiting.appendleft(reply)
            reply.view = replace(reply.view, phase="loading")
            self._changed.notify_all()
        return True

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
                if (reply.view.text or reply.view.thinking) and now_s >= due_s:
                    self._journal.checkpoint(reply.pending)
                    checkpoint_s = now_s
        self._unreviewed = reply, request
        if reply.view.finish_reason is None:
            raise LocalspecError("The engine ended the reply without a reason. Send it again.")

    def _finish_short_of_memory(self, reply: Reply) -> None:
        """The backend can free no more: load a shorter context, or offer a smaller model."""
        lifecycle, stats, error = self._lifecycle, reply.view.stats, reply.view.error
        used = 0 if stats is None else stats.num_prompt_tokens + stats.num_output_tokens
        is_ceiling = reply.request is not None and reply.request.is_ceiling
        wanted = 0 if is_ceiling else reply.settings.max_tokens or 0
        options = lifecycle.shorter(used + wanted)
        if options is None:
            self._finish(reply, "error", f"{error} {lifecycle.offer_smaller()}")
            return
        before = lifecycle.loaded.context_length if lifecycle.loaded is not None else None
        notice = (
            f"The model is loaded again with a context of {options.context} instead of {before} "
            "tokens; the next message uses it."
        )

        def shorten() -> None:
            lifecycle.switch(options)
            lifecycle.notices += (f"Memory ran out. {notice}",)

        self.order(shorten)
        self._finish(reply, "error", f"{error} {notice}")

    def _finish(
        self,
        reply: Reply,
        reason: FinishReason,
        error: str | None = None,
        loss: EngineLost | None = None,
    ) -> None:
        """Record the end of a reply and wake those who wait for it. loss: of its engine."""
        reply.end(reason, error)
        if reply.pending.settings is None:
            reply.pending.settings = turn_settings(reply.settings, self._lifecycle.loaded)
        self._journal.update()
        with self._changed:
            if reply in self.running:
                self.running.remove(reply)
                self._worked_s = time.monotonic()
                self._went_well = loss is None
            if loss is not None:
                self._losses.append(loss)
            self.latest = reply
            self._changed.notify_all()
        reply.done.set()
        self.when_ended(reply)
