"""Ratios, percentiles and rounding of what was measured.

Contract: of nothing they are None, never 0. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the values lie, on a straight line between two
    neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def rounded(value: Any, to: Callable[[float], float]) -> Any:
    """Plain data with `to` of every float in it."""
    if isinstance(value, float):
        return to(value)
    if isinstance(value, Mapping):
        return {name: rounded(each, to) for name, each in value.items()}
    return [rounded(each, to) for each in value] if isinstance(value, list | tuple) else value
