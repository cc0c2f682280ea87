"""The same prompt answered without and with drafting in turn, on the same clock.

`Race.run` is a job for `ChatService.enqueue`; `view` is replaced whole as it changes, so readers
need no lock. Before the start one token is decoded and dropped, so that the prompt is in the cache
for both lanes. Each lane runs NUM_RUNS times, with one seed; the caller alternates which lane
begins. Nothing of a race is logged; it replaces the conversation's cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from localspec.chat.audit import Difference, explain, first_difference
from localspec.chat.compare import Answer, Sample, answers, compare
from localspec.core.backend import Backend, Message, Request
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.speculation import speedup
from localspec.core.workloads import recognise

NUM_RUNS = 3  # of each lane

Name = Literal["plain", "speculative"]
LanePhase = Literal["waiting", "reading", "writing", "done"]
RacePhase = Literal["waiting", "warming", "running", "done"]


@dataclass(frozen=True)
class Lane:
    """One of the two at one moment. answer: of the run under way or the latest one. runs: the
    whole answers."""

    name: Name
    answer: Answer | None = None
    is_running: bool = False
    runs: tuple[Answer, ...] = ()

    @property
    def phase(self) -> LanePhase:
        if self.answer is None:
            return "waiting"
        if not self.is_running:
            return "done"
        return "reading" if self.answer.phase == "prefill" else "writing"

    @property
    def seconds(self) -> float | None:
        """Of the run under way, else of the run in the middle."""
        if self.answer is not None and self.is_running:
            return time.monotonic() - self.answer.started_s
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

    def _gains(self, took: Callable[[Answer], float]) -> Gains | None:
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
        self._lanes: tuple[Name, ...] = ("plain", "speculative")
        if not is_plain_first:
            self._lanes = self._lanes[::-1]
        self.view = RaceView(request.sampling.temperature == 0.0)

    def run(self, backend: Backend, cancel: threading.Event) -> None:
        """The job."""
        self.view = replace(self.view, phase="warming")

        def ask(request: Request, lane: Name) -> Generator[Answer, None, None]:
            drafter = OFF if lane == "plain" else request.drafter
            return answers(backend, replace(request, drafter=drafter), cancel)

        reading: tuple[Request, Name] = (replace(self._request, max_tokens=1), "plain")
        samples = compare(ask, [self._request], self._lanes, NUM_RUNS, cancel, warm_ups=[reading])
        for sample in samples:
            self._show(sample, is_whole=sample.is_over and not cancel.is_set())
        if not cancel.is_set():
            difference = self._find_difference(backend)
            self.view = replace(self.view, phase="done", difference=difference)

    def _show(self, sample: Sample[Request, Name, Answer], is_whole: bool) -> None:
        before: Lane = getattr(self.view, sample.arm)
        runs = (*before.runs, sample.answer) if is_whole else before.runs
        lane = Lane(sample.arm, sample.answer, not sample.is_over, runs)
        shown: dict[str, Any] = {sample.arm: lane}
        self.view = replace(self.view, phase="running", **shown)

    def _find_difference(self, backend: Backend) -> Difference | None:
        """Return the first difference of any run from the first plain one."""
        first, *others = (*self.view.plain.runs, *self.view.speculative.runs)
        for run in others:
            place = first_difference(first.tokens, run.tokens)
            if place is not None:
                messages = self._request.messages
                return explain(backend, messages, (), first.tokens, run.tokens, place)
        return None


def race_request(prompt: str, sampling: SamplingParams, drafter: str, max_tokens: int) -> Request:
    """One message, answered by all runs. Raises RequestError for a value out of range."""
    messages = (Message("user", prompt),)
    return Request(messages, sampling, max_tokens, drafter=drafter, workload=recognise(prompt))
