"""The same prompt answered without and with drafting, one after the other, on the same clock.

Contract: `Race.run` is a job for `ChatService.enqueue`; `view` is replaced whole as it changes, so
readers need no lock. Before the start one token is decoded and dropped, so that the prompt is in
the cache for both. The caller chooses who goes first and alternates it, since a machine may warm up
or slow down. Both have the same seed. Nothing of a race is logged; it replaces the conversation's
cache.

Not here: drawing (web), why two texts differ (audit).
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

from localspec.backend import Backend, Message, Request, TurnStats
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
        rates = plain.tokens_per_second, other.tokens_per_second
        return None if None in rates or not rates[0] else (rates[1] or 0.0) / rates[0]


class Race:
    """See the module. drafter: who drafts, AUTO for the controller's choice."""

    def __init__(self, request: Request, is_plain_first: bool) -> None:
        self._request = request
        places = (1, 2) if is_plain_first else (2, 1)
        self._order: tuple[Name, Name] = (
            ("plain", "speculative") if is_plain_first else ("speculative", "plain")
        )
        self.view = RaceView(Lane("plain", places[0]), Lane("speculative", places[1]))
        self._tokens: dict[Name, list[int]] = {"plain": [], "speculative": []}

    @property
    def is_greedy(self) -> bool:
        return self._request.sampling.temperature == 0.0

    def run(self, backend: Backend, cancel: threading.Event) -> None:
        """The job. A fault ends the race with its sentence and is raised again, for the queue."""
        try:
            self._enter("warming")
            self._warm_up(backend, cancel)
            self._enter("running")
            for name in self._order:
                if not cancel.is_set():
                    self._run_lane(name, backend, cancel)
            if cancel.is_set():
                self._enter("cancelled")
            else:
                self._judge(backend)
                self._enter("done")
        except LocalspecError as error:
            self.view = replace(self.view, phase="failed", error=str(error))
            raise

    def _enter(self, phase: RacePhase) -> None:
        self.view = replace(self.view, phase=phase)

    def _warm_up(self, backend: Backend, cancel: threading.Event) -> None:
        once = replace(self._request, drafter=OFF, max_tokens=1)
        with closing(backend.generate(once, cancel)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                _refuse_failure(chunk.error)

    def _run_lane(self, name: Name, backend: Backend, cancel: threading.Event) -> None:
        request = replace(self._request, drafter=OFF) if name == "plain" else self._request
        self._set(replace(self._lane(name), phase="reading", started_s=time.monotonic()))
        with closing(backend.generate(request, cancel)) as chunks:  # type: ignore[type-var]
            for chunk in chunks:
                _refuse_failure(chunk.error)
                self._tokens[name] += chunk.tokens
                lane = self._lane(name)
                self._set(
                    replace(
                        lane,
                        phase="reading" if chunk.phase == "prefill" else "writing",
                        text=lane.text + chunk.text,
                        stats=chunk.stats,
                        finish_reason=chunk.finish_reason,
                    )
                )
        self._set(replace(self._lane(name), phase="done", ended_s=time.monotonic()))

    def _lane(self, name: Name) -> Lane:
        return self.view.plain if name == "plain" else self.view.speculative

    def _set(self, lane: Lane) -> None:
        if lane.name == "plain":
            self.view = replace(self.view, plain=lane)
        else:
            self.view = replace(self.view, speculative=lane)

    def _judge(self, backend: Backend) -> None:
        plain, other = self._tokens["plain"], self._tokens["speculative"]
        place = first_difference(plain, other)
        self.view = replace(self.view, is_same=place is None)
        if place is not None and self.is_greedy and self._request.sampling.leniency is None:
            found = explain(backend, self._request.messages, plain, other, place)
            self.view = replace(self.view, difference=found)


def race_request(
    prompt: str, system_prompt: str, sampling: SamplingParams, drafter: str, max_tokens: int
) -> Request:
    """One message, answered twice. Raises RequestError for a value out of range."""
    system = (Message("system", system_prompt),) if system_prompt.strip() else ()
    return Request(
        (*system, Message("user", prompt)),
        sampling,
        max_tokens,
        drafter=drafter,
        workload=recognise(prompt),
    )


def _refuse_failure(error: str | None) -> None:
    if error is not None:
        raise LocalspecError(error)
