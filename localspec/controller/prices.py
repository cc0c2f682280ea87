"""What rounds cost at one context, so that costs compared with each other are consistent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property


class Prices:
    """Costs of rounds in quiet at one context, in ms; a load multiplies them all alike.

    verify_ms[γ]: a round of γ draft tokens without drafting, for γ of 0 to MAX_DRAFT_TOKENS.
    step_ms: one step of each drafter that was measured. jump_ms: what a draft of any size takes
    besides its places; place_ms[i]: what place i takes. Together these two are the convex curve
    below verify_ms, which it touches where stopping can be best: between two widths of one kernel a
    place is free, and none is worth stopping at."""

    def __init__(self, verify_ms: tuple[float, ...], step_ms: Mapping[str, float]) -> None:
        self.verify_ms = verify_ms
        self.step_ms = step_ms
        self.plain_ms = verify_ms[0]
        self._rounds: dict[tuple[str, float, int | None], tuple[list[float], float]] = {}

    @property
    def jump_ms(self) -> float:
        return self._jump_and_places[0]

    @property
    def place_ms(self) -> tuple[float, ...]:
        return self._jump_and_places[1]

    @cached_property
    def _jump_and_places(self) -> tuple[float, tuple[float, ...]]:
        """Only a tree in use asks for them."""
        return _jump_and_places(self.verify_ms)

    def round_ms(self, drafter: str, num_tokens: float, num_steps: float) -> float:
        """A round of this drafter; a mean number of tokens lies between two widths."""
        return self.verified_ms(num_tokens) + num_steps * self.step_ms[drafter]

    def verified_ms(self, num_tokens: float) -> float:
        low = min(int(num_tokens), len(self.verify_ms) - 2)
        share = num_tokens - low
        return (1.0 - share) * self.verify_ms[low] + share * self.verify_ms[low + 1]

    def rounds(
        self, drafter: str, steps_a_token: float, most: int | None = None
    ) -> tuple[list[float], float]:
        """Return the cost of a round with 0, 1, … `most` draft tokens, None for MAX_DRAFT_TOKENS,
        with at least one step for a draft; and tokens per ms if every draft token were accepted."""
        key = drafter, steps_a_token, most
        if key not in self._rounds:
            step_ms, end = self.step_ms[drafter], None if most is None else most + 1
            round_ms = [
                ms + step_ms * (max(1.0, steps_a_token * length) if length else 0.0)
                for length, ms in enumerate(self.verify_ms[:end])
            ]
            ceiling = max((n + 1) / ms for n, ms in enumerate(round_ms) if n)
            self._rounds[key] = round_ms, ceiling
        return self._rounds[key]


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
