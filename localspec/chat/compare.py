"""Several ways of answering the same prompts, by turns: under race, tune-up, replay and bench.

`compare` fixes what each comparison needs: the order in which the arms take turns, so that a
machine that grows warm or busy slows all arms alike; replies that only warm up; repetitions; and an
end between two replies. How an arm answers a prompt is the caller's: `answers` asks a backend, and
the bench asks engines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from localspec.core.backend import Backend, Chunk, Phase, Request, chunks_of
from localspec.core.decoding import FinishReason
from localspec.core.turn_stats import TurnStats

P = TypeVar("P")  # a prompt
A = TypeVar("A")  # an arm
R = TypeVar("R")  # an answer, as far as it has come

Ask = Callable[[P, A], Generator[R, None, None]]  # The last answer that it yields is the whole one.
Order = Callable[[Sequence[A], int], Sequence[A]]  # of the arms at the turn of this index


@dataclass(frozen=True)
class Sample(Generic[P, A, R]):
    """The answer of one arm to one prompt. run: from 0. is_over: whether nothing follows, since
    the reply is whole, was ended by whoever asked, or was cancelled."""

    prompt: P
    arm: A
    run: int
    answer: R
    is_over: bool


def compare(
    ask: Ask[P, A, R],
    prompts: Sequence[P],
    arms: Sequence[A],
    runs: int,
    cancel: threading.Event,
    order: Order[A] | None = None,
    warm_ups: Sequence[tuple[P, A]] = (),
) -> Generator[Sample[P, A, R], None, None]:
    """Yield the answers of all arms to each prompt, `runs` times, as they grow.

    order: `rotated` by default. warm_ups: prompts and arms whose answers are dropped. No answer
    begins after a cancel.
    """
    for prompt, arm in warm_ups:
        if not cancel.is_set():
            deque(ask(prompt, arm), maxlen=0)
    turns = ((prompt, run) for prompt in prompts for run in range(runs))
    for index, (prompt, run) in enumerate(turns):
        for arm in (order or rotated)(arms, index):
            if cancel.is_set():
                return
            sample = None
            with closing(ask(prompt, arm)) as growing:
                for answer in growing:
                    sample = Sample(prompt, arm, run, answer, False)
                    yield sample
            if sample is not None:
                yield replace(sample, is_over=True)


def rotated(arms: Sequence[A], index: int) -> list[A]:
    """Return the arms in the order of the turn of this index: each arm goes first in its turn.

    The direction changes after each cycle and the start shifts by one after two, so that no task of
    a file that takes its tasks in turns always meets one order, and no arm always follows the same
    other.
    """
    cycle = index // len(arms)
    start = (index + cycle // 2) % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order if cycle % 2 == 0 else order[::-1]


def as_listed(arms: Sequence[A], index: int) -> Sequence[A]:
    """Return the arms as they are, for a list that holds plain decoding before and after others."""
    return arms


@dataclass(frozen=True)
class Answer:
    """One reply of a backend, as far as it has come. text: of the thought and the answer.
    arrived_s: when each event with text or tokens came, and seconds: when the latest chunk did,
    by the clock from the request on."""

    started_s: float
    seconds: float = 0.0
    phase: Phase = "prefill"
    text: str = ""
    tokens: tuple[int, ...] = ()
    stats: TurnStats = field(default_factory=lambda: TurnStats(0))
    finish_reason: FinishReason | None = None
    arrived_s: tuple[float, ...] = ()

    def plus(self, chunk: Chunk, now_s: float) -> Answer:
        """Return the answer with one chunk more."""
        seconds, text = now_s - self.started_s, chunk.thinking + chunk.text
        return replace(
            self,
            seconds=seconds,
            phase=chunk.phase,
            text=self.text + text,
            tokens=self.tokens + chunk.tokens,
            stats=chunk.stats,
            finish_reason=chunk.finish_reason,
            arrived_s=(*self.arrived_s, seconds) if text or chunk.tokens else self.arrived_s,
        )


def answers(
    backend: Backend, request: Request, cancel: threading.Event
) -> Generator[Answer, None, None]:
    """Yield the reply as it grows, first the empty one. Closing it ends the reply. Raises
    LocalspecError for a reply that failed."""
    answer = Answer(time.monotonic())
    yield answer
    with closing(chunks_of(backend, request, cancel)) as chunks:
        for chunk in chunks:
            answer = answer.plus(chunk, time.monotonic())
            yield answer
