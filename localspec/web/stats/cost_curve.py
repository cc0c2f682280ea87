"""What a round costs on this machine by draft length, and the acceptance at which it pays.

Contract: pure, over the plain data of `Description.calibration`: ms of a round by width and by
context, ms of one step of each drafter. A round of γ drafted tokens takes the check of γ + 1 tokens
and γ steps. It breaks even at the α for which (1 - α^(γ+1)) / (1 - α) tokens a round make up for
T(γ) / T(0). A drafter that makes several tokens in a step breaks even earlier than drawn here.

Not here: measuring (engine.calibrate), deciding (engine.controller).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MAX_DRAFT_TOKENS = 8
Points = Mapping[str, float]


@dataclass(frozen=True)
class CostCurve:
    """One drafter. round_ms[γ] from γ = 0 on. break_even[γ - 1]: the share of guesses that must be
    accepted, None where not even all would do."""

    drafter: str
    round_ms: tuple[float, ...]
    break_even: tuple[float | None, ...]


def cost_curves(calibration: Mapping[str, Any] | None, context_length: int) -> list[CostCurve]:
    """One curve for each drafter that was measured; none before."""
    if calibration is None:
        return []
    widths = {int(width): at(points, context_length) for width, points in _table(calibration)}
    if 1 not in widths or len(widths) < 2:
        return []
    curves = []
    for name, points in calibration["draft_step_ms"].items():
        step_ms = at(points, context_length)
        round_ms = [
            _between(widths, gamma + 1) + gamma * step_ms for gamma in range(MAX_DRAFT_TOKENS + 1)
        ]
        pays = tuple(
            break_even(round_ms[gamma] / round_ms[0], gamma)
            for gamma in range(1, MAX_DRAFT_TOKENS + 1)
        )
        curves.append(CostCurve(name, tuple(round_ms), pays))
    return curves


def _table(calibration: Mapping[str, Any]) -> list[tuple[str, Points]]:
    return list(calibration["verify_ms"].items())


def at(points: Points, context_length: int) -> float:
    """ms at this context: on straight lines between what was measured, flat outside."""
    return _between({int(context): ms for context, ms in points.items()}, context_length)


def _between(values: Mapping[int, float], place: int) -> float:
    known = sorted(values)
    if place <= known[0]:
        return values[known[0]]
    for left, right in pairwise(known):
        if place <= right:
            share = (place - left) / (right - left)
            return values[left] + share * (values[right] - values[left])
    return values[known[-1]]


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Tokens of a round in which each guess is right with chance alpha."""
    return float(sum(alpha**length for length in range(num_draft_tokens + 1)))


def break_even(cost: float, num_draft_tokens: int) -> float | None:
    """The alpha at which a round gives as many tokens as it costs plain steps."""
    if cost <= 1.0:
        return 0.0
    if cost > num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected_tokens(middle, num_draft_tokens) < cost:
            low = middle
        else:
            high = middle
    return high
