"""Hands out the policy of a turn: the controller's own choice, or what was asked for.

Not here: what is learnt (learnt), the rule by which rounds are decided (policy).
"""

from __future__ import annotations

from dataclasses import replace

from localspec.core import AUTO, OFF, DraftPlan, Outcome, Policy, SamplingParams, Sequence
from localspec.engine.acceptance import ALL_KINDS, Situation, bucket_of
from localspec.engine.learnt import Learnt
from localspec.engine.policy import AdaptivePolicy


class Controller(Learnt):
    """What is learnt, and the policies that use it."""

    def policy(
        self,
        sampling: SamplingParams,
        requested: str,
        num_draft_tokens: int | None,
        first_num_draft_tokens: int | None = None,
        kind: str = ALL_KINDS,
    ) -> Policy:
        """The policy of the turn that begins now. requested: AUTO, OFF or a drafter's name.
        num_draft_tokens: fixed γ or None. first_num_draft_tokens: γ of a chain until anything was
        learnt here, None: our own guess. kind: of text, which is learnt apart."""
        self.begin_turn()
        situation = Situation(bucket_of(sampling), kind)
        if requested == OFF or num_draft_tokens == 0:
            chosen = "chose plain decoding" if requested == OFF else "fixed γ at 0"
            return FixedPolicy(self, situation, DraftPlan(OFF, 0, reason=f"Off: you {chosen}."))
        if requested != AUTO and num_draft_tokens is not None:
            reason = f"{requested} with {num_draft_tokens} tokens a round, as you chose."
            plan = DraftPlan(requested, num_draft_tokens, reason=reason)
            return FixedPolicy(self, situation, plan)
        allowed = tuple(self.drafters) if requested == AUTO else (requested,)
        return AdaptivePolicy(
            self, situation, allowed, requested == AUTO, num_draft_tokens, first_num_draft_tokens
        )


class FixedPolicy:
    """The same plan every round, as asked; what comes of it teaches the controller."""

    def __init__(self, learnt: Learnt, situation: Situation, plan: DraftPlan) -> None:
        self._learnt = learnt
        self._situation = situation
        self._plan = plan

    def plan(self, sequence: Sequence) -> DraftPlan:
        if self._plan.drafter == OFF:
            return self._plan
        signal = self._learnt.drafters[self._plan.drafter].signal(sequence)
        return replace(self._plan, signal=signal)

    def candidates(self, sequence: Sequence) -> tuple[str, ...]:
        return () if self._plan.drafter == OFF else (self._plan.drafter,)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        self._learnt.learn(self._situation, outcome)
