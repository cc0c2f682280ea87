"""What plain decoding of a turn's tokens would have taken, under the load that each round met.

Contract: `observe` takes every round of a turn; `plain_ms` is the estimate for those so far. It is
the plain cost measured on this machine, times the machine's load at that moment: what the rounds
around took of their measured costs, all together. Other programs slow rounds of every width alike,
so a load needs no plain round to be known. What a round took far beyond the rounds around it, more
than they usually scatter, happened once and not at every token, as after a pause: plain decoding is
charged for it once. Plain rounds between drafted ones correct what was measured wrongly. A load
slows the reply and the estimate alike, however it scatters, so the gain is sure long before the
load is: the estimate is None only where what they do not share leaves the gain UNSURE. `least_ms`
then still tells what it is at least. Both are None where other sequences shared a round. The costs
are read once: those of the controller follow the load slowly, and would be counted twice.

Not here: the ratios made of it (speculation), the controller's own costs (costs).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from localspec.controller.controller import was_asked
from localspec.controller.costs import MAX_DRAFT_TOKENS, Costs
from localspec.core.decoding import Step

WINDOW = 7  # rounds, of which the middle one has their load
# A round that takes more than so many times the median of its window had a pause of its own. On a
# busy machine rounds scatter as widely all the time: there it takes STALLED_SIGMAS of the scatter.
STALLED = 1.5
STALLED_SIGMAS = 3.0
TRUSTED = 2.0  # plain rounds that the measured costs are worth
MOST_TRUSTED = 64.0  # plain rounds that count
UNSURE = 0.1  # largest standard error of a gain that is shown, as a share
ONE_SIDED = 1.645  # standard errors: one turn in 20 lies lower
USUAL_SCATTER = 0.08  # of rounds, which counts as SCATTERED of them
SCATTERED = 4.0
MOST_SCATTERED = 16.0  # rounds that count, of this turn and those before


class _RecentMean:
    """Of the last values, about `most` of them; one value that is expected counts as `weight`."""

    def __init__(self, expected: float, weight: float, most: float) -> None:
        self._sum, self._num, self._most = weight * expected, weight, most

    @property
    def value(self) -> float:
        return self._sum / self._num

    def observe(self, value: float) -> None:
        kept = min(1.0, self._most / (self._num + 1.0))
        self._sum = kept * (self._sum + value)
        self._num = kept * (self._num + 1.0)


@dataclass(frozen=True)
class _Round:
    """cost_ms: measured, of plain decoding for its tokens. own_ms: measured, of the round itself;
    took_ms: what it took, without draft_ms. shows_load: whether the two can be compared."""

    cost_ms: float
    own_ms: float
    took_ms: float
    draft_ms: float
    is_plain: bool
    shows_load: bool


class PlainBaseline:
    """See the module. costs: as measured, before any load; not changed. was_shared: other sequences
    were in a round of this turn."""

    def __init__(self, costs: Costs) -> None:
        self._costs = Costs.restored(costs.snapshot())
        # Logarithms of what plain rounds took, as a share of what drafted rounds around them tell.
        self._shares = _RecentMean(0.0, TRUSTED, MOST_TRUSTED)
        # Squares of the logarithms of single rounds' loads beside the mean around them.
        self._scatter = _RecentMean(USUAL_SCATTER**2, SCATTERED, MOST_SCATTERED)
        self.begin_turn()

    def begin_turn(self) -> None:
        self._window = deque[_Round]()
        self._place = 0  # in the window, of the next round to settle
        # Of each settled round: its plain cost under the load, and what is charged once.
        self._settled = list[tuple[float, float]]()
        self._loaded_ms = self._once_ms = 0.0  # their sums
        self._cost_ms = 0.0  # plain, of all rounds, without any load
        self._own_sum_ms = 0.0  # of all rounds, without any load
        self._unseen_ms2 = 0.0  # of those that showed no load, the sum of the squares
        self._draft_ms = self._took_ms = 0.0
        self._load = 1.0  # of the last settled round
        self._num_loads = 0  # rounds that showed one
        self._num_plain = 0  # plain rounds since the last draft
        self.was_shared = False

    def observe(self, step: Step, num_plain_rounds: int) -> None:
        """num_plain_rounds: that plain decoding needs for the tokens of this round."""
        if step.others.num_sequences:
            self.was_shared = True
            return
        self._window.append(self._round(step, num_plain_rounds))
        latest = self._window[-1]
        self._cost_ms += latest.cost_ms
        self._own_sum_ms += latest.own_ms
        self._unseen_ms2 += 0.0 if latest.shows_load else latest.own_ms**2
        self._draft_ms += latest.draft_ms
        self._took_ms += latest.took_ms
        if len(self._window) - self._place > WINDOW // 2:
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
        return min(self._cost_ms, self._plain_ms(math.exp(-ONE_SIDED * self._error)))

    def end_turn(self) -> tuple[float, ...]:
        """Plain decoding for the tokens of each round, in ms; their sum is `plain_ms`. Empty where
        the turn cannot be compared."""
        while self._place < len(self._window):
            self._settle_next()
        if self.plain_ms is None:
            return ()
        return tuple(self._correction * ms + once_ms for ms, once_ms in self._settled)

    @property
    def _correction(self) -> float:
        """What a plain round takes under a load, as a share of its cost times the load."""
        return math.exp(self._shares.value)

    @property
    def _error(self) -> float:
        """Standard error of the mean of the loads, as a share."""
        return math.sqrt(self._scatter.value / self._num_loads) if self._num_loads else math.inf

    @property
    def _gain_error(self) -> float:
        """Standard error of the gain, as a share: of what the reply and the estimate do not share.
        Drafts scatter as rounds do, beside the load, and so do rounds that showed none."""
        if not self._num_loads:
            return math.inf
        drafting = self._draft_ms / (self._draft_ms + self._took_ms)
        unseen = self._unseen_ms2 / self._own_sum_ms**2
        return math.sqrt(2.0 * (self._error * drafting) ** 2 + self._scatter.value * unseen)

    @property
    def _stalled(self) -> float:
        """Times the median of its window that a round takes which had a pause of its own."""
        return max(STALLED, math.exp(STALLED_SIGMAS * math.sqrt(self._scatter.value)))

    def _plain_ms(self, share: float) -> float:
        """Of the rounds so far. share: of the load that they showed."""
        waiting = list(self._window)[self._place :]
        waiting_ms = self._load * sum(one.cost_ms for one in waiting)
        return share * self._correction * (self._loaded_ms + waiting_ms) + self._once_ms

    def _round(self, step: Step, num_plain_rounds: int) -> _Round:
        width, context = step.num_draft_tokens + 1, step.context_length
        plain_ms = self._costs.plain_ms(context)
        own_ms = self._costs.verify_ms(width, context)
        assert plain_ms and own_ms, "a baseline is made of measured costs"
        self._num_plain = 0 if was_asked(step) else self._num_plain + 1
        is_plain = not step.num_draft_tokens
        # The first round follows a pause, and the first plain one after a draft finds the
        # processor's caches cold.
        shows_load = self._num_plain > 1 if is_plain else width <= MAX_DRAFT_TOKENS + 1
        shows_load = shows_load and bool(self._window)
        cost_ms = num_plain_rounds * plain_ms
        return _Round(cost_ms, own_ms, step.verify_ms, step.draft_ms, is_plain, shows_load)

    def _settle_next(self) -> None:
        """Take in the round at the middle of the window."""
        one, around = self._window[self._place], [r for r in self._window if r.shows_load]
        stalled = self._stalled
        if around:
            most = stalled * median_low(self._share(each) for each in around)
            steady = [each for each in around if self._share(each) <= most]
            self._load = self._mean_load(steady)
            if one.shows_load:
                self._num_loads += 1
                if len(steady) > 1:
                    apart = math.log(min(self._share(one), most) / self._load)
                    # The mean holds the round itself, so the two are too near each other.
                    self._scatter.observe(apart**2 * len(steady) / (len(steady) - 1))
            drafted = [each for each in steady if not each.is_plain]
            if one.is_plain and one in steady and drafted:
                loaded_ms = one.own_ms * self._mean_load(drafted)
                self._shares.observe(math.log(one.took_ms / loaded_ms))
        expected_ms = self._load * self._own_ms(one)
        once_ms = one.took_ms - expected_ms if one.took_ms > stalled * expected_ms else 0.0
        self._settled.append((self._load * one.cost_ms, once_ms))
        self._loaded_ms += self._load * one.cost_ms
        self._once_ms += once_ms
        if self._place < WINDOW // 2:
            self._place += 1
        else:
            self._window.popleft()

    def _own_ms(self, one: _Round) -> float:
        """What the round itself takes without a load."""
        return one.own_ms * (self._correction if one.is_plain else 1.0)

    def _share(self, one: _Round) -> float:
        """The load by this round alone."""
        return one.took_ms / self._own_ms(one)

    def _mean_load(self, rounds: Sequence[_Round]) -> float:
        """By the sums, since a disturbance hits a round the more surely the longer it takes."""
        return sum(one.took_ms for one in rounds) / sum(self._own_ms(one) for one in rounds)
