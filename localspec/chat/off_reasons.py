"""Why nothing drafts: the reason codes, each with its sentence and its remedy.

Contract: pure functions. None means that something may draft, or that nothing is known yet.

Not here: the decision itself (engine.controller).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.backend import Description, DrafterStatus, OffReason, TurnStats
from localspec.core import OFF
from localspec.engine.reasons import NOTHING_TO_PROPOSE

SHORTEST_DRAFTED = 2  # tokens: every round ends with one of the target's own
WAIT = "Wait a moment: it is measured while no reply is being written."
LONGER_CHAT = "It is tried again automatically as the chat continues."


def off_now(
    loaded: Description | None, stats: TurnStats | None, was_lost: bool, is_over: bool = True
) -> OffReason | None:
    """stats: of the turn under way or the latest one on this backend, None before the first.
    is_over: whether that turn is."""
    if loaded is None:
        return None
    if not any(drafter.is_available for drafter in loaded.drafters):
        return no_drafter(loaded.drafters)
    if stats is not None and stats.num_steps:
        return of_reply(stats) if is_over else stats.off
    if loaded.calibration is None:
        return restarted() if was_lost else measuring()
    return None


def of_reply(stats: TurnStats) -> OffReason | None:
    """Of a finished reply; None where something was drafted. Otherwise the reply was too short, or
    the chosen drafter had nothing to propose."""
    if stats.num_drafts or stats.off is not None:
        return stats.off
    return no_room() if stats.num_output_tokens <= SHORTEST_DRAFTED else nothing_to_propose()


def of_round(reason: str, is_measured: bool, drafters: Sequence[DrafterStatus]) -> OffReason | None:
    """Of a round without a draft that the person had not switched off, by the policy's reason; None
    where it planned to draft (the end of a reply may leave no room) or only measured plain
    decoding."""
    if not reason.startswith("Off"):
        return None
    if not any(drafter.is_available for drafter in drafters):
        return no_drafter(drafters)
    if not is_measured:
        return measuring()
    return nothing_to_propose() if reason == NOTHING_TO_PROPOSE else does_not_pay(reason)


def no_drafter(drafters: Sequence[DrafterStatus]) -> OffReason:
    """No drafter can be used: the most specific of their reasons."""
    for drafter in drafters:
        if drafter.code in ("no_memory", "incompatible_vocabulary"):
            text = f"{drafter.name}: {drafter.reason}"
            return OffReason(drafter.code, text, REMEDIES[drafter.code])
    why = "; ".join(f"{drafter.name}: {drafter.reason}" for drafter in drafters)
    text = f"No drafter can be used: {why or 'there is none.'}"
    return OffReason("no_draft", text, REMEDIES["no_draft"])


def measuring() -> OffReason:
    text = "This machine has not been measured yet, so it is not known whether drafting is faster."
    return OffReason("measuring", text, WAIT)


def restarted() -> OffReason:
    text = "The engine was started again and has not measured this machine yet."
    return OffReason("engine_restarted", text, WAIT)


def as_chosen(drafter: str, num_draft_tokens: int | None) -> OffReason | None:
    """Of a turn in which the person switched drafting off; None where they did not."""
    if drafter == OFF:
        text, remedy = "You chose plain decoding.", "Choose auto as the drafter."
    elif num_draft_tokens == 0:
        text, remedy = "You fixed γ at 0.", "Empty the field Fixed γ under Advanced."
    else:
        return None
    return OffReason("switched_off", text, remedy)


def does_not_pay(reason: str) -> OffReason:
    return OffReason("does_not_pay", reason, LONGER_CHAT)


def no_room() -> OffReason:
    text = "The reply was over before anything could be drafted."
    return OffReason("no_room", text, "Nothing needs doing: longer replies are drafted.")


def nothing_to_propose() -> OffReason:
    text = "No drafter has anything to propose for this text."
    return OffReason("nothing_to_propose", text, LONGER_CHAT)


REMEDIES = {
    "no_memory": "Close other programs, shorten the context, or choose a smaller model.",
    "incompatible_vocabulary": "Choose a draft of the same family as the model.",
    "no_draft": "Choose a draft model for it.",
}
