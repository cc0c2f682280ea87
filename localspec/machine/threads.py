"""How many processor threads a step runs fastest with, by trying; how many may be asked for.

Contract: `choose_threads` times a step of the loaded model with torch's own number and with
fewer threads, and leaves torch at the fastest; torch's choice stands unless another is better by
MARGIN, so that what was learnt with it stays valid. Beside a page, which is drawn while a reply is
written, all cores are taken only where all but one would be slower by WORTH_ALL: every operation
waits for its slowest thread, and one whose core draws a page is slow. A fraction of a second. CPU
only.

On two cores with the demo model both are 1.4 times as fast as one in quiet; the first four replies
in a browser on the same cores ran at 270 tokens/s with both and at 365 with one (medians of three
starts each, in turns), the very first one at 46 to 94 and at 348 to 385.

Not here: the forward, costs of rounds (engine.calibrate).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from localspec.errors import ConfigError

MARGIN = 1.15
WORTH_ALL = 1.6
TIMED_STEPS = 7
MOST_FOR_EACH_CORE = 4  # of threads that a person names; beyond it they only wait for each other
MOST_SECONDS = 1.0  # for one candidate: a large model is timed by fewer steps


def candidates(default: int, beside_page: bool = False) -> list[int]:
    """torch's own number first, then halves of it down to 1; beside a page one less as well."""
    found = [default]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    if beside_page and default - 1 > 0 and default - 1 not in found:
        found.insert(1, default - 1)
    return found


def require_threads(flag: str, count: int) -> int:
    """The count. Raises ConfigError for one that no step could be run with: more threads than
    the system can start end the process."""
    most = MOST_FOR_EACH_CORE * (os.cpu_count() or 1)
    if not 1 <= count <= most:
        raise ConfigError(
            f"{flag} is {count}, but must lie between 1 and {most} on this computer: "
            f"{MOST_FOR_EACH_CORE} for each of its cores."
        )
    return count


def choose_threads(
    step: Callable[[], object],
    beside_page: bool = False,
    clock: Callable[[], float] = perf_counter,
) -> int:
    """Set torch's threads to the best number for `step` and return it. clock: seconds."""
    default = torch.get_num_threads()
    step_ms = dict[int, float]()
    for count in candidates(default, beside_page):
        torch.set_num_threads(count)
        step_ms[count] = _step_ms(step, clock)
    usual = default
    leaves_one = beside_page and default > 1 and _are_all(default)
    if leaves_one and step_ms[default - 1] < WORTH_ALL * step_ms[default]:
        usual = default - 1
    best = min(step_ms, key=lambda count: step_ms[count])
    is_better = best < usual and step_ms[usual] > MARGIN * step_ms[best]
    chosen = best if is_better else usual
    torch.set_num_threads(chosen)
    return chosen


def _are_all(num_threads: int) -> bool:
    """Whether so many leave no core free; two threads of a processor share one."""
    return 2 * num_threads >= (os.cpu_count() or 1)


def _step_ms(step: Callable[[], object], clock: Callable[[], float]) -> float:
    times, begun = list[float](), clock()
    for _ in range(TIMED_STEPS + 1):  # the first warms up
        started = clock()
        step()
        times.append(1000.0 * (clock() - started))
        if clock() - begun > MOST_SECONDS and len(times) > 1:
            break
    return median(times[1:])
