"""When to look again at what lost.

Contract: each option that lost is looked at again at doubling intervals of its own, sooner while
its loss may still be bad luck, and only while all looks together have cost no more than their
budget: a share of the time, and where nothing was known an allowance besides, since what is found
early pays longest. What looks at an option took beyond what was expected (it may have to
read the whole conversation first) is expected of the next ones; what they gave is luck.

Not here: what is looked at (policy).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

FIRST_PROBE, LAST_PROBE = 4, 512  # rounds between looks at an option that lost
PUT_OFF = 16  # rounds until it is asked again whether anybody has waited long enough
PROBE_BUDGET = 0.01
ALLOWANCE = 20.0  # rounds that looks may cost besides, in a situation that is new
SURCHARGE_RATE = 0.3  # memory of what looks took beyond expectation: three looks
EAGER_PROBES = 6  # looks at an option before a loss makes its next one come later


@dataclass
class _Wait:
    """Of one option. since: the round of its last look. surcharge_ms: what looks at it took beyond
    what was expected."""

    interval: int
    since: int
    surcharge_ms: float
    num_looks: int = 0


@dataclass
class Probing:
    """When to look again, in one situation. Rounds are counted from the first. allowance: in
    rounds of the usual length."""

    first: int = FIRST_PROBE
    budget: float = PROBE_BUDGET
    allowance: float = 0.0
    num_rounds: int = 0
    total_ms: float = 0.0
    lost_ms: float = 0.0
    num_probes: int = 0
    _not_before: int = 0  # the round
    _expected_ms: float = 0.0  # what the next look was expected to cost when last asked
    _look_ms: float = 0.0  # and to take
    _surcharge_ms: float = 0.0  # of looks at whatever: what is expected of the first at an option
    _next_surcharge_ms: float = 0.0
    _waits: dict[Hashable, _Wait] = field(default_factory=dict)

    @property
    def is_time(self) -> bool:
        """Whether there could be a look, if it costs what the last one asked for was to cost."""
        next_ms = self._expected_ms + max(0.0, self._next_surcharge_ms)
        allowed_ms = self.total_ms * (self.budget + self.allowance / max(1, self.num_rounds))
        return self.num_rounds >= self._not_before and self.lost_ms + next_ms <= allowed_ms

    def has_waited(self, option: Hashable) -> bool:
        """Whether this option's own interval has passed."""
        wait = self._waits.get(option)
        return wait is None or self.num_rounds - wait.since >= wait.interval

    def is_due(self, option: Hashable, expected_loss_ms: float, look_ms: float) -> bool:
        """Whether a look that should take and cost so much may be taken now."""
        wait = self._waits.get(option)
        self._expected_ms, self._look_ms = expected_loss_ms, look_ms
        self._next_surcharge_ms = self._surcharge_ms if wait is None else wait.surcharge_ms
        return self.is_time

    def put_off(self) -> None:
        """Nobody has waited long enough: there is no need to ask again soon."""
        self._not_before = self.num_rounds + PUT_OFF

    def ran(self, round_ms: float) -> None:
        self.total_ms += round_ms
        self.num_rounds += 1

    def probed(self, option: Hashable, loss_ms: float, look_ms: float, num_rounds: int = 1) -> None:
        """loss_ms: what the look cost against the best option; negative when it won. look_ms:
        what it took. num_rounds: of the look; each doubles the interval."""
        self.lost_ms += max(0.0, loss_ms)
        self.num_probes += 1
        wait = self._waits.setdefault(option, _Wait(self.first, 0, self._surcharge_ms))
        beyond_ms = look_ms - self._look_ms
        wait.surcharge_ms += SURCHARGE_RATE * (beyond_ms - wait.surcharge_ms)
        self._surcharge_ms += SURCHARGE_RATE * (beyond_ms - self._surcharge_ms)
        self._not_before = self.num_rounds + self.first
        self._expected_ms = self._next_surcharge_ms = 0.0
        wait.since = self.num_rounds
        wait.num_looks += 1
        if loss_ms < 0.0:
            wait.interval = self.first
        elif wait.num_looks > EAGER_PROBES:  # until then a loss may be bad luck
            wait.interval = min(LAST_PROBE, 2**num_rounds * wait.interval)
