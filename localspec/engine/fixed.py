"""The policy of a turn whose drafter and draft length were asked for.

Contract: the same plan every round; what comes of it teaches the controller all the same.

Not here: choosing (policy), what is learnt (controller).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localspec.core import OFF, DraftPlan, Outcome, Sequence

if TYPE_CHECKING:
    from localspec.engine.acceptance import Situation
    from localspec.engine.controller import Controller


class FixedPolicy:
    """One drafter at one length, as asked; still teaches the controller."""

    def __init__(
        self, controller: Controller, situation: Situation, drafter: str, length: int, reason: str
    ) -> None:
        self._controller = controller
        self._situation = situation
        self._drafter = drafter
        self._length = length
        self._reason = reason

    def plan(self, sequence: Sequence) -> DraftPlan:
        if self._drafter == OFF:
            return DraftPlan(OFF, 0, reason=self._reason)
        signal = self._controller.drafters[self._drafter].signal(sequence)
        return DraftPlan(self._drafter, self._length, reason=self._reason, signal=signal)

    def candidates(self, sequence: Sequence) -> tuple[str, ...]:
        return () if self._drafter == OFF else (self._drafter,)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        self._controller.learn(self._situation, outcome)
