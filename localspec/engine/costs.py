"""What a round costs on this machine, in ms: measured, interpolated, refined as it runs.

Contract: `verify_ms(width, context)` is the whole round without drafting, at `width` tokens in the
target's forward (the root and the draft). `draft_ms(drafter, num_steps, context)` is `propose`.
Both are None until measured. A measurement sets a cell. A round of normal running moves the width
it ran at by a clamped share of its surprise, and every width by the surprise that all widths share,
because a busy or throttled machine slows them alike. Noise makes rounds slower, never faster than
they can be: two rounds in a row that took far less than believed are believed at once, since the
machine was busy when it was measured. A width between two measured ones becomes a cell of its own
when it runs, and is forgotten when those are measured again. State is plain data.

`at(context)` reads everything at one moment (`CostSnapshot`), so that costs compared with each
other are consistent, and keeps the reading for KEPT_ROUNDS rounds: reading takes host time.

Not here: taking the measurements (calibrate), deciding (controller).
Source: the clamped innovation follows the cost model of Ollama's speculative depth controller.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WIDTHS = (1, 2, 4, 8, 16)
MAX_DRAFT_TOKENS = WIDTHS[-1] - 1  # with the root as wide as the widest width measured
OWN_RATE = 0.05  # how far one round moves its own width
COMMON_RATE = 0.04  # and how far it moves all, by what all have in common
SURPRISE_RATE = 0.2  # memory of a width's surprises: about five rounds
LATELY = 16  # rounds; a surprise of before says nothing of how busy the machine is now
MAX_SURPRISE = 0.25  # a round disturbed by something else must not count for more
REFUTING = 0.6  # of the believed cost: rounds that took less refute it
REFUTING_DRAFT = 0.4  # steps of one drafter are less alike
REFUTED_TO = 0.9  # of what is believed then, such rounds have taken
KEPT_ROUNDS = 64  # that a reading serves
CONTEXT_RATIO = 0.25  # of the logarithm: contexts within 28 % share a reading
NEAR_CONTEXT = 256  # tokens: below it a context is short


@dataclass
class Curve:
    """One quantity over the context length: measured points, joined by straight lines."""

    points: dict[int, float]  # context length -> ms

    def at(self, context: int) -> float:
        """Linear between points, constant before the first, the last slope beyond the last."""
        if len(self.points) == 1:
            return next(iter(self.points.values()))
        contexts = sorted(self.points)
        place = bisect_left(contexts, context)
        if place == 0:
            return self.points[contexts[0]]
        right = min(place, len(contexts) - 1)
        left = right - 1
        slope = (self.points[contexts[right]] - self.points[contexts[left]]) / (
            contexts[right] - contexts[left]
        )
        # Noise can tilt a flat curve downwards; more context never costs less.
        return self.points[contexts[left]] + max(0.0, slope) * (context - contexts[left])


class Costs:
    """The cost table of one target and its drafters on one machine."""

    def __init__(self) -> None:
        self._verify: dict[int, Curve] = {}  # width -> curve
        self._draft_step: dict[str, Curve] = {}  # drafter -> curve of one of its steps
        self._scale: dict[int, float] = {}  # width -> drift since it was measured
        self._surprises: dict[int, tuple[float, int]] = {}  # width -> its surprise, and when
        self._common = 1.0
        self._num_observed = 0
        self._between = set[int]()  # widths that were not measured, and ran
        # A width or a drafter -> its last round's share of what was believed, where that refutes.
        self._refuting: dict[int | str, float] = {}
        # What was measured in this run: a width or a drafter, and the context.
        self._fresh = set[tuple[int | str, int]]()
        self._readings: dict[int, tuple[int, CostSnapshot]] = {}

    @property
    def is_measured(self) -> bool:
        return 1 in self._verify and len(self._verify) > 1

    def is_fresh(self, what: int | str, context: int) -> bool:
        """Whether this width, or this drafter's step, was measured since the program started."""
        return (what, context) in self._fresh

    def knows(self, drafter: str) -> bool:
        """Whether a step of it was ever measured."""
        return drafter in self._draft_step

    def at(self, context: int) -> CostSnapshot | None:
        """The costs at this context; None until measured."""
        place = int(math.log(context + NEAR_CONTEXT) / CONTEXT_RATIO)
        made, found = self._readings.get(place, (0, None))
        if found is not None and self._num_observed - made < KEPT_ROUNDS:
            return found
        if not self.is_measured:
            return None
        known = [self.verify_ms(width, context) for width in range(1, MAX_DRAFT_TOKENS + 2)]
        steps = {name: self.draft_ms(name, 1, context) for name in self._draft_step}
        fresh = CostSnapshot(
            tuple(ms for ms in known if ms is not None),
            {name: ms for name, ms in steps.items() if ms is not None},
        )
        self._readings[place] = self._num_observed, fresh
        return fresh

    def set_verify(self, width: int, context: int, verify_ms: float) -> None:
        self._readings.clear()
        for between in self._between:
            del self._verify[between], self._scale[between]
            self._surprises.pop(between, None)
        self._between.clear()
        self._verify.setdefault(width, Curve({})).points[context] = verify_ms / self._common
        self._scale[width] = 1.0
        self._fresh.add((width, context))

    def set_draft_step(self, drafter: str, context: int, step_ms: float) -> None:
        self._readings.clear()
        # At least a nanosecond: a step too short for the clock is still no division by zero.
        step_ms = max(step_ms, 1e-6) / self._common
        self._draft_step.setdefault(drafter, Curve({})).points[context] = step_ms
        self._fresh.add((drafter, context))

    def verify_ms(self, width: float, context: int) -> float | None:
        """Cost of verifying `width` tokens (a mean may lie between two), None before anything was
        measured."""
        if width in self._verify:
            return self._cell(int(width), context)
        if not self._verify:
            return None
        widths = sorted(self._verify)
        right = min(bisect_left(widths, width), len(widths) - 1)
        if right == 0:
            return self._cell(widths[0], context)
        left = right - 1
        low, high = self._cell(widths[left], context), self._cell(widths[right], context)
        share = (width - widths[left]) / (widths[right] - widths[left])
        if share > 1.0:  # beyond the widest; noise may have tilted the last piece downwards
            return high + (share - 1.0) * max(0.0, high - low)
        return low + share * (high - low)

    def plain_ms(self, context: int) -> float | None:
        """One token of plain decoding at this context."""
        return self.verify_ms(1, context) if 1 in self._verify else None

    def draft_ms(self, drafter: str, num_steps: float, context: int) -> float | None:
        """Cost of so many steps of the drafter; None for one that was never measured."""
        curve = self._draft_step.get(drafter)
        return None if curve is None else num_steps * curve.at(context) * self._common

    def round_ms(
        self, drafter: str, num_tokens: float, context: int, num_steps: float | None = None
    ) -> float | None:
        """A whole round: drafting `num_tokens` in so many steps (None: one each) and verifying
        them; plain decoding for 0."""
        verify_ms = self.verify_ms(num_tokens + 1, context)
        steps = num_tokens if num_steps is None else num_steps
        draft_ms = self.draft_ms(drafter, steps, context) if num_tokens else 0.0
        return None if verify_ms is None or draft_ms is None else verify_ms + draft_ms

    def observe(self, width: int, context: int, verify_ms: float) -> None:
        """Refine from one round of normal running. One wider than all that was measured says
        nothing of the others."""
        expected = self.verify_ms(width, context)
        if expected is None or expected <= 0.0 or width > max(self._verify):
            return
        self._num_observed += 1
        refuted = self._refuted(width, verify_ms / expected, REFUTING)
        if refuted is not None:
            if width not in self._verify:
                self._make_cell(width)
            self._scale[width] *= refuted
            self._surprises.pop(width, None)
            return
        surprise = max(-MAX_SURPRISE, min(MAX_SURPRISE, verify_ms / expected - 1.0))
        if width not in self._verify:
            self._make_cell(width)
        lately, _ = self._surprises.get(width, (0.0, 0))
        lately += SURPRISE_RATE * (surprise - lately)
        self._surprises[width] = lately, self._num_observed
        self._common *= 1.0 + COMMON_RATE * self._agreed_surprise()
        self._scale[width] *= 1.0 + OWN_RATE * surprise

    def _refuted(self, what: int | str, share: float, refuting: float) -> float | None:
        """By how much the cost of a width or a drafter is to be corrected at once, where this
        round and the one before it both took less than `refuting` of it; None elsewhere. share:
        what this round took of it."""
        before = self._refuting.pop(what, None)
        if share >= refuting:
            return None
        if before is None:
            self._refuting[what] = share
            return None
        return max(before, share) / REFUTED_TO

    def _make_cell(self, width: int) -> None:
        """Give a width between two that were measured a curve of its own, as it was taken to be."""
        contexts = sorted({at for curve in self._verify.values() for at in curve.points})
        found = {at: self.verify_ms(width, at) for at in contexts}
        points = {at: ms / self._common for at, ms in found.items() if ms is not None}
        self._verify[width], self._scale[width] = Curve(points), 1.0
        self._between.add(width)

    def _agreed_surprise(self) -> float:
        """What all widths seen lately have in common: a busy machine slows them all, while one
        width that was measured wrongly says nothing about the others."""
        oldest = self._num_observed - LATELY
        seen = [surprise for surprise, at in self._surprises.values() if at >= oldest]
        if len(seen) < 2:
            return 0.0
        return max(0.0, min(seen)) + min(0.0, max(seen))

    def observe_draft(self, drafter: str, num_steps: int, context: int, draft_ms: float) -> None:
        """Refine a drafter's step the same way."""
        expected = self.draft_ms(drafter, num_steps, context)
        if expected is None or expected <= 0.0:
            return
        surprise = max(-MAX_SURPRISE, min(MAX_SURPRISE, draft_ms / expected - 1.0))
        refuted = self._refuted(drafter, draft_ms / expected, REFUTING_DRAFT)
        factor = refuted or 1.0 + OWN_RATE * surprise
        curve = self._draft_step[drafter]
        curve.points = {at: ms * factor for at, ms in curve.points.items()}

    def _cell(self, width: int, context: int) -> float:
        return self._verify[width].at(context) * self._scale[width] * self._common

    def snapshot(self) -> dict[str, Any]:
        """Plain JSON data of what was measured: the drift is folded into the points."""
        return {
            "verify_ms": {
                str(width): {str(at): self._cell(width, at) for at in curve.points}
                for width, curve in sorted(self._verify.items())
                if width not in self._between
            },
            "draft_step_ms": {
                name: {str(at): ms * self._common for at, ms in curve.points.items()}
                for name, curve in sorted(self._draft_step.items())
            },
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Costs:
        """The table a snapshot describes. KeyError, ValueError, TypeError for anything else."""
        costs = cls()
        for width, points in state["verify_ms"].items():
            for context, ms in points.items():
                costs.set_verify(int(width), int(context), _positive(ms))
        for drafter, points in state["draft_step_ms"].items():
            for context, ms in points.items():
                costs.set_draft_step(str(drafter), int(context), _positive(ms))
        costs._fresh.clear()
        return costs


class CostSnapshot:
    """All costs at one context. verify_ms[γ]: a round of γ draft tokens without drafting, for γ of
    0 to MAX_DRAFT_TOKENS. step_ms: one step of each drafter that was measured.

    jump_ms: what a draft of any size takes besides its places; place_ms[i]: what place i takes.
    Together they are the convex curve below verify_ms, which it touches where stopping can be best:
    between two widths of one kernel a place is free, and none is worth stopping at."""

    def __init__(self, verify_ms: tuple[float, ...], step_ms: Mapping[str, float]) -> None:
        self.verify_ms = verify_ms
        self.step_ms = step_ms
        self.plain_ms = verify_ms[0]
        self._rounds: dict[tuple[str, float], tuple[list[float], float]] = {}
        self.jump_ms, self.place_ms = _jump_and_places(verify_ms)

    def round_ms(self, drafter: str, num_tokens: float, num_steps: float) -> float:
        """A round of this drafter; a mean number of tokens lies between two widths."""
        return self.verified_ms(num_tokens) + num_steps * self.step_ms[drafter]

    def verified_ms(self, num_tokens: float) -> float:
        low = min(int(num_tokens), len(self.verify_ms) - 2)
        share = num_tokens - low
        return (1.0 - share) * self.verify_ms[low] + share * self.verify_ms[low + 1]

    def rounds(self, drafter: str, steps_a_token: float) -> tuple[list[float], float]:
        """The round with 0, 1, … MAX_DRAFT_TOKENS draft tokens, at least one step for a draft; and
        tokens per ms if every draft token were accepted."""
        key = drafter, steps_a_token
        if key not in self._rounds:
            step_ms = self.step_ms[drafter]
            round_ms = [
                ms + step_ms * (max(1.0, steps_a_token * length) if length else 0.0)
                for length, ms in enumerate(self.verify_ms)
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


def _positive(ms: Any) -> float:
    value = float(ms)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"a cost of {ms} ms is no cost")
    return value
