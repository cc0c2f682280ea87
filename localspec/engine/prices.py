"""What rounds cost at one moment, as a policy asks for it.

Contract: costs that are compared with each other are of one moment, so plain decoding and every
drafter are read off the table together, and the reading is kept for KEPT_ROUNDS rounds and contexts
about as long. Reading is host time, of which the step of a small model has little.

Not here: the table itself (costs), what is learnt of acceptance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from localspec.engine.costs import Costs

KEPT_ROUNDS = 64
CONTEXT_RATIO = 0.25  # of the logarithm: contexts within 28 % have one reading
NEAR_CONTEXT = 256  # tokens: below it a context is short
MAX_DRAFT_TOKENS = 15  # with the root 16 tokens wide, the widest width measured


@dataclass(frozen=True)
class RoundCurve:
    """Of one drafter. round_ms: at γ = 0, 1, … MAX_DRAFT_TOKENS. ceiling: tokens per ms if every
    draft token were accepted, at the best γ."""

    round_ms: list[float]
    ceiling: float


class Prices:
    """One reading. verify_ms: by the number of draft tokens, 0 … MAX_DRAFT_TOKENS. jump_ms: what
    a draft of any size takes besides its places; place_ms: what each place takes, the dearer the
    later. Together they are never above verify_ms, and touch it where stopping can be best:
    between two widths of one kernel a place is free, and none is worth stopping at."""

    def __init__(self, costs: Costs, context: int) -> None:
        widths = range(1, MAX_DRAFT_TOKENS + 2)
        known = [costs.verify_ms(width, context) for width in widths]
        self.verify_ms = tuple(ms for ms in known if ms is not None)
        assert len(self.verify_ms) == len(widths), "read before anything was measured"
        self.jump_ms, self.place_ms = _jump_and_places(self.verify_ms)
        self._costs = costs
        self._context = context
        self._steps: dict[str, float | None] = {}
        self._curves: dict[str, RoundCurve] = {}

    @property
    def plain_ms(self) -> float:
        return self.verify_ms[0]

    def step_ms(self, drafter: str) -> float | None:
        """One step of the drafter; None for one that was never measured."""
        if drafter not in self._steps:
            self._steps[drafter] = self._costs.draft_ms(drafter, 1, self._context)
        return self._steps[drafter]

    def curve(self, drafter: str, steps_a_token: float) -> RoundCurve | None:
        """None where its step is not known."""
        if drafter in self._curves:
            return self._curves[drafter]
        step_ms = self.step_ms(drafter)
        if step_ms is None:
            return None
        round_ms = [
            ms + step_ms * (max(1.0, steps_a_token * length) if length else 0.0)
            for length, ms in enumerate(self.verify_ms)
        ]
        ceiling = max((n + 1) / round_ms[n] for n in range(1, len(round_ms)))
        self._curves[drafter] = RoundCurve(round_ms, ceiling)
        return self._curves[drafter]


def _jump_and_places(verify_ms: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """The convex curve below the costs of 1, 2, … draft tokens as steps, and how far its start
    lies above plain decoding and one such step."""
    plain_ms, *drafted = verify_ms
    for place in reversed(range(len(drafted) - 1)):  # a dear width may be passed by
        drafted[place] = min(drafted[place], drafted[place + 1])
    slopes = list[float]()
    start = 0
    while start < len(drafted) - 1:
        ahead = range(start + 1, len(drafted))
        slope, end = min(((drafted[n] - drafted[start]) / (n - start), -n) for n in ahead)
        slopes += [max(0.0, slope)] * (-end - start)
        start = -end
    first = min(max(0.0, drafted[0] - plain_ms), slopes[0] if slopes else math.inf)
    return max(0.0, drafted[0] - plain_ms - first), (first, *slopes)


class PriceList:
    """The readings in use."""

    def __init__(self) -> None:
        self._readings: dict[tuple[bool, int], tuple[int, Prices]] = {}
        self._num_rounds = 0

    def tick(self) -> None:
        """One more round was decoded."""
        self._num_rounds += 1

    def clear(self) -> None:
        self._readings.clear()

    def at(self, costs: Costs, is_greedy: bool, context: int) -> Prices | None:
        """None until `costs` are measured."""
        place = int(math.log(context + NEAR_CONTEXT) / CONTEXT_RATIO)
        made, found = self._readings.get((is_greedy, place), (-KEPT_ROUNDS, None))
        if found is not None and self._num_rounds - made < KEPT_ROUNDS:
            return found
        if not costs.is_measured:
            return None
        fresh = Prices(costs, context)
        self._readings[is_greedy, place] = (self._num_rounds, fresh)
        return fresh
