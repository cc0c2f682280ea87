"""How many times its quiet cost a round takes now, because of other programs and heat.

One estimate serves the prices, the cost of plain decoding that a reply is compared with, and the
number of threads. Other programs slow rounds of every width alike, so any round shows the load.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

WINDOW = 7  # The load of a round is that of so many rounds around it.
# A round that takes more than so many times the median of its window had a pause of its own.
STALLED = 1.5
LOG_STALLED = math.log(STALLED)
# A busy machine scatters rounds all the time: there a pause is so many times their scatter.
STALLED_SIGMAS = 3.0
USUAL_SCATTER = 0.08  # The spread of the logarithms of rounds that is believed at first.
SCATTERED = 4.0  # The rounds that this first belief is worth.
MOST_SCATTERED = 16.0  # The rounds that the spread is a mean of, at most.


class Shown(NamedTuple):
    """A round. measured_ms: what its width took when it was measured; own_ms: the same as corrected
    since; took_ms: what it took. is_shown: whether it can be compared with others. draft: its
    drafter, and what its steps took of their measured cost."""

    width: int
    measured_ms: float
    own_ms: float
    took_ms: float
    is_shown: bool
    draft: tuple[str, float] | None = None


class Load:
    """A robust mean over a window of rounds, and their scatter.

    value: of the window, 1 before any round. centre: the round of the window whose neighbours on
    both sides are known, None where there is none. stalled: times the median that a round takes
    which had a pause of its own. variance: of the logarithm of a single round's load. is_mixed: the
    window has plain rounds and rounds with a draft. has_begun: the turn has had a round."""

    def __init__(self) -> None:
        self.value, self.stalled = 1.0, STALLED
        self.centre: Shown | None = None
        self.is_mixed = self.has_begun = False
        self._window = deque[Shown](maxlen=WINDOW)
        self.variance, self._num = USUAL_SCATTER**2, SCATTERED

    def begin_turn(self) -> None:
        """Forget the rounds of the turn before; its load stays until a round shows another."""
        self._window.clear()
        self.centre, self.has_begun = None, False

    @property
    def latest(self) -> Shown:
        return self._window[-1]

    def observe(self, shown: Shown) -> None:
        window = self._window
        window.append(shown)
        self.has_begun = True
        if len(window) > WINDOW // 2:
            self.centre = window[-1 - WINDOW // 2]
        shares = sorted([each.took_ms / each.own_ms for each in window if each.is_shown])
        if not shares:
            return
        num_shown = len(shares)
        usual = shares[(num_shown - 1) // 2]
        least, most = usual / self.stalled, usual * self.stalled
        own_ms, took_ms, num_steady, num_plain = 0.0, 0.0, 0, 0
        for each in window:
            if each.is_shown:
                num_plain += each.width == 1
                if least * each.own_ms <= each.took_ms <= most * each.own_ms:
                    own_ms += each.own_ms
                    took_ms += each.took_ms
                    num_steady += 1
        self.is_mixed = 0 < num_plain < num_shown
        # By the sums: a disturbance hits a round the more surely the longer it takes.
        self.value = took_ms / own_ms
        if (centre := self.centre) is not None and centre.is_shown and num_steady > 1:
            share = centre.took_ms / centre.own_ms
            share = least if share < least else most if share > most else share
            # The mean holds the round itself, so the two are too near each other.
            self._scatter(math.log(share / self.value) ** 2 * num_steady / (num_steady - 1))

    def _scatter(self, square: float) -> None:
        if self._num < MOST_SCATTERED:
            self._num += 1.0
        self.variance += (square - self.variance) / self._num
        pause = STALLED_SIGMAS * math.sqrt(self.variance)
        self.stalled = STALLED if pause < LOG_STALLED else math.exp(pause)
