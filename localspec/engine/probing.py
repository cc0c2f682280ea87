"""When to look again at what lost.

Contract: a look is due at doubling intervals, sooner while a loss may still be bad luck, and only
while all looks together have cost no more than their budget, a share of the time.

Not here: what is looked at (policy).
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PROBE, LAST_PROBE = 4, 512  # rounds between looks at an option that lost
PROBE_BUDGET = 0.01
EAGER_PROBES = 6  # looks before a loss makes the next one come later


@dataclass
class Probing:
    """When to look again at what lost, in one temperature bucket."""

    first: int = FIRST_PROBE
    budget: float = PROBE_BUDGET
    interval: int = 0
    rounds_since: int = 0
    total_ms: float = 0.0
    lost_ms: float = 0.0
    num_probes: int = 0

    def __post_init__(self) -> None:
        self.interval = self.interval or self.first

    def is_due(self, expected_loss_ms: float) -> bool:
        within_budget = self.lost_ms + expected_loss_ms <= self.budget * self.total_ms
        return self.rounds_since >= self.interval and within_budget

    def ran(self, round_ms: float) -> None:
        self.total_ms += round_ms
        self.rounds_since += 1

    def probed(self, loss_ms: float) -> None:
        """loss_ms: what the look cost against the best option; negative when it won."""
        self.lost_ms += max(0.0, loss_ms)
        self.rounds_since = 0
        self.num_probes += 1
        if loss_ms < 0.0:
            self.interval = self.first
        elif self.num_probes > EAGER_PROBES:  # until then a loss may be bad luck
            self.interval = min(LAST_PROBE, 2 * self.interval)
