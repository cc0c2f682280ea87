"""The same prompt answered without and with drafting, one after the other, on the same clock.

Contract: `Race.run` is a job for `ChatService.enqueue`; `view` is replaced whole as it changes, so
readers need no lock. Before the start one token is decoded and dropped, so that the prompt is in
the cache for both. The caller chooses which lane runs first and alternates it, since a machine may
warm up or slow down. Both have the same seed. Nothing of a race is logged; it replaces the
conversation's cache.

Not here: drawing (web), why two texts differ (audit).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

from localspec.arithmetic import ratio
from localspec.backend import Backend, Message, Request, TurnStats, chunks_of
from localspec.chat.audit import Difference, explain, first_difference
from localspec.core import OFF, FinishReason, SamplingParams
from localspec.errors import LocalspecError
from localspec.workloads import recognise

Name = Literal["plain", "speculative"]
LanePhase = Literal["waiting", "reading", "writing", "done"]
RacePhase = Literal["waiting", "warming", "running", "done", "cancelled", "failed"]


@dataclass(frozen=True)
class Lane:
    """One of the two at one moment. seconds: wall time since its start. place: 1 for the first to
    run, else 2."""

    name: Name
    place: int
    phase: LanePhase = "waiting"
    text: str = ""
    tokens: tuple[int, ...] = ()
    stats: TurnStats | None = None
    started_s: float | None = None
    ended_s: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def seconds(self) -> float | None:
        if self.started_s is None:
            return None
        return (self.ended_s or time.monotonic()) - self.started_s


@dataclass(frozen=True)
class RaceView:
    """The race at one moment. is_same: whether both wrote the same tokens, None until both are
    done. difference: the first one, of a greedy race. error: the sentence to show."""

    plain: Lane
    speculative: Lane
    phase: RacePhase = "waiting"
    is_same: bool | None = None
    difference: Difference | None = None
    error: str | None = None

    @property
    def gain(self) -> float | None:
        """Decoding speed with drafting over that without; None until both are done."""
        plain, other = self.plain.stats, self.speculative.stats
        if self.phase != "done" or plain is None or other is None:
            return None
        if plain.tokens_per_second is None or other.tokens_per_second is None:
            return None
        return ratio(other.tokens_per_second, plain.tokens_per_second)


class Race:
    """See the module. request.drafter: what drafts, AUTO for the controller's choice."""

    def __init__(self, request: Request, is_plain_first: bool) -> None:
        self._request = request
        plain, speculative = (1, 2) if is_plain_first else (2, 1)
        self.view = RaceView(Lane("plain", plain), Lane("speculative", speculative))

    def run(self, backend: Backend, cancel: threading.Event) -> None:
        """The job. A fault ends the race with its sentence and is raised again, for the queue."""
        lanes = sorted((self.view.plain, self.view.speculative), key=lambda lane: lane.place)
        try:
            self.view = replace(self.view, phase="warming")
            for _ in chunks_of(backend, replace(self._request, drafter=OFF, max_tokens=1), cancel):
                pass
            self.view = replace(self.view, phase="running")
            for lane in lanes:
                if not cancel.is_set():
                    self._run_lane(lane, backend, cancel)
            if cancel.is_set():
                self.view = replace(self.view, phase="cancelled")
            else:
                self._compare(backend)
                self.view = replace(self.view, phase="done")
        except LocalspecError as error:
            self.view = replace(self.view, phase="failed", error=str(error))
            raise

    def _run_lane(self, lane: Lane, backend: Backend, cancel: threading.Event) -> None:
        is_plain = lane.name == "plain"
        request = replace(self._request, drafter=OFF) if is_plain else self._request
        lane = self._show(replace(lane, phase="reading", started_s=time.monotonic()))
        for chunk in chunks_of(backend, request, cancel):
            lane = self._show(
                replace(
                    lane,
                    phase="reading" if chunk.phase == "prefill" else "writing",
                    text=lane.text + chunk.text,
                    tokens=lane.tokens + chunk.tokens,
                    stats=chunk.stats,
                    finish_reason=chunk.finish_reason,
                )
            )
        self._show(replace(lane, phase="done", ended_s=time.monotonic()))

    def _show(self, lane: Lane) -> Lane:
        if lane.name == "plain":
            self.view = replace(self.view, plain=lane)
        else:
            self.view = replace(self.view, speculative=lane)
        return lane

    def _compare(self, backend: Backend) -> None:
        plain, other = self.view.plain.tokens, self.view.speculative.tokens
        place, sampling = first_difference(plain, other), self._request.sampling
        self.view = replace(self.view, is_same=place is None)
        if place is not None and sampling.temperature == 0.0 and sampling.leniency is None:
            found = explain(backend, self._request.messages, plain, other, place)
            self.view = replace(self.view, difference=found)


def race_request(prompt: str, sampling: SamplingParams, drafter: str, max_tokens: int) -> Request:
    """One message, answered twice. Raises RequestError for a value out of range."""
    messages = (Message("user", prompt),)
    return Request(messages, sampling, max_tokens, drafter=drafter, workload=recognise(prompt))
