"""What plain decoding of a turn's tokens would have taken, under the load that each round met.

Contract: `observe` takes every round of a turn; `plain_ms` is the estimate for those so far. It is
the plain cost measured on this machine, times the machine's load at that moment. The load is the
median of what the rounds around took, as shares of their measured costs. Plain rounds between the
drafted ones say what each load means for plain decoding, and correct it; what they showed holds
for later turns, and between two loads it is interpolated. Rounds under a load that lies beyond
those of all plain rounds, by more than CHANGED, have nothing to be compared with: with more than a
NEGLIGIBLE share of them the estimate is None, as where other sequences shared a round. The costs
are read once: those of the controller follow the load slowly, and would be counted twice.

Not here: the ratios made of it (speculation), the controller's own costs (costs).
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

from localspec.core import Step
from localspec.engine.controller import ASKED_MS
from localspec.engine.costs import MAX_DRAFT_TOKENS, Costs
from localspec.speculation import interpolated

WINDOW = 7  # rounds: the load at a round is their median, the round in their middle
CHANGED = 1.3  # times: beyond this the load of a plain round says nothing of another round
# Share of a turn without a plain round under its load. Their plain rounds are taken to be slowed
# as at the nearest load that is known, which is wrong by less than CHANGED: 5 % of the turn.
NEGLIGIBLE = 0.15
UNLIKE = 2.0  # times: a plain round this far from the rounds around it ran under another load
CORRECTION = 0.3  # weight of one more plain round under a load that is known
LEVELS = 100  # to a factor of e


def level_of(load: float) -> int:
    """The logarithm of a load, in steps."""
    return round(LEVELS * math.log(load))


REACH = level_of(CHANGED)


class _Waiting(NamedTuple):
    """A round whose load is not known yet. cost_ms: of plain decoding for its tokens, without
    load. plain_share: what a plain round took, as a share of its cost."""

    cost_ms: float
    plain_share: float | None


class PlainBaseline:
    """See the module. costs: as measured, before any load; not changed."""

    def __init__(self, costs: Costs) -> None:
        self._costs = Costs.restored(costs.snapshot())
        self._loads = deque[float](maxlen=WINDOW)
        # By the level of the load: what a plain round takes there, of its cost times the load.
        self._plain_shares = {0: 1.0}
        self._is_new_load = False
        self.begin_turn()

    def begin_turn(self) -> None:
        self._rounds_ms = list[float]()
        self._total_ms = 0.0
        self._waiting = deque[_Waiting]()
        # Rounds without a plain one under their load: it, and what plain decoding costs without it.
        self._alone: dict[int, tuple[float, float]] = {}
        self._num_plain = 0  # plain rounds since the last draft
        self._was_shared = False

    def observe(self, step: Step, num_plain_rounds: int) -> bool:
        """num_plain_rounds: that plain decoding needs for the tokens of this round. Returns whether
        the load has just become another than those of all plain rounds."""
        if step.others.num_sequences:
            self._was_shared = True
            return False
        width, context = step.num_draft_tokens + 1, step.context_length
        cost_ms = self._costs.plain_ms(context)
        own_ms = self._costs.verify_ms(width, context)
        assert cost_ms and own_ms, "a baseline is made of measured costs"
        is_asked = bool(step.num_draft_tokens) or step.draft_ms >= ASKED_MS
        self._num_plain = 0 if is_asked else self._num_plain + 1
        share, plain_share = step.verify_ms / own_ms, None
        if self._num_plain > 1:  # the first after a draft finds the processor's caches cold
            plain_share = share
            self._loads.append(share / self._plain_share(self._load))
        elif step.num_draft_tokens and width <= MAX_DRAFT_TOKENS + 1:
            self._loads.append(share)
        self._waiting.append(_Waiting(num_plain_rounds * cost_ms, plain_share))
        if len(self._waiting) > WINDOW // 2:
            self._settle(self._waiting.popleft())
        was_new, self._is_new_load = self._is_new_load, not self._is_known(self._load)
        return self._is_new_load and not was_new

    @property
    def plain_ms(self) -> float | None:
        """Of the rounds so far; None where they cannot be compared."""
        if self._was_shared:
            return None
        alone_ms = sum(self._rounds_ms[place] for place in self._alone)
        waiting_ms = sum(self._at_load(one.cost_ms, self._load) for one in self._waiting)
        total_ms = self._total_ms + waiting_ms
        if not self._is_known(self._load):
            alone_ms += waiting_ms
        return total_ms if alone_ms <= NEGLIGIBLE * total_ms else None

    def end_turn(self) -> tuple[float, ...]:
        """Plain decoding for the tokens of each round, in ms; their sum is `plain_ms`. Empty where
        the turn cannot be compared: a part of it would be its calm moments."""
        while self._waiting:
            self._settle(self._waiting.popleft())
        return () if self.plain_ms is None else tuple(self._rounds_ms)

    @property
    def _load(self) -> float:
        return median(self._loads) if self._loads else 1.0

    def _is_known(self, load: float) -> bool:
        """Whether plain rounds ran under such loads, or under lower and under higher ones."""
        low, high = min(self._plain_shares) - REACH, max(self._plain_shares) + REACH
        return low < level_of(load) < high

    def _plain_share(self, load: float) -> float:
        return interpolated(self._plain_shares, level_of(load))

    def _at_load(self, cost_ms: float, load: float) -> float:
        return cost_ms * load * self._plain_share(load)

    def _settle(self, one: _Waiting) -> None:
        """Take in a round that stands in the middle of the window."""
        load = self._load
        plain_share = None if one.plain_share is None else one.plain_share / load
        if plain_share is not None and 1 / UNLIKE < plain_share < UNLIKE:
            self._correct(plain_share, level_of(load))
        elif not self._is_known(load):
            self._alone[len(self._rounds_ms)] = load, one.cost_ms
        self._rounds_ms.append(self._at_load(one.cost_ms, load))
        self._total_ms += self._rounds_ms[-1]

    def _correct(self, plain_share: float, level: int) -> None:
        """A plain round took this share of its cost under the load. The rounds before it, whose
        load is known now, are compared with it."""
        shares = self._plain_shares
        nearest = min(shares, key=lambda known: abs(known - level))
        if abs(nearest - level) < REACH:
            level = round(nearest + CORRECTION * (level - nearest))
            plain_share = shares[nearest] * (plain_share / shares[nearest]) ** CORRECTION
            del shares[nearest]
        shares[level] = plain_share
        for place, (load, cost_ms) in tuple(self._alone.items()):
            if self._is_known(load):
                self._total_ms -= self._rounds_ms[place]
                self._rounds_ms[place] = self._at_load(cost_ms, load)
                self._total_ms += self._rounds_ms[place]
                del self._alone[place]
