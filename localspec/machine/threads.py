"""How many processor threads a step runs fastest with, by trying.

Contract: `choose_threads` times a step of the loaded model with torch's own number and with
fewer threads, and leaves torch at the fastest; torch's choice stands unless another is better by
MARGIN, so that what was learnt with it stays valid. A fraction of a second. CPU only.

Not here: the forward, costs of rounds (engine.calibrate).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

MARGIN = 1.15
TIMED_STEPS = 7
MOST_SECONDS = 1.0  # for one candidate: a large model is timed by fewer steps


def candidates(default: int) -> list[int]:
    """torch's own number first, then halves of it down to 1."""
    found = [default]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def choose_threads(step: Callable[[], object], clock: Callable[[], float] = perf_counter) -> int:
    """Set torch's threads to the fastest number for `step` and return it. clock: seconds."""
    default = torch.get_num_threads()
    step_ms = dict[int, float]()
    for count in candidates(default):
        torch.set_num_threads(count)
        step_ms[count] = _step_ms(step, clock)
    best = min(step_ms, key=lambda count: step_ms[count])
    chosen = best if step_ms[default] > MARGIN * step_ms[best] else default
    torch.set_num_threads(chosen)
    return chosen


def _step_ms(step: Callable[[], object], clock: Callable[[], float]) -> float:
    times, begun = list[float](), clock()
    for _ in range(TIMED_STEPS + 1):  # the first warms up
        started = clock()
        step()
        times.append(1000.0 * (clock() - started))
        if clock() - begun > MOST_SECONDS and len(times) > 1:
            break
    return median(times[1:])
