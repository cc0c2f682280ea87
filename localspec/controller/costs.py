"""What a round costs on this machine, in ms: measured table times residual times load.

The table is measured: a whole round without drafting by its width (the root and the draft, in one
forward of the target) and the context length, and one step of each drafter. The `load` is what all
rounds share now. A residual corrects one width or one drafter where its rounds take another share
of the measured cost than the rounds around them, as where another program was computing while it
was measured. A width that never ran is corrected like its neighbours that did.

`at(context)` reads everything in quiet at one moment (`Prices`) and keeps the reading until a cost
has MOVED: reading takes host time. Beside other sequences a draft token is priced as one more row
of the forward that all share, a draft step as its part of the draft's forward, as was seen, and a
plain round as an equal share of one in which nobody drafts: so a draft pays where it raises the
tokens per ms of all together. State is plain data.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import Any

from localspec.controller.load import Load, Shown
from localspec.controller.prices import Prices
from localspec.core.decoding import ALONE, Others, Step
from localspec.core.speculation import interpolated

WIDTHS = (1, 2, 4, 8, 16)
MAX_DRAFT_TOKENS = WIDTHS[-1] - 1  # With the root a draft is as wide as the widest width measured.
TRUSTED = 2.0  # The rounds that a measured cost is worth beside the rounds that ran.
MOST_TRUSTED = 32.0  # The rounds of one width or drafter that count, at most.
SHARED_RATE = 0.05  # How far one round beside others moves what others add to a forward.
MOST_SHARE = 2.0  # The most that a row or a step beside others may take, to what it takes alone.
# The part of a draft step that no other sequence shares, before rounds have shown it. In worlds
# with fixed prices (tests/controller/test_prices_of_a_batch.py, 5 seeds, 15 cells) `auto` is in the
# mean at 1.132 of plain batches with 0.5, and at 1.122 with 1 and with 0.
OWN_STEPS = 0.5
MOVED = 0.03  # The share by which a cost may move before readings are renewed.
CONTEXT_RATIO = 0.25  # A logarithm: contexts within 28 % share a reading.
NEAR_CONTEXT = 256  # Contexts below so many tokens are short.


def was_asked(step: Step) -> bool:
    """Whether a drafter had to say what it drafts, or that it has nothing to draft."""
    return step.num_draft_tokens > 0 or step.draft_ms > 0.0


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
        if context <= contexts[0]:
            return points[contexts[0]]
        place = bisect_left(contexts, context)
        if len(contexts) == 1:
            return points[contexts[0]]
        right = min(place, len(contexts) - 1)
        before, behind = contexts[right - 1], contexts[right]
        low, high = points[before], points[behind]
        # Noise can tilt a flat curve downwards; more context never costs less.
        return low + max(0.0, high - low) * (context - before) / (behind - before)


class Residual:
    """The logarithm of what one width or one drafter takes of its measured cost, besides the load.
    One disturbed round in three does not move it."""

    def __init__(self) -> None:
        self.value = 0.0
        self._recent = deque((0.0, 0.0), maxlen=3)
        self._num = TRUSTED

    def observe(self, share: float, usual: float) -> None:
        """share: of the measured cost times the load. usual: times that rounds usually scatter:
        where two of three rounds agree on more, what was believed is wrong."""
        self._recent.append(math.log(share))
        apart = sorted(self._recent)[1] - self.value
        if self._num < MOST_TRUSTED:
            self._num += 1.0
        self.value += apart if abs(apart) > math.log(usual) else apart / self._num


class Costs:
    """The costs of one target and its drafters on one machine. load: of rounds without others."""

    def __init__(self) -> None:
        self.load = Load()
        self._verify: dict[int, Curve] = {}  # By width.
        self._draft_step: dict[str, Curve] = {}  # By drafter: one of its steps.
        self._residuals: dict[int | str, Residual] = {}  # By width, and by drafter.
        self._was_asked = False  # In the round before.
        # What was measured in this run: a width or a drafter, and the context.
        self._fresh = set[tuple[int | str, int]]()
        self._readings: dict[tuple[int, int, int], Prices] = {}
        self._moved: dict[int | str, float] = {}  # By what costs were multiplied since reading.
        self._sequence_ms: float | None = None  # What one more sequence adds to a forward.
        self._row_share = 1.0  # What a row beyond the widest width takes, to what each of it does.
        self._draft_shares: dict[str, float] = {}  # What a step takes beside others, to one alone.

    # measured

    @property
    def is_measured(self) -> bool:
        return 1 in self._verify and len(self._verify) > 1

    def is_fresh(self, what: int | str, context: int) -> bool:
        """Whether this width, or this drafter's step, was measured since the program started."""
        return (what, context) in self._fresh

    def knows(self, drafter: str) -> bool:
        """Whether a step of it was ever measured."""
        return drafter in self._draft_step

    def set_verify(self, width: int, context: int, verify_ms: float) -> None:
        self._set(self._verify.setdefault(width, Curve({})), width, context, verify_ms)

    def set_draft_step(self, drafter: str, context: int, step_ms: float) -> None:
        # At least a nanosecond: a step too short for the clock is still no division by zero.
        curve = self._draft_step.setdefault(drafter, Curve({}))
        self._set(curve, drafter, context, max(step_ms, 1e-6))

    def _set(self, curve: Curve, what: int | str, context: int, ms: float) -> None:
        curve.set(context, ms)
        self.load = Load()  # What is measured is measured under the load of now.
        self._residuals.clear()
        self._readings.clear()
        self._fresh.add((what, context))

    # priced

    def verify_ms(self, width: float, context: int) -> float | None:
        """Cost now of verifying `width` tokens (a mean may lie between two), None before anything
        was measured."""
        return self.load.value * self._quiet_ms(width, context) if self._verify else None

    def plain_ms(self, context: int) -> float | None:
        """Cost now of one token of plain decoding at this context."""
        return self.verify_ms(1, context) if 1 in self._verify else None

    def draft_ms(
        self, drafter: str, num_steps: float, context: int, others: Others = ALONE
    ) -> float | None:
        """Cost now of so many steps of the drafter; None for one that was never measured."""
        if drafter not in self._draft_step:
            return None
        return self.load.value * num_steps * self._quiet_step_ms(drafter, context, others)

    def at(self, context: int, others: Others = ALONE) -> Prices | None:
        """Return the costs in quiet at this context, beside these sequences; None until
        measured."""
        place = int(math.log(context + NEAR_CONTEXT) / CONTEXT_RATIO)
        key = place, others.num_sequences, others.num_rows
        if key in self._readings or not self.is_measured:
            return self._readings.get(key)
        num, first = 1 + others.num_sequences, 1 + others.num_rows
        rounds_ms = [self._quiet_ms(first + count, context) for count in range(WIDTHS[-1])]
        share_ms = (self._quiet_ms(num, context) + (num - 1) * self._added_ms(context)) / num
        self._readings[key] = Prices(
            tuple(share_ms + ms - rounds_ms[0] for ms in rounds_ms),
            {name: self._quiet_step_ms(name, context, others) for name in self._draft_step},
        )
        return self._readings[key]

    def _quiet_ms(self, width: float, context: int) -> float:
        return self.measured_ms(width, context) * self.correction(width)

    def _quiet_step_ms(self, drafter: str, context: int, others: Others) -> float:
        share = self._draft_share(drafter, others) if others.num_sequences else 1.0
        return share * self._draft_step[drafter].at(context) * self.correction(drafter)

    def _draft_share(self, drafter: str, others: Others) -> float:
        """Return what a step takes of this sequence's time beside others, to one alone."""
        at_first = OWN_STEPS + (1.0 - OWN_STEPS) / (1 + others.num_sequences)
        return self._draft_shares.get(drafter, at_first)

    def measured_ms(self, width: float, context: int) -> float:
        """By the table, between and beyond the measured widths on straight lines."""
        if width in self._verify:
            return self._verify[int(width)].at(context)
        widths = sorted(self._verify)
        right = min(bisect_left(widths, width), len(widths) - 1)
        if right == 0:
            return self._verify[widths[0]].at(context)
        left = right - 1
        low, high = (self._verify[widths[place]].at(context) for place in (left, right))
        share = (width - widths[left]) / (widths[right] - widths[left])
        if share > 1.0 and widths[right] == WIDTHS[-1]:
            return high * (1.0 + self._row_share * (width / WIDTHS[-1] - 1.0))
        if share > 1.0:  # Measuring goes on; noise may have tilted the last piece downwards.
            return high + (share - 1.0) * max(0.0, high - low)
        return low + share * (high - low)

    def correction(self, what: float | str) -> float:
        """The residual; of a width over 1 that never ran, between those of its neighbours."""
        if what in self._residuals:
            return math.exp(self._residuals[what].value)  # type: ignore[index]
        if isinstance(what, str) or what <= 1:
            return 1.0
        near = {w: r.value for w, r in self._residuals.items() if not isinstance(w, str) and w > 1}
        return math.exp(interpolated(near, what)) if near else 1.0

    def _added_ms(self, context: int) -> float:
        """What one more sequence adds to a forward: its attention, where nothing was seen."""
        if self._sequence_ms is None:
            return max(0.0, self._quiet_ms(1, context) - self._quiet_ms(1, 0))
        return self._sequence_ms

    # learnt

    def begin_turn(self) -> None:
        self.load.begin_turn()

    def observe(self, step: Step, num_steps: int | None = None) -> None:
        """Learn from a round that was alone. num_steps: of its drafter, None where they say nothing
        of what a step takes."""
        if not self._verify:
            return
        load, width, context = self.load, 1 + step.num_draft_tokens, step.context_length
        # The first round follows a pause, and the first plain one after a draft finds the
        # processor's caches full of the draft's weights.
        is_shown = load.has_begun and (width > 1 or not self._was_asked) and width <= WIDTHS[-1]
        self._was_asked = width > 1 or step.draft_ms > 0.0
        measured_ms = self.measured_ms(width, context)
        own_ms = measured_ms * self.correction(width)
        draft = None
        if num_steps and step.drafter in self._draft_step:
            draft_ms = num_steps * self._draft_step[step.drafter].at(context)
            draft = step.drafter, step.draft_ms / draft_ms
        load.observe(Shown(width, measured_ms, own_ms, step.verify_ms, is_shown, draft))
        centre = load.centre
        if centre is None:
            return
        # Rounds of one kind alone may take another share of their cost because the machine changed.
        if centre.is_shown and load.is_mixed:
            self._correct(centre.width, centre.took_ms / (centre.measured_ms * load.value))
        if centre.draft is not None:
            drafter, share = centre.draft
            self._correct(drafter, share / load.value)

    def _correct(self, what: int | str, share: float) -> None:
        if share <= 0.0:
            return
        residual = self._residuals.get(what)
        if residual is None:
            residual = self._residuals[what] = Residual()
        before = residual.value
        residual.observe(share, self.load.stalled)
        self._note(what, math.exp(residual.value - before))

    def observe_shared(self, step: Step, num_steps: int | None = None) -> None:
        """Learn from a round beside others what one more sequence adds, or one more row beyond the
        widest width measured; and what a step of a draft takes that others share."""
        if not self.is_measured:
            return
        width, context = 1 + step.num_draft_tokens + step.others.num_rows, step.context_length
        widest, before_ms = max(self._verify), self._added_ms(context)
        rows_ms = self._quiet_ms(min(width, widest), context)
        over_ms = step.verify_ms - step.others.took_ms - rows_ms
        if width > widest:
            over_ms -= step.others.num_sequences * before_ms
            before, more = self._row_share, width / widest - 1.0
            share = min(MOST_SHARE, max(0.0, over_ms / rows_ms / more))
            self._row_share += SHARED_RATE * min(1.0, more) * (share - before)
            self._note("row", (1.0 + self._row_share) / (1.0 + before))
        else:
            added_ms = min(max(0.0, over_ms) / step.others.num_sequences, 2.0 * before_ms + 1.0)
            self._sequence_ms = before_ms + SHARED_RATE * (added_ms - before_ms)
            self._note("sequence", (rows_ms + self._sequence_ms) / (rows_ms + before_ms))
        if num_steps and step.drafter in self._draft_step:
            believed_ms = num_steps * self._quiet_step_ms(step.drafter, context, step.others)
            factor = 1.0 + 2.0 * SHARED_RATE * (min(MOST_SHARE, step.draft_ms / believed_ms) - 1.0)
            before = self._draft_share(step.drafter, step.others)
            self._draft_shares[step.drafter] = min(MOST_SHARE, before * factor)
            self._note(step.drafter, factor)

    def _note(self, what: int | str, factor: float) -> None:
        """Drop the readings once a cost has moved."""
        moved = self._moved[what] = self._moved.get(what, 1.0) * factor
        if abs(moved - 1.0) > MOVED:
            self._readings.clear()
            self._moved.clear()

    # kept

    def snapshot(self) -> dict[str, Any]:
        """Plain JSON data of what was measured: the residuals are folded into the points."""
        return {
            "verify_ms": {
                str(width): self._kept(width, c) for width, c in sorted(self._verify.items())
            },
            "draft_step_ms": {
                name: self._kept(name, c) for name, c in sorted(self._draft_step.items())
            },
        }

    def _kept(self, what: int | str, curve: Curve) -> dict[str, float]:
        return {str(at): ms * self.correction(what) for at, ms in curve.points.items()}

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


def _positive(ms: Any) -> float:
    value = float(ms)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"a cost of {ms} ms is no cost")
    return value
