"""The statistics of a comparison: pure functions of numbers and token ids.

Contract: intervals are 95 % bootstrap percentiles over the prompts, with a fixed seed, so that a
report can be made again from the same numbers. Unknown is None: nothing here divides by zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

NUM_RESAMPLES = 2000
TAILS = (2.5, 97.5)  # percent
GRAM_LENGTH = 4

# (output tokens, decode ms) of one reply; (0, 0.0) where its time is unknown.
Timed = tuple[int, float]


@dataclass(frozen=True)
class Estimate:
    """A ratio and its 95 % interval; the interval is None below two values."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


def median_ratio(ratios: Sequence[float], seed: int = 0) -> Estimate:
    """The median of ratios that were paired by prompt."""
    if not ratios:
        return Estimate()
    values = np.array(ratios)
    if len(values) == 1:
        return Estimate(ratios[0])
    drawn = _resamples(len(values), seed)
    low, high = np.percentile(np.median(values[drawn], axis=1), TAILS)
    return Estimate(float(np.median(values)), float(low), float(high))


def rate_ratio(ours: Sequence[Timed], theirs: Sequence[Timed], seed: int = 0) -> Estimate:
    """Tokens over time of all prompts together, ours over theirs, in the same order of prompts.

    Resamples in which a side has no token or no time are left out of the interval.
    """
    our_rate, their_rate = rate(ours), rate(theirs)
    if our_rate is None or their_rate is None:
        return Estimate()
    if len(ours) == 1:
        return Estimate(our_rate / their_rate)
    table = np.array([(*a, *b) for a, b in zip(ours, theirs, strict=True)])  # [N, 4]
    sums = table[_resamples(len(table), seed)].sum(axis=1)  # [R, 4]
    known = sums[(sums > 0.0).all(axis=1)]
    ratios = known[:, 0] * known[:, 3] / (known[:, 1] * known[:, 2])
    low, high = np.percentile(ratios, TAILS)
    return Estimate(our_rate / their_rate, float(low), float(high))


def rate(replies: Sequence[Timed]) -> float | None:
    """Tokens a ms of all replies together; None where they have no token or no time."""
    num_tokens, ms = sum(count for count, _ in replies), sum(ms for _, ms in replies)
    return num_tokens / ms if num_tokens and ms else None


def _resamples(size: int, seed: int) -> np.ndarray:
    """Indices drawn with replacement: [NUM_RESAMPLES, size]."""
    return np.random.default_rng(seed).integers(size, size=(NUM_RESAMPLES, size))


def inter_token_ms(token_times_ms: Sequence[float]) -> list[float]:
    """The wait before each token of one reply but the first, as a reader sees it.

    Tokens that come together have no wait between them, and the first of them carries the whole
    round: an arm that yields three tokens a round has a median of 0 and its rounds in the upper
    percentiles. The wait for the first token is the time to first token and not counted here.
    """
    return [later - earlier for earlier, later in pairwise(token_times_ms)]


def num_repeated_grams(tokens: Sequence[int]) -> tuple[int, int]:
    """(4-grams that stood earlier in the same output, 4-grams in all)."""
    total = max(0, len(tokens) - GRAM_LENGTH + 1)
    grams = {tuple(tokens[start : start + GRAM_LENGTH]) for start in range(total)}
    return total - len(grams), total


def repetition(outputs: Iterable[Sequence[int]]) -> float | None:
    """Share of repeated 4-grams over all outputs; None when no output is long enough."""
    counts = [num_repeated_grams(tokens) for tokens in outputs]
    total = sum(count for _, count in counts)
    return sum(repeated for repeated, _ in counts) / total if total else None
