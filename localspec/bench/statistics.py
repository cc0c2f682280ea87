"""The statistics of a comparison: pure functions of numbers and token ids.

Contract: intervals are 95 % bootstrap percentiles over the prompts, with a fixed seed, so that a
report can be made again from the same numbers. Unknown is None: nothing here divides by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES, SEED = 2000, 0
TAILS = (2.5, 97.5)  # percent
GRAM_LENGTH = 4

# (output tokens, decode ms) of one reply; (0, 0.0) where its time is unknown.
Timed = tuple[int, float]


@dataclass(frozen=True)
class IntervalEstimate:
    """A value and its 95 % interval, which is None of fewer than two prompts."""

    value: float | None = None
    low: float | None = None
    high: float | None = None

    def columns(self, name: str, of_limits: str | None = None) -> dict[str, float | None]:
        """Under NAME, NAME_low and NAME_high. of_limits: another name for the two limits."""
        limits = of_limits or name
        return {name: self.value, f"{limits}_low": self.low, f"{limits}_high": self.high}


def median_of(values: Sequence[float]) -> IntervalEstimate:
    """The median of values, one for each prompt."""
    if not values:
        return IntervalEstimate()
    found = np.array(values)
    return _estimate(float(np.median(found)), found, lambda drawn: np.median(drawn, axis=1))


def rate_ratio(ours: Sequence[Timed], theirs: Sequence[Timed]) -> IntervalEstimate:
    """Tokens over time of all prompts together, ours over theirs, in the same order of prompts.

    Resamples in which a side has no token or no time are left out of the interval.
    """
    our_rate, their_rate = rate(ours), rate(theirs)
    if our_rate is None or their_rate is None:
        return IntervalEstimate()

    def ratios(drawn: np.ndarray) -> np.ndarray:
        sums = drawn.sum(axis=1)  # [R, 4]
        known = sums[(sums > 0.0).all(axis=1)]
        return known[:, 0] * known[:, 3] / (known[:, 1] * known[:, 2])  # type: ignore[no-any-return]

    pairs = np.array([(*a, *b) for a, b in zip(ours, theirs, strict=True)])  # [N, 4]
    return _estimate(our_rate / their_rate, pairs, ratios)


def _estimate(
    value: float, of_prompts: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> IntervalEstimate:
    """of_prompts: [N, ...]. statistic: of prompts drawn with replacement [R, N, ...], to [R]."""
    size = len(of_prompts)
    if size < 2:
        return IntervalEstimate(value)
    chosen = np.random.default_rng(SEED).integers(size, size=(NUM_RESAMPLES, size))
    low, high = np.percentile(statistic(of_prompts[chosen]), TAILS)
    return IntervalEstimate(value, float(low), float(high))


def rate(replies: Sequence[Timed]) -> float | None:
    """Tokens a ms of all replies together; None where they have no token or no time."""
    num_tokens, ms = sum(count for count, _ in replies), sum(ms for _, ms in replies)
    return num_tokens / ms if num_tokens and ms else None


def repetition(outputs: Iterable[Sequence[int]]) -> float | None:
    """Share of 4-grams that stood earlier in the same output, over all outputs; None when no output
    is long enough."""
    num_grams = num_different = 0
    for tokens in outputs:
        starts = range(len(tokens) - GRAM_LENGTH + 1)
        num_grams += len(starts)
        num_different += len({tuple(tokens[start : start + GRAM_LENGTH]) for start in starts})
    return (num_grams - num_different) / num_grams if num_grams else None
