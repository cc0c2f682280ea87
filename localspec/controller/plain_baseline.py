"""What plain decoding of a turn's tokens would have taken, under the load that each round met.

It is the plain cost in quiet, times the load of the machine at that moment: that of the rounds
around, three of them later. What a round took far beyond the rounds around it happened once and not
at every token, as after a pause: plain decoding is charged for it once. A load slows the reply and
the estimate alike, however it scatters, so the gain is sure long before the load is: the estimate
is None only where what they do not share leaves the gain UNSURE. `least_ms` then still tells what
it is at least. Both are None where other sequences shared a round.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from localspec.controller.costs import Costs
from localspec.controller.load import WINDOW, Shown
from localspec.core.decoding import Step

UNSURE = 0.1  # The largest standard error of a gain that is shown, as a share of it.
ONE_SIDED = 1.645  # Standard errors: the truth of one turn in 20 lies lower.


class _Round(NamedTuple):
    """measured_ms: plain decoding for its tokens, as it was measured."""

    measured_ms: float
    took_ms: float
    shown: Shown


class PlainBaseline:
    """The estimate of one turn. costs: the controller's, which has learnt each round before it is
    observed here. was_shared: other sequences were in a round of this turn."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._waiting = deque[_Round]()  # Rounds whose load is not known yet.
        # Of each settled round: its plain cost under the load, and what is charged once.
        self._settled = list[tuple[float, float]]()
        self._loaded_ms = self._once_ms = 0.0  # Their sums.
        self._measured_ms = 0.0  # Plain decoding of all rounds, without any load.
        self._own_ms = 0.0  # All rounds, without any load.
        self._unseen_ms2 = 0.0  # The sum of squares of those that showed no load.
        self._draft_ms = self._took_ms = 0.0
        self._num_loads = 0  # Settled rounds that showed a load.
        self.was_shared = False

    def observe(self, step: Step, num_plain_rounds: int) -> None:
        """num_plain_rounds: that plain decoding needs for the tokens of this round."""
        if step.others.num_sequences:
            self.was_shared = True
            return
        shown = self._costs.load.latest
        measured_ms = num_plain_rounds * self._costs.measured_ms(1, step.context_length)
        self._waiting.append(_Round(measured_ms, step.verify_ms, shown))
        self._measured_ms += measured_ms
        self._own_ms += shown.own_ms
        self._unseen_ms2 += 0.0 if shown.is_shown else shown.own_ms**2
        self._draft_ms += step.draft_ms
        self._took_ms += step.verify_ms
        if len(self._waiting) > WINDOW // 2:
            self._settle_next()

    @property
    def plain_ms(self) -> float | None:
        """Of the rounds so far; None where they cannot be compared."""
        is_known = not self.was_shared and self._gain_error <= UNSURE
        return self._plain_ms(1.0) if is_known else None

    @property
    def least_ms(self) -> float | None:
        """Of the rounds so far, at least, in 19 of 20 turns; None where they showed no load. A load
        that so few rounds show may be a cost that was measured wrongly: it counts where it makes
        plain decoding faster, not where it makes it slower."""
        if self.was_shared or not self._num_loads:
            return None
        quiet_ms = self._costs.correction(1) * self._measured_ms
        return min(quiet_ms, self._plain_ms(math.exp(-ONE_SIDED * self._error)))

    def end_turn(self) -> tuple[float, ...]:
        """Plain decoding for the tokens of each round, in ms; their sum is `plain_ms`. Empty where
        the turn cannot be compared."""
        while self._waiting:
            self._settle_next()
        if self.plain_ms is None:
            return ()
        correction = self._costs.correction(1)
        return tuple(correction * ms + once_ms for ms, once_ms in self._settled)

    @property
    def _error(self) -> float:
        """Standard error of the mean of the loads, as a share."""
        variance = self._costs.load.variance
        return math.sqrt(variance / self._num_loads) if self._num_loads else math.inf

    @property
    def _gain_error(self) -> float:
        """Standard error of the gain, as a share: of what the reply and the estimate do not share.
        Drafts scatter as rounds do, beside the load, and so do rounds that showed none."""
        if not self._num_loads:
            return math.inf
        drafting = self._draft_ms / (self._draft_ms + self._took_ms)
        unseen = self._costs.load.variance * self._unseen_ms2 / self._own_ms**2
        return math.sqrt(2.0 * (self._error * drafting) ** 2 + unseen)

    def _plain_ms(self, share: float) -> float:
        """Of the rounds so far. share: of the load that they showed."""
        waiting_ms = self._costs.load.value * sum(each.measured_ms for each in self._waiting)
        quiet = share * self._costs.correction(1)
        return quiet * (self._loaded_ms + waiting_ms) + self._once_ms

    def _settle_next(self) -> None:
        """Take in the oldest round that waits, now that the rounds around it are known."""
        round_, load = self._waiting.popleft(), self._costs.load
        self._num_loads += round_.shown.is_shown
        expected_ms = load.value * round_.shown.own_ms
        is_stalled = round_.took_ms > load.stalled * expected_ms
        once_ms = round_.took_ms - expected_ms if is_stalled else 0.0
        self._settled.append((load.value * round_.measured_ms, once_ms))
        self._loaded_ms += load.value * round_.measured_ms
        self._once_ms += once_ms
