"""The learning rate over a training: warm-up, constant, decay.

Contract: pure functions of progress, which runs from 0 to 1 by steps or, with a budget of minutes,
by trained time, so that a run ends in its decay however fast the machine is. The constant phase
can be left at any checkpoint.
Source: warm-up, stable, decay; Hu et al. 2024 (arXiv 2404.06395).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A budget in steps or minutes and the fractions of its phases."""

    peak_rate: float
    num_steps: int | None = None
    minutes: float | None = None
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.25

    def __post_init__(self) -> None:
        assert (self.num_steps is None) != (self.minutes is None), "give steps or minutes, not both"

    def progress(self, step: int, trained_seconds: float) -> float:
        """The used share of the budget, 0 to 1."""
        if self.num_steps is not None:
            return min(1.0, step / self.num_steps)
        assert self.minutes is not None
        return min(1.0, trained_seconds / (60 * self.minutes))

    def rate(self, progress: float) -> float:
        """The learning rate at this progress."""
        warm = min(1.0, (progress + 1e-3) / self.warmup_fraction)
        cool = min(1.0, (1.0 - progress) / self.decay_fraction)
        return self.peak_rate * min(warm, max(cool, 0.02))

    def is_decaying(self, progress: float) -> bool:
        return progress > 1.0 - self.decay_fraction
