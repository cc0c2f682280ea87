"""The policy of a turn: the adaptive choice, or what was asked for by name and length.

Not here: what is learnt (controller), the rule of the adaptive choice (adaptive_policy).
"""

from __future__ import annotations

from dataclasses import replace

from localspec.controller.acceptance import ALL_KINDS, Situation, bucket_of, situation_in
from localspec.controller.adaptive_policy import AdaptivePolicy
from localspec.controller.controller import Controller
from localspec.core.decoding import AUTO, OFF, DraftPlan, Outcome, Policy, SamplingParams, Sequence


def policy_of(
    controller: Controller,
    sampling: SamplingParams,
    requested: str,
    num_draft_tokens: int | None,
    first_num_draft_tokens: int | None = None,
    kind: str = ALL_KINDS,
) -> Policy:
    """The policy of the turn that begins now. requested: AUTO, OFF or a drafter's name.
    num_draft_tokens: fixed γ or None. first_num_draft_tokens: γ of a chain until anything is known
    of it, None: our own guess. kind: of text, which is learnt separately."""
    controller.begin_turn()
    situation = Situation(bucket_of(sampling), kind)
    if requested == OFF or num_draft_tokens == 0:
        chosen = "chose no drafting" if requested == OFF else "fixed γ at 0"
        return FixedPolicy(controller, situation, DraftPlan(OFF, 0, reason=f"Off: you {chosen}."))
    if requested != AUTO and num_draft_tokens is not None:
        reason = f"{requested} with {num_draft_tokens} tokens a round, as you chose."
        plan = DraftPlan(requested, num_draft_tokens, reason=reason)
        return FixedPolicy(controller, situation, plan)
    allowed = tuple(controller.drafters) if requested == AUTO else (requested,)
    return AdaptivePolicy(
        controller, situation, allowed, requested == AUTO, num_draft_tokens, first_num_draft_tokens
    )


class FixedPolicy:
    """The same plan every round, as asked; what comes of it teaches the controller."""

    def __init__(self, controller: Controller, situation: Situation, plan: DraftPlan) -> None:
        self._controller = controller
        self._answering = self._situation = situation
        self._plan = plan

    def plan(self, sequence: Sequence) -> DraftPlan:
        self._situation = situation_in(sequence, self._answering)
        if self._plan.drafter == OFF:
            return self._plan
        signal = self._controller.drafters[self._plan.drafter].signal(sequence)
        self._plan = replace(self._plan, signal=signal)
        return self._plan

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        self._controller.observe(self._situation, sequence, self._plan, outcome)
