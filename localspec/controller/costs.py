"""What a round costs on this machine, in ms: measured, interpolated, refined as it runs.

Contract: `verify_ms(width, context)` is the whole round without drafting, at `width` tokens in the
target's forward (the root and the draft). `draft_ms(drafter, num_steps, context)` is `propose`.
Both are None until measured. A measurement sets a cell. A round of normal running moves the cells
of its width near its context by a clamped share of its surprise, and every cell by the surprise
that two widths in a row share, because a busy or throttled machine slows them alike. Noise makes
rounds slower, never faster than they can be: so a faster round moves a cell more than a slower one,
and two rounds in a row that took far less than believed are believed at once. A width between two
measured ones becomes a cell of its own when it runs, and is forgotten when those are measured
again. State is plain data.

`at(context)` reads everything at one moment (`CostSnapshot`), so that costs compared with each
other are consistent, and keeps the reading until a cost has MOVED: reading takes host time. Beside
other sequences a draft token is priced as one more row of the forward that all share, a draft step
as its part of the draft's forward, as was seen, and a plain round as an equal share of one in which
nobody drafts: so a draft pays where it raises the tokens per ms of all together.

Not here: taking the measurements (calibrate), deciding (controller).
Source: the clamped innovation follows the cost model of Ollama's speculative depth controller.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from localspec.controller.cost_snapshot import CostSnapshot
from localspec.core.decoding import ALONE, Others, Step

WIDTHS = (1, 2, 4, 8, 16)
MAX_DRAFT_TOKENS = WIDTHS[-1] - 1  # with the root as wide as the widest width measured
SLOWER_RATE = 0.05  # how far one slower round moves the cost of its own width,
FASTER_RATE = 0.1  # and one faster round: other programs slow a round, and nothing speeds it up
COMMON_RATE = 0.1  # and how far it moves all, by what it shares with another width
MAX_SURPRISE = 0.25  # a round disturbed by something else must not count for more
REFUTING = 0.6  # of the believed cost: rounds that took less refute it
REFUTING_DRAFT = 0.4  # steps of one drafter are less alike
REFUTED_TO = 0.9  # of what is believed then, such rounds have taken
MOST_SHARE = 2.0  # see Costs._row_share and _draft_shares
# The part of a draft step that no other sequence shares, before rounds have shown it. In worlds
# with fixed prices (tests/controller/test_prices_of_a_batch.py, 5 seeds, 15 cells) `auto` is in the
# mean at 1.117 of plain batches with 0.5, at 1.104 with 1 and at 1.113 with 0.
OWN_STEPS = 0.5
MOVED = 0.03  # share by which a cost may move before readings are renewed
CONTEXT_RATIO = 0.25  # of the logarithm: contexts within 28 % share a reading
NEAR_CONTEXT = 256  # tokens: below it a context is short


class Curve:
    """One quantity over the context length: measured points, joined by straight lines."""

    def __init__(self, points: Mapping[int, float]) -> None:
        """points: context length -> ms."""
        self.points = dict(sorted(points.items()))
        self._contexts = list(self.points)

    def set(self, context: int, ms: float) -> None:
        self.points = dict(sorted({**self.points, context: ms}.items()))
        self._contexts = list(self.points)

    def at(self, context: int) -> float:
        """Linear between points, constant before the first, the last slope beyond the last."""
        points, contexts = self.points, self._contexts
        place = bisect_left(contexts, context)
        if place == 0 or len(contexts) == 1:
            return points[contexts[0]]
        right = min(place, len(contexts) - 1)
        before, behind = contexts[right - 1], contexts[right]
        low, high = points[before], points[behind]
        # Noise can tilt a flat curve downwards; more context never costs less.
        return low + max(0.0, high - low) * (context - before) / (behind - before)

    def scale(self, context: int, factor: float) -> None:
        """Multiply the nearest point by `factor`, and the point on the other side by less, the
        further it is. The points are first those that `at` reads, else what it reads at a long
        context, the cost of a shorter one, would not move."""
        points, contexts = self.points, self._contexts
        for before, behind in pairwise(contexts):
            points[behind] = max(points[before], points[behind])
        place = bisect_left(contexts, context)
        if place == 0 or place == len(contexts):
            points[contexts[min(place, len(contexts) - 1)]] *= factor
        else:
            before, behind = contexts[place - 1], contexts[place]
            to_before, to_behind = context - before, behind - context
            shares = min(1.0, to_behind / to_before), min(1.0, to_before / max(1, to_behind))
            points[before] *= 1.0 + shares[0] * (factor - 1.0)
            points[behind] *= 1.0 + shares[1] * (factor - 1.0)
        if factor < 1.0:
            for behind, before in pairwise(contexts[::-1]):
                points[before] = min(points[before], points[behind])


class Costs:
    """The cost table of one target and its drafters on one machine."""

    def __init__(self) -> None:
        self._verify: dict[int, Curve] = {}  # width -> curve
        self._measured: dict[int, Curve] = {}  # the same, never refined
        self._draft_step: dict[str, Curve] = {}  # drafter -> curve of one of its steps
        self._common = 1.0  # that all costs are multiplied by
        self._last = 0, 0.0  # the width that was observed last, and its surprise
        self._between = set[int]()  # widths that were not measured, and ran
        # A width or a drafter -> its last round's share of what was believed, where that refutes.
        self._refuting: dict[int | str, float] = {}
        # What was measured in this run: a width or a drafter, and the context.
        self._fresh = set[tuple[int | str, int]]()
        self._readings: dict[tuple[int, int, int], CostSnapshot] = {}
        self._sequence_ms: float | None = None  # what one more sequence adds to a forward, as seen
        self._row_share = 1.0  # what a row beyond the widest width takes, to what each of it does
        self._draft_shares: dict[str, float] = {}  # what a step takes beside others, to one alone
        self._moved: dict[int | str, float] = {}  # since then, what its costs were multiplied by

    @property
    def is_measured(self) -> bool:
        return 1 in self._verify and len(self._verify) > 1

    def is_fresh(self, what: int | str, context: int) -> bool:
        """Whether this width, or this drafter's step, was measured since the program started."""
        return (what, context) in self._fresh

    def knows(self, drafter: str) -> bool:
        """Whether a step of it was ever measured."""
        return drafter in self._draft_step

    def at(self, context: int, others: Others = ALONE) -> CostSnapshot | None:
        """The costs at this context, beside these sequences; None until measured."""
        place = int(math.log(context + NEAR_CONTEXT) / CONTEXT_RATIO)
        key = place, others.num_sequences, others.num_rows
        if key in self._readings or not self.is_measured:
            return self._readings.get(key)
        first = 1 + others.num_rows
        known = [self.verify_ms(width, context) for width in range(first, first + WIDTHS[-1])]
        rounds_ms = [ms for ms in known if ms is not None]
        share_ms = self._shared_ms(1 + others.num_sequences, context) / (1 + others.num_sequences)
        steps = {name: self.draft_ms(name, 1, context, others) for name in self._draft_step}
        fresh = CostSnapshot(
            tuple(share_ms + ms - rounds_ms[0] for ms in rounds_ms),
            {name: ms for name, ms in steps.items() if ms is not None},
        )
        self._readings[key] = fresh
        return fresh

    def _shared_ms(self, num_sequences: int, context: int) -> float:
        """A round of so many sequences of which none drafts."""
        rows_ms = self.verify_ms(num_sequences, context)
        assert rows_ms is not None, "costs are measured"
        return rows_ms + (num_sequences - 1) * self._added_ms(context)

    def _added_ms(self, context: int) -> float:
        """What one more sequence adds to a forward: its attention, where nothing was seen."""
        if self._sequence_ms is None:
            return max(0.0, self._cell(1, context) - self._cell(1, 0))
        return self._sequence_ms

    def observe_shared(self, step: Step) -> None:
        """Learn what one more sequence adds, or one more row beyond the widest width measured."""
        if not self.is_measured:
            return
        width, context = 1 + step.num_draft_tokens + step.others.num_rows, step.context_length
        widest, before_ms = max(self._verify), self._added_ms(context)
        rows_ms = self.verify_ms(min(width, widest), context) or 0.0
        over_ms = step.verify_ms - step.others.took_ms - rows_ms
        if width > widest:
            over_ms -= step.others.num_sequences * before_ms
            before, more = self._row_share, width / widest - 1.0
            share = min(MOST_SHARE, max(0.0, over_ms / rows_ms / more))
            self._row_share += SLOWER_RATE * min(1.0, more) * (share - before)
            self._note("row", (1.0 + self._row_share) / (1.0 + before))
        else:
            added_ms = min(max(0.0, over_ms) / step.others.num_sequences, 2.0 * before_ms + 1.0)
            self._sequence_ms = before_ms + SLOWER_RATE * (added_ms - before_ms)
            self._note("sequence", (rows_ms + self._sequence_ms) / (rows_ms + before_ms))

    def set_verify(self, width: int, context: int, verify_ms: float) -> None:
        self._readings.clear()
        for between in self._between:
            del self._verify[between]
        self._between.clear()
        self._verify.setdefault(width, Curve({})).set(context, verify_ms / self._common)
        self._measured.setdefault(width, Curve({})).set(context, verify_ms)
        self._fresh.add((width, context))

    def set_draft_step(self, drafter: str, context: int, step_ms: float) -> None:
        self._readings.clear()
        # At least a nanosecond: a step too short for the clock is still no division by zero.
        step_ms = max(step_ms, 1e-6) / self._common
        self._draft_step.setdefault(drafter, Curve({})).set(context, step_ms)
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
        if share > 1.0 and widths[right] == WIDTHS[-1]:
            return high * (1.0 + self._row_share * (width / WIDTHS[-1] - 1.0))
        if share > 1.0:  # measuring goes on; noise may have tilted the last piece downwards
            return high + (share - 1.0) * max(0.0, high - low)
        return low + share * (high - low)

    def measured_ms(self, width: int, context: int) -> float | None:
        """As it was measured, the cost of verifying `width` tokens, or of the next larger number
        that was measured; None where there is none."""
        larger = [known for known in self._measured if known >= width]
        return self._measured[min(larger)].at(context) if larger else None

    def plain_ms(self, context: int) -> float | None:
        """One token of plain decoding at this context."""
        return self.verify_ms(1, context) if 1 in self._verify else None

    def draft_ms(
        self, drafter: str, num_steps: float, context: int, others: Others = ALONE
    ) -> float | None:
        """Cost of so many steps of the drafter; None for one that was never measured."""
        curve = self._draft_step.get(drafter)
        if curve is None:
            return None
        share = self._draft_share(drafter, others) if others.num_sequences else 1.0
        return share * num_steps * curve.at(context) * self._common

    def _draft_share(self, drafter: str, others: Others) -> float:
        """Return what a step takes of this sequence's time beside others, to one alone."""
        at_first = OWN_STEPS + (1.0 - OWN_STEPS) / (1 + others.num_sequences)
        return self._draft_shares.get(drafter, at_first)

    def observe(self, width: int, context: int, verify_ms: float) -> None:
        """Refine from one round of normal running. One wider than all that was measured says
        nothing of the others."""
        expected = self.verify_ms(width, context)
        if expected is None or expected <= 0.0 or width > max(self._verify):
            return
        if width not in self._verify:
            self._make_cell(width)
        surprise = self._learn(width, self._verify[width], context, verify_ms / expected, REFUTING)
        if width == 1:
            self._follow_plain(context, surprise)
        self._follow_machine(width, surprise)

    def _follow_plain(self, context: int, surprise: float) -> None:
        """Move all other costs near this context with that of a plain round. Widths are measured
        in turns, so they are right beside each other. Where nothing is drafted, no other round
        shows that the machine has changed: the calmer it is, the dearer drafting would seem."""
        factor = _moved_by(surprise)
        for width, curve in self._verify.items():
            if width > 1:
                self._move(width, curve, context, factor)
        for drafter, curve in self._draft_step.items():
            self._move(drafter, curve, context, factor)

    def _learn(
        self, what: int | str, curve: Curve, context: int, share: float, refuting: float
    ) -> float:
        """Move a curve near this context by what a round took of the cost that was believed.
        Returns the surprise that is left for the machine's state."""
        before = self._refuting.pop(what, None)
        if share < refuting:
            if before is not None:
                self._move(what, curve, context, max(before, share) / REFUTED_TO)
                return 0.0
            self._refuting[what] = share
        surprise = max(-MAX_SURPRISE, min(MAX_SURPRISE, share - 1.0))
        self._move(what, curve, context, _moved_by(surprise))
        return surprise

    def _move(self, what: int | str, curve: Curve, context: int, factor: float) -> None:
        curve.scale(context, factor)
        self._note(what, factor)

    def _note(self, what: int | str, factor: float) -> None:
        """Drop the readings once a cost has moved."""
        moved = self._moved[what] = self._moved.get(what, 1.0) * factor
        if abs(moved - 1.0) > MOVED:
            self._readings.clear()
            self._moved.clear()

    def _make_cell(self, width: int) -> None:
        """Give a width between two that were measured a curve of its own, as it was taken to be."""
        contexts = sorted({at for curve in self._verify.values() for at in curve.points})
        found = {at: self.verify_ms(width, at) for at in contexts}
        points = {at: ms / self._common for at, ms in found.items() if ms is not None}
        self._verify[width] = Curve(points)
        self._between.add(width)

    def _follow_machine(self, width: int, surprise: float) -> None:
        """Move all costs by what this round shares with the one before it, of another width: a busy
        machine slows every width, while one measured wrongly says nothing of the others."""
        last_width, last_surprise = self._last
        self._last = width, surprise
        if width != last_width and surprise * last_surprise > 0.0:
            factor = 1.0 + COMMON_RATE * min(surprise, last_surprise, key=abs)
            self._common *= factor
            self._note("", factor)

    def observe_draft(self, drafter: str, num_steps: int, step: Step) -> None:
        """Refine a drafter's step the same way; beside others, which draft in the same forwards,
        its share."""
        expected = self.draft_ms(drafter, num_steps, step.context_length, step.others)
        if expected is None or expected <= 0.0:
            return
        share = step.draft_ms / expected
        if not step.others.num_sequences:
            curve = self._draft_step[drafter]
            self._learn(drafter, curve, step.context_length, share, REFUTING_DRAFT)
            return
        factor = 1.0 + FASTER_RATE * (min(MOST_SHARE, share) - 1.0)
        before = self._draft_share(drafter, step.others)
        self._draft_shares[drafter] = min(MOST_SHARE, before * factor)
        self._note(drafter, factor)

    def _cell(self, width: int, context: int) -> float:
        return self._verify[width].at(context) * self._common

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


def _moved_by(surprise: float) -> float:
    """What a cost is multiplied by after a round that took so much more of it than believed."""
    return 1.0 + (SLOWER_RATE if surprise > 0.0 else FASTER_RATE) * surprise


def _positive(ms: Any) -> float:
    value = float(ms)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"a cost of {ms} ms is no cost")
    return value
