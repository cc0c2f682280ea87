"""The one thread that works with the backend: replies and tasks, one at a time, in their order.

Contract: while nobody waits it measures costs, sees that the engine lives, and lets the model go
after a time without work; the next job brings it back. Whatever a job does, the next one runs.
An order (switch, unload, retry) goes before everything that waits and gives up a load under way.

Not here: the backend's states (keeper), one reply (answering), what pages ask (service).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from localspec.backend import Backend, Request
from localspec.chat.answering import Ended, answer
from localspec.chat.backend_lifecycle import Keeper
from localspec.chat.journal import Journal
from localspec.chat.turn import Reply, TurnPhase, turn_settings, unexpected
from localspec.errors import EngineLost, LocalspecError

WATCH_S = 0.5  # how often an idle engine is looked after
DIED_IDLE = "The engine ended while nothing was asked of it."

Job = Callable[[Backend, threading.Event], None]

log = logging.getLogger(__name__)


class Task:
    """Something that wants the backend to itself for a while. error: the sentence to show when
    it failed, None otherwise; complete once `done` is set."""

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self.cancel = threading.Event()
        self.done = threading.Event()
        self.error: str | None = None
        self.job = job


@dataclass(frozen=True)
class Order:
    """Something to do to the keeper before any other job."""

    act: Callable[[], None]


class Worker:
    """See the module. make_request: the request of a reply at the moment its turn begins.
    unload_after_s: None never lets the model go."""

    def __init__(
        self,
        keeper: Keeper,
        journal: Journal,
        make_request: Callable[[Reply], Request],
        unload_after_s: float | None = None,
    ) -> None:
        self.current: Reply | Task | None = None
        self.latest: Reply | None = None
        self._keeper = keeper
        self._journal = journal
        self._make_request = make_request
        self._unload_after_s = unload_after_s
        self._waiting: deque[Reply | Task] = deque()
        self._orders: deque[Order] = deque()
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
            self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def queue(self, job: Reply | Task) -> None:
        with self._changed:
            self._waiting.append(job)
            self._number_queue()
            self._keeper.pause.set()
            self._changed.notify_all()

    def order(self, act: Callable[[], None]) -> None:
        with self._changed:
            self._orders.append(Order(act))
            self._wake()

    def take_out(self, job: Reply | Task) -> bool:
        """Whether the job still waited; then it is out of the queue."""
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

    def finish(self, reply: Reply, ended: Ended) -> None:
        """Write the end of a reply and let those who wait for it go on."""
        reply.end(ended.reason, ended.error)
        if reply.entry.settings is None:
            reply.entry.settings = turn_settings(reply.settings, self._keeper.loaded)
        self._journal.update(reply.entry)
        with self._changed:
            if self.current is reply:
                self.current = None
            self.latest = reply
        reply.done.set()

    def _wake(self) -> None:
        self._keeper.pause.set()
        self._keeper.abandon.set()
        self._changed.notify_all()

    def _number_queue(self) -> None:
        ahead = 0 if self.current is None else 1
        is_loading = self._keeper.phase in ("loading", "unloaded", "restarting")
        phase: TurnPhase = "loading" if is_loading else "queued"
        for place, job in enumerate(self._waiting):
            if isinstance(job, Reply):
                job.view = replace(job.view, phase=phase, position=ahead + place)

    # the thread

    def _work(self) -> None:
        if not self._is_closed:
            self._keeper.load()
        while (found := self._next()) != "closed":
            try:
                self._do(found)
            except EngineLost as loss:
                self._keeper.revive(loss)
            except Exception:  # the edge of the thread: the chat must go on
                log.exception("the worker failed")
        self._keeper.close()

    def _next(self) -> Reply | Task | Order | str:
        """What is to be done now; "idle" when there is nothing, "closed" at the end."""
        with self._changed:
            if not (self._has_work() or self._keeper.needs_calibration):
                self._changed.wait(WATCH_S)
            if self._is_closed and not self._waiting:
                return "closed"
            order = self._orders.popleft() if self._orders else None
            if not self._orders and not self._is_closed:
                self._keeper.abandon.clear()
            if order is not None:
                return order
            self.current = self._waiting.popleft() if self._waiting else None
            self._number_queue()
            self._keeper.pause.clear()
            return self.current or "idle"

    def _has_work(self) -> bool:
        return bool(self._waiting or self._orders or self._is_closed)

    def _do(self, found: Reply | Task | Order | str) -> None:
        if isinstance(found, Order):
            found.act()
            self._worked_s = time.monotonic()
        elif isinstance(found, str):
            self._idle()
        else:
            if self._keeper.is_unloaded and not found.cancel.is_set():
                self._keeper.load()
            if isinstance(found, Reply):
                self._answer(found)
            else:
                self._run(found)
            self._worked_s = time.monotonic()

    def _idle(self) -> None:
        keeper = self._keeper
        if keeper.backend is None:
            return
        if not keeper.backend.is_alive():
            raise EngineLost(DIED_IDLE)
        if keeper.needs_calibration:
            keeper.calibrate()
        elif self._unload_after_s is not None and self._idle_s() >= self._unload_after_s:
            keeper.release("Nothing was asked for a while; the next message loads the model again.")

    def _idle_s(self) -> float:
        return time.monotonic() - self._worked_s

    def _answer(self, reply: Reply) -> None:
        keeper = self._keeper
        if reply.cancel.is_set():
            self.finish(reply, Ended("cancelled"))
            return
        ended = self._try_to_answer(reply)
        if ended.loss is not None and not ended.is_begun:
            reply.view = replace(reply.view, phase="loading")
            keeper.revive(ended.loss)  # it was gone before it was asked: the message can wait
            ended = self._try_to_answer(reply)
        if ended.is_relieved is False:
            self._finish_short_of_memory(reply, ended)
        else:
            self.finish(reply, ended)
        if keeper.backend is not None:
            self._after(ended.loss)

    def _try_to_answer(self, reply: Reply) -> Ended:
        keeper = self._keeper
        if keeper.backend is None or keeper.loaded is None:
            return Ended("error", keeper.refusal, is_begun=False)
        return answer(reply, keeper.backend, keeper.loaded, self._journal, self._make_request)

    def _after(self, loss: EngineLost | None) -> None:
        if loss is not None:
            raise loss
        self._keeper.went_well()

    def _finish_short_of_memory(self, reply: Reply, ended: Ended) -> None:
        """The backend gave up all it could: a shorter context next, then only a smaller model."""
        stats = reply.view.stats
        used = 0 if stats is None else stats.num_prompt_tokens + stats.num_output_tokens
        options = self._keeper.shorter(used + reply.settings.max_tokens)
        if options is None:
            self.finish(
                reply, replace(ended, error=f"{ended.error} {self._keeper.offer_smaller()}")
            )
            return
        before = self._keeper.loaded.context_length if self._keeper.loaded is not None else None
        said = (
            f"The model is loaded again with a context of {options.context} instead of {before} "
            "tokens; the next message goes on with that."
        )
        self.finish(reply, replace(ended, error=f"{ended.error} {said}"))
        self._keeper.switch(options)
        self._keeper.notices += (f"Memory ran out. {said}",)

    def _run(self, task: Task) -> None:
        keeper, loss = self._keeper, None
        try:
            if keeper.backend is None:
                task.error = keeper.refusal
            elif not task.cancel.is_set():
                keeper.enter("busy", task.name)
                task.job(keeper.backend, task.cancel)
        except EngineLost as error:
            loss, task.error = error, str(error)
        except LocalspecError as error:
            task.error = str(error)
        except Exception as error:  # the edge of one task: the next job must run
            log.exception("a task failed: %s", task.name)
            task.error = unexpected(task.name, error)
        if keeper.phase == "busy":
            keeper.enter("ready", "Ready")
        with self._changed:
            self.current = None
        task.done.set()
        self._after(loss)


__all__ = ["Job", "Order", "Task", "Worker"]
