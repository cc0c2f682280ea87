"""The same prompt answered without and with drafting in turn, on the same clock.

Contract: `Race.run` is a job for `ChatService.enqueue`; `view` is replaced whole as it changes, so
readers need no lock. Before the start one token is decoded and dropped, so that the prompt is in
the cache for all. Each lane runs NUM_RUNS times, by turns and each first in turn, since a machine
may warm up or slow down; the caller alternates which one begins. All have the same seed. Nothing of
a race is logged; it replaces the conversation's cache.

Not here: drawing (web), why two texts differ (audit).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from localspec.chat.audit import Difference, explain, first_difference
from localspec.core.backend import Backend, Message, Request, chunks_of
from localspec.core.decoding import OFF, FinishReason, SamplingParams
from localspec.core.speculation import speedup
from localspec.core.turn_stats import TurnStats
from localspec.core.workloads import recognise

NUM_RUNS = 3  # of each lane

Name = Literal["plain", "speculative"]
LanePhase = Literal["waiting", "reading", "writing", "done"]
RacePhase = Literal["waiting", "warming", "running", "done"]


@dataclass(frozen=True)
class RaceRun:
    """One reply of a lane. seconds: by the clock, from sending to its end."""

    seconds: float
    tokens: tuple[int, ...]
    stats: TurnStats


@dataclass(frozen=True)
class Lane:
    """One of the two at one moment. text, tokens, stats: of the run under way or the latest one.
    runs: those that are over."""

    name: Name
    phase: LanePhase = "waiting"
    text: str = ""
    tokens: tuple[int, ...] = ()
    stats: TurnStats | None = None
    started_s: float | None = None
    finish_reason: FinishReason | None = None
    runs: tuple[RaceRun, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Of the run under way, else of the run in the middle."""
        if self.started_s is not None:
            return time.monotonic() - self.started_s
        return median(run.seconds for run in self.runs) if self.runs else None


@dataclass(frozen=True)
class Gains:
    """Times plain decoding. middle: of the figures in the middle of both lanes, as they are shown.
    lowest, highest: run against run."""

    middle: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class RaceView:
    """The race at one moment. difference: the first one, None until all are done and where all runs
    wrote the same tokens. A race that is stopped or fails stays in the phase in which it was."""

    is_greedy: bool
    plain: Lane = Lane("plain")
    speculative: Lane = Lane("speculative")
    phase: RacePhase = "waiting"
    difference: Difference | None = None

    @property
    def gains(self) -> Gains | None:
        """Of whole replies by the clock; None until all are done."""
        return self._gains(lambda run: run.seconds)

    @property
    def decode_gains(self) -> Gains | None:
        """Of decoding alone."""
        return self._gains(lambda run: run.stats.decode_ms)

    def _gains(self, took: Callable[[RaceRun], float]) -> Gains | None:
        if self.phase != "done":
            return None
        times = [[took(run) for run in lane.runs] for lane in (self.plain, self.speculative)]
        pairs = [speedup(*pair) for pair in zip(*times, strict=True)]
        middle = speedup(*(median(each) for each in times))
        known = [gain for gain in pairs if gain is not None]
        return None if middle is None or not known else Gains(middle, min(known), max(known))


class Race:
    """See the module. request.drafter: what drafts, AUTO for the controller's choice."""

    def __init__(self, request: Request, is_plain_first: bool) -> None:
        self._request = request
        self._is_plain_first = is_plain_first
        self.view = RaceView(request.sampling.temperature == 0.0)

    def run(self, backend: Backend, cancel: threading.Event) -> None:
        """The job."""
        self.view = replace(self.view, phase="warming")
        for _ in chunks_of(backend, replace(self._request, drafter=OFF, max_tokens=1), cancel):
            pass
        self.view = replace(self.view, phase="running")
        for number in range(NUM_RUNS):
            is_plain_first = self._is_plain_first is (number % 2 == 0)
            for is_plain in (is_plain_first, not is_plain_first):
                if not cancel.is_set():
                    self._run_lane(is_plain, backend, cancel)
        if not cancel.is_set():
            self._compare(backend)
            self.view = replace(self.view, phase="done")

    def _run_lane(self, is_plain: bool, backend: Backend, cancel: threading.Event) -> None:
        request = replace(self._request, drafter=OFF) if is_plain else self._request
        before = self.view.plain if is_plain else self.view.speculative
        started_s = time.monotonic()
        lane = Lane(before.name, "reading", started_s=started_s, runs=before.runs)
        self._show(lane)
        for chunk in chunks_of(backend, request, cancel):
            lane = replace(
                lane,
                phase="reading" if chunk.phase == "prefill" else "writing",
                text=lane.text + chunk.thinking + chunk.text,
                tokens=lane.tokens + chunk.tokens,
                stats=chunk.stats,
                finish_reason=chunk.finish_reason,
            )
            self._show(lane)
        assert lane.stats is not None, "a reply has at least one chunk"
        run = RaceRun(time.monotonic() - started_s, lane.tokens, lane.stats)
        runs = lane.runs if cancel.is_set() else (*lane.runs, run)
        self._show(replace(lane, phase="done", started_s=None, runs=runs))

    def _show(self, lane: Lane) -> None:
        if lane.name == "plain":
            self.view = replace(self.view, plain=lane)
        else:
            self.view = replace(self.view, speculative=lane)

    def _compare(self, backend: Backend) -> None:
        """Hold every run against the first plain one."""
        first, *others = (*self.view.plain.runs, *self.view.speculative.runs)
        for run in others:
            place = first_difference(first.tokens, run.tokens)
            if place is not None:
                asked = self._request.messages
                found = explain(backend, asked, (), first.tokens, run.tokens, place)
                self.view = replace(self.view, difference=found)
                return


def race_request(prompt: str, sampling: SamplingParams, drafter: str, max_tokens: int) -> Request:
    """One message, answered by all runs. Raises RequestError for a value out of range."""
    messages = (Message("user", prompt),)
    return Request(messages, sampling, max_tokens, drafter=drafter, workload=recognise(prompt))
