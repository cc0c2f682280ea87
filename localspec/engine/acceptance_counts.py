"""Discounted counts of what came of one drafter's drafts in one situation.

Contract: a fully accepted draft is censored: positions beyond it were not tried and are not
counted. What was learnt long ago fades by the rounds that passed since. `as_row` and `from_row`
are its plain data.

Not here: which records there are and what is concluded from them (acceptance).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_POSITIONS = 16
PRIOR_ROUNDS = 50.0
MOST_FADED = 0.3  # of a record is left after however long an absence
SUMS = ("num_rounds", "tokens", "ms", "drafted", "steps")  # of a record, besides positions


def no_positions() -> list[float]:
    return [0.0] * MAX_POSITIONS


@dataclass
class Record:
    """Counts of one (drafter, signal, situation).

    tokens, ms: what its rounds gave, and what they cost by the cost table; as sums, so that
    their ratio is a rate. drafted, steps: tokens it drafted and how often it ran for them.
    last_round: the clock at its last observation. discount: a round's weight after one more.
    """

    discount: float

    tried: list[float] = field(default_factory=no_positions)
    accepted: list[float] = field(default_factory=no_positions)
    num_rounds: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    drafted: float = 0.0
    steps: float = 0.0
    last_round: int = 0

    def observe(
        self, num_drafted: int, num_accepted: int, num_used: int, round_ms: float, clock: int
    ) -> None:
        """One verified draft: positions up to and including the first rejection were tried.

        What was learnt long ago fades by the rounds that passed since, whoever drafted them, so
        that a rare look at a drafter can change its picture.
        """
        self._scale(max(MOST_FADED, self.discount ** max(1, clock - self.last_round)))
        self.last_round = clock
        self.num_rounds += 1.0
        self.tokens += 1.0 + min(num_used, num_accepted)
        self.ms += round_ms
        for i in range(min(num_drafted, num_accepted + 1, MAX_POSITIONS)):
            self.tried[i] += 1.0
            self.accepted[i] += 1.0 if i < num_accepted else 0.0

    def cap(self, num_rounds: float = PRIOR_ROUNDS) -> None:
        """The same rates, worth at most so many rounds."""
        if self.num_rounds > num_rounds:
            self._scale(num_rounds / self.num_rounds)

    def _scale(self, share: float) -> None:
        self.tried = [value * share for value in self.tried]
        self.accepted = [value * share for value in self.accepted]
        self.num_rounds *= share
        self.tokens *= share
        self.ms *= share
        self.drafted *= share
        self.steps *= share

    def as_row(self) -> dict[str, Any]:
        names = ("tried", "accepted", *SUMS)
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_row(cls, discount: float, row: Mapping[str, Any]) -> Record:
        """KeyError, ValueError, TypeError for anything but what `as_row` made."""
        found = cls(discount, _numbers(row["tried"]), _numbers(row["accepted"]))
        for name in SUMS:
            setattr(found, name, number(row[name]))
        if any(a > t for t, a in zip(found.tried, found.accepted, strict=True)):
            raise ValueError("more was accepted than tried")
        found.cap()
        return found


def _numbers(values: Sequence[Any]) -> list[float]:
    if len(values) != MAX_POSITIONS:
        raise ValueError("the acceptance record has another size")
    return [number(value) for value in values]


def number(value: Any) -> float:
    """A count out of plain data. Raises ValueError for what is none."""
    found = float(value)
    if not 0.0 <= found < float("inf"):
        raise ValueError(f"{value} is no count")
    return found
