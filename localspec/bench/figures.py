"""The arithmetic of a comparison: pure functions of numbers and token ids.

Contract: medians of paired ratios with a bootstrap interval over the prompts (seeded, so that a
report can be made again from the same numbers), percentiles, the waits between tokens, and how
much an output repeats itself. Unknown is None.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

NUM_RESAMPLES = 2000
GRAM_LENGTH = 4


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval; the interval is None below two values."""

    median: float | None = None
    low: float | None = None
    high: float | None = None


def estimate(ratios: Sequence[float], seed: int = 0) -> Estimate:
    """Median of the ratios; the interval from medians of resampled prompts (percentiles)."""
    if not ratios:
        return Estimate()
    if len(ratios) == 1:
        return Estimate(ratios[0])
    rng = random.Random(seed)
    size = len(ratios)
    medians = sorted(median(rng.choices(ratios, k=size)) for _ in range(NUM_RESAMPLES))
    tail = NUM_RESAMPLES // 40  # 2.5 % on each side
    return Estimate(median(ratios), medians[tail], medians[-1 - tail])


def rate_ratio(
    ours: Sequence[tuple[int, float]], theirs: Sequence[tuple[int, float]], seed: int = 0
) -> Estimate:
    """Tokens over time of all prompts, ours over theirs; the interval by resampling prompts. Each
    is (tokens, ms) by prompt, in the same order. (`median` is the ratio itself.)"""
    if not ours:
        return Estimate()
    places = range(len(ours))
    rng = random.Random(seed)

    def ratio(chosen: Sequence[int]) -> float:
        return rate_of([ours[place] for place in chosen]) / rate_of(
            [theirs[place] for place in chosen]
        )

    found = sorted(ratio(rng.choices(places, k=len(ours))) for _ in range(NUM_RESAMPLES))
    tail = NUM_RESAMPLES // 40
    return Estimate(ratio(places), found[tail], found[-1 - tail])


def rate_of(runs: Sequence[tuple[int, float]]) -> float:
    """Tokens a ms of runs of (tokens, ms), all together."""
    return sum(count for count, _ in runs) / sum(ms for _, ms in runs)


def inter_token_ms(token_times_ms: Sequence[float]) -> list[float]:
    """The wait before each token of one reply but the first, as a reader sees it.

    Tokens that arrive together have no wait between them, and the first of them carries the whole
    round: an arm that yields three tokens a round has a median of 0 and its rounds in the upper
    percentiles. The first token's wait is the time to first token, and not counted here.
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
