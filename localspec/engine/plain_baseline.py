"""What plain decoding of a turn's tokens would have taken, under the load that each round met.

Contract: `observe` takes every round of a turn; `plain_ms` is the estimate for those so far. It is
the plain cost measured on this machine, times the machine's load at that moment. The load is the
median of what the rounds around took, as shares of their measured costs. Plain rounds between the
drafted ones say what the load means for plain decoding, and correct it. Rounds under a load that
differs by more than CHANGED from that of every plain round have nothing to be compared with: with
more than a NEGLIGIBLE share of them the estimate is None. The costs are read once: those of the
controller follow the load slowly, and would be counted twice.

Not here: the ratios made of it (speculation), the controller's own costs (costs).
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

from localspec.core import Step
from localspec.engine.controller import ASKED_MS
from localspec.engine.costs import MAX_DRAFT_TOKENS, Costs

WINDOW = 7  # rounds: the load at a round is their median, the round in their middle
CHANGED = 1.3  # times: beyond this the load of a plain round says nothing of another round
NEGLIGIBLE = 0.05  # share of a turn without a plain round under its load
CORRECTION = 0.3  # weight of one more plain round under a load that is known


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
        self._level = 1.0  # the load at the latest plain round
        self._plain_share = 1.0  # what a plain round takes under a load of 1
        self._is_new_load = False
        self.begin_turn()

    def begin_turn(self) -> None:
        self._rounds_ms = list[float]()
        self._total_ms = 0.0
        self._waiting = deque[_Waiting]()
        self._alone: dict[int, float] = {}  # rounds without a plain one under their load, and it
        self._num_plain = 0  # plain rounds since the last draft

    def observe(self, step: Step, num_plain_rounds: int) -> bool:
        """num_plain_rounds: that plain decoding needs for the tokens of this round. Returns whether
        the load has just become another than that of the latest plain round."""
        width, context = step.num_draft_tokens + 1, step.context_length
        cost_ms = self._costs.plain_ms(context)
        own_ms = self._costs.verify_ms(width, context)
        assert cost_ms and own_ms, "a baseline is made of measured costs"
        is_asked = bool(step.num_draft_tokens) or step.draft_ms >= ASKED_MS
        self._num_plain = 0 if is_asked else self._num_plain + 1
        share, plain_share = step.verify_ms / own_ms, None
        if self._num_plain > 1:  # the first after a draft finds the processor's caches cold
            plain_share = share
            self._loads.append(share / self._plain_share)
        elif step.num_draft_tokens and width <= MAX_DRAFT_TOKENS + 1:
            self._loads.append(share)
        self._waiting.append(_Waiting(num_plain_rounds * cost_ms, plain_share))
        if len(self._waiting) > WINDOW // 2:
            self._settle(self._waiting.popleft())
        was_new, self._is_new_load = self._is_new_load, self._is_changed(self._load, self._level)
        return self._is_new_load and not was_new

    @property
    def plain_ms(self) -> float | None:
        """Of the rounds so far; None where they cannot be compared."""
        alone_ms = sum(self._rounds_ms[place] for place in self._alone)
        waiting_ms = sum(self._at_load(one) for one in self._waiting)
        total_ms = self._total_ms + waiting_ms
        if self._is_changed(self._load, self._level):
            alone_ms += waiting_ms
        return total_ms if alone_ms <= NEGLIGIBLE * total_ms else None

    def end_turn(self) -> tuple[float | None, ...]:
        """Plain decoding for the tokens of each round, in ms; None for those that cannot be
        compared. Their sum is `plain_ms`."""
        while self._waiting:
            self._settle(self._waiting.popleft())
        if self.plain_ms is not None:
            return tuple(self._rounds_ms)
        return tuple(
            None if place in self._alone else ms for place, ms in enumerate(self._rounds_ms)
        )

    @property
    def _load(self) -> float:
        return median(self._loads) if self._loads else self._level

    def _at_load(self, one: _Waiting) -> float:
        return one.cost_ms * self._load * self._plain_share

    def _settle(self, one: _Waiting) -> None:
        """Take in a round that stands in the middle of the window."""
        load = self._load
        if one.plain_share is not None:
            self._correct(one.plain_share, load)
        elif self._is_changed(load, self._level):
            self._alone[len(self._rounds_ms)] = load
        self._rounds_ms.append(self._at_load(one))
        self._total_ms += self._rounds_ms[-1]

    def _correct(self, share: float, load: float) -> None:
        """A plain round took this share of its cost: the rounds before it under its load, which had
        none, are compared with it."""
        is_new = self._is_changed(load, self._level)
        factor = (share / (load * self._plain_share)) ** (1.0 if is_new else CORRECTION)
        self._plain_share *= factor
        self._level = load
        for place, its_load in tuple(self._alone.items()):
            if not self._is_changed(its_load, load):
                self._total_ms += (factor - 1.0) * self._rounds_ms[place]
                self._rounds_ms[place] *= factor
                del self._alone[place]

    @staticmethod
    def _is_changed(load: float, level: float) -> bool:
        return not 1.0 / CHANGED < load / level < CHANGED
