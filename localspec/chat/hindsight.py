"""Judges every drafter by the newest reply, once that is over.

`Reviews` holds the reply until its drafters are judged or another message comes, and no longer. A
review works in pieces of at most one forward or one round's draft, and no longer than its share of
the time that the reply took. No reply depends on it: it writes to caches of drafters alone, and
what it has read of the text is what the next turn would read. The controller learns from it what
drafters would have got right (controller.hindsight).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import psutil

from localspec.chat.slots import RunningTurn, Slot
from localspec.controller.hindsight import WrittenReply, judge
from localspec.core.backend import Request
from localspec.core.decoding import Drafter, Sequence
from localspec.core.hindsight import Hindsight, Reviewing, ReviewSteps
from localspec.core.speculation import MIN_COMPARED_TOKENS

# The share of a reply's time that judging it may take.
SHARE = 0.1
# What is left of that share on battery, and where the machine was busy during the reply.
SPARED = 0.25


@dataclass(frozen=True)
class _Finished:
    """A reply that is over, and where it was written."""

    turn: RunningTurn
    slot: Slot
    sequence: Sequence


def is_on_battery() -> bool:
    """Return whether the computer runs on its battery; False where that is not told."""
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, psutil.Error):  # Not every system has the call.
        return False
    return battery is not None and battery.power_plugged is False


class Reviews:
    """The newest reply, and what drafters would have done in it. on_battery: whether the computer
    runs on one now. clock: seconds."""

    def __init__(
        self,
        on_battery: Callable[[], bool] = is_on_battery,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._on_battery = on_battery
        self._clock = clock
        self._newest: _Finished | None = None
        self._cost_s: dict[str, float] = {}  # What judging took a token, by drafter.

    def keep(self, turn: RunningTurn, slot: Slot, sequence: Sequence) -> None:
        """Hold the reply of a turn for a review, in place of the one before."""
        self._newest = _Finished(turn, slot, sequence)

    def drop(self) -> None:
        """Hold nothing, and end a review under way."""
        self._newest = None

    def review(self, asked: Request, cancel: threading.Event) -> Iterator[Hindsight]:
        """See Backend.review. The cheapest drafters go first. Each may take half of the time that
        is left, so that a costly one leaves something to those behind it."""
        reply = self._newest
        if reply is None or reply.turn.asked != asked or not _can_be_judged(reply):
            return
        end_s = self._clock() + self._budget_ms(reply) / 1000.0
        drafters = reply.slot.engine.drafters
        names = sorted(drafters, key=lambda name: self._cost_s.get(name, 0.0))
        for name in names:
            begun_s = self._clock()
            left_s = end_s - begun_s
            own_end_s = end_s if name == names[-1] else begun_s + left_s / 2.0
            goes_on = partial(self._goes_on, reply, cancel, own_end_s)
            result = _judged(reply, drafters[name], goes_on) if goes_on() else None
            if result is not None:
                self._cost_s[name] = (self._clock() - begun_s) / max(1, result.num_output_tokens)
                yield result
        if self._newest is reply:
            self._newest = None

    def _goes_on(self, reply: _Finished, cancel: threading.Event, end_s: float) -> bool:
        is_current = self._newest is reply and not cancel.is_set()
        return is_current and self._clock() < end_s

    def _budget_ms(self, reply: _Finished) -> float:
        is_spared = self._on_battery() or reply.turn.stats.no_speedup == "load_changed"
        return (SPARED if is_spared else 1.0) * SHARE * (reply.turn.stats.reply_ms or 0.0)


def _can_be_judged(reply: _Finished) -> bool:
    """True if each token is the target's own choice after the text before it, and long enough, and
    the target still holds the text."""
    sequence = reply.sequence
    is_free = sequence.grammar is None and sequence.sampling.leniency is None
    has_budget = sequence.thought is not None and sequence.thought.budget is not None
    is_held = reply.slot.engine.target.cache.tokens == sequence.tokens[:-1]
    is_long = len(sequence.reply) >= MIN_COMPARED_TOKENS
    return is_free and not has_budget and is_held and is_long


def _judged(reply: _Finished, drafter: Drafter, goes_on: Callable[[], bool]) -> Hindsight | None:
    """Return what the drafter would have done, as far as the time allowed; None for nothing."""
    steps = drafter.review(reply.sequence) if isinstance(drafter, Reviewing) else None
    ready = None if steps is None else _read(steps, goes_on)
    if ready is None:
        return None
    turn, slot = reply.turn, reply.slot
    written = WrittenReply(
        reply.sequence,
        turn.request.workload,
        slot.engine.within_reach,
        turn.rounds_at,
        turn.stats.num_reused_tokens,
    )
    return judge(slot.controller, ready, written, goes_on)


def _read(steps: ReviewSteps, goes_on: Callable[[], bool]) -> Drafter | None:
    """Run the forwards of a review; None if it had to end before."""
    try:
        rows = next(steps)
        while goes_on():
            rows = steps.send(rows.forward())
    except StopIteration as end:
        ready: Drafter = end.value
        return ready
    steps.close()
    return None
