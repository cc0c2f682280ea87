"""How many threads the processor's rounds run with, at the start and while other programs run.

Contract: every operation waits for its slowest thread, and one whose core does something else is
slow. `choose_threads` times a step of the loaded model with torch's own number and with fewer, and
keeps torch's own unless another is better by MARGIN. All cores are used only where all but one
would be slower by MARGIN, and beside a page, which is drawn while a reply is written, by WORTH_ALL.

`Threads.observe` gets the load after each round of a reply, of the last rounds together. Every
ROUNDS rounds another number is tried for as many: the next smaller one where rounds took SLOW times
the measured time, else the next larger one. It stays where it is better by the factor above. The
number that was left is tried again after RETRY_S, and after twice as long each time that it is no
better. A trial uses the rounds of the reply itself: none is run for it. No token depends on it.

Beside a program that multiplies matrices on one of two cores, whole replies of 350M parameters over
`serve` came at 4.5 to 5.0 tokens/s with two threads throughout, and at 9.1 to 11.9 with this (five
each); in quiet two take 60 ms a step and one 84. On two cores with the demo model both are 1.4
times as fast as one in quiet; the first four replies in a browser on the same cores ran at 270
tokens/s with both and at 365 with one (medians of three starts each, in turns), the very first one
at 46 to 94 and at 348 to 385.

Not here: the load (controller.load).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

MARGIN = 1.15
WORTH_ALL = 1.6
TIMED_STEPS = 7
MOST_SECONDS = 1.0  # for one candidate: a large model is timed by fewer steps
ROUNDS = 8  # More than the rounds that a load is the mean of.
SLOW = 1.5
RETRY_S, LONGEST_RETRY_S = 60.0, 480.0

Clock = Callable[[], float]


class Threads:
    """torch's number of threads in the thread that runs the rounds. most: torch's own number.
    number: the present one. worth: how much faster `most` must be than fewer. clock: seconds."""

    def __init__(self, most: int, number: int, worth: float, clock: Clock = perf_counter) -> None:
        self._numbers = candidates(most)
        self._worth = worth
        self._clock = clock
        self._num_rounds = 0  # since the last choice
        self._before: tuple[int, float] | None = None  # the trial under way: number, and its load
        self._wait_s = dict.fromkeys(self._numbers, RETRY_S)
        self._next_s = dict.fromkeys(self._numbers, clock() + RETRY_S)  # that each may be tried
        torch.set_num_threads(number)

    def observe(self, load: float) -> None:
        """load: how many times its measured cost a round takes now."""
        self._num_rounds += 1
        if self._num_rounds < ROUNDS:
            return
        self._num_rounds = 0
        if self._before is not None:
            self._judge(*self._before, load)
        else:
            self._try_another(load)

    def _try_another(self, load: float) -> None:
        number = torch.get_num_threads()
        fewer = [each for each in self._numbers if each < number]
        more = [each for each in self._numbers if each > number]
        for other in (*(fewer[:1] if load >= SLOW else ()), *more[-1:]):
            if self._clock() >= self._next_s[other]:
                self._before = number, load
                torch.set_num_threads(other)
                return

    def _judge(self, before: int, load_before: float, load: float) -> None:
        number = torch.get_num_threads()
        worth = self._worth if number == self._numbers[0] else MARGIN
        if load_before >= worth * load:
            left, wait_s = before, RETRY_S
        else:
            left, wait_s = number, min(2.0 * self._wait_s[number], LONGEST_RETRY_S)
            torch.set_num_threads(before)
        self._wait_s[left], self._next_s[left] = wait_s, self._clock() + wait_s
        self._before = None


def candidates(default: int) -> list[int]:
    """torch's own number first, one less, then halves of it down to 1."""
    found = [default]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    if default - 1 > 0 and default - 1 not in found:
        found.insert(1, default - 1)
    return found


def choose_threads(
    step: Callable[[], object], beside_page: bool = False, clock: Clock = perf_counter
) -> Threads:
    """Set torch's threads to the best number for `step`. CPU only."""
    default = torch.get_num_threads()
    step_ms = dict[int, float]()
    for count in candidates(default):
        torch.set_num_threads(count)
        step_ms[count] = _step_ms(step, clock)
    usual, worth = default, 1.0
    if default > 1 and _are_all(default):
        worth = WORTH_ALL if beside_page else MARGIN
        if step_ms[default - 1] < worth * step_ms[default]:
            usual = default - 1
    best = min(step_ms, key=lambda count: step_ms[count])
    is_better = best < usual and step_ms[usual] > MARGIN * step_ms[best]
    return Threads(default, best if is_better else usual, worth, clock)


def _are_all(num_threads: int) -> bool:
    """Whether so many leave no core free; two threads of a processor share one."""
    return 2 * num_threads >= (os.cpu_count() or 1)


def _step_ms(step: Callable[[], object], clock: Clock) -> float:
    times, begun = list[float](), clock()
    for _ in range(TIMED_STEPS + 1):  # the first warms up
        started = clock()
        step()
        times.append(1000.0 * (clock() - started))
        if clock() - begun > MOST_SECONDS and len(times) > 1:
            break
    return median(times[1:])
