"""Why nothing drafts: the reason codes, each with its sentence and its remedy.

Contract: pure functions over what a backend says. None means that something may draft, or that
nothing is known yet.

Not here: the decision itself (engine.policy).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.backend import Description, DrafterStatus, OffReason, TurnStats
from localspec.core import OFF

NOTHING_TO_PROPOSE = "Off this round: no drafter has anything to propose."  # as the policy says it
SHORTEST_DRAFTED = 2  # tokens: the model's own ends every round, so in fewer nothing is drafted
LONGER_CHAT = "It is looked at again by itself as the chat goes on."


def off_now(
    loaded: Description | None, stats: TurnStats | None, was_lost: bool, is_over: bool = True
) -> OffReason | None:
    """stats: of the turn under way or the latest one on this backend, None before the first.
    is_over: whether that turn is."""
    if loaded is None:
        return None
    if not any(drafter.is_available for drafter in loaded.drafters):
        return nothing_there(loaded.drafters)
    if stats is not None and stats.num_steps:
        return of_reply(stats) if is_over else stats.off
    if loaded.calibration is None:
        return restarted() if was_lost else measuring()
    return None


def of_reply(stats: TurnStats) -> OffReason | None:
    """Of a reply that is over; None where something was drafted. A drafter that was meant to draft
    and did not had no time for it, or nothing to say."""
    if stats.num_drafts or stats.off is not None:
        return stats.off
    return no_room() if stats.num_output_tokens <= SHORTEST_DRAFTED else nothing_to_propose()


def of_round(reason: str, is_measured: bool, drafters: Sequence[DrafterStatus]) -> OffReason | None:
    """Of a round without a draft that nobody had switched off, by the policy's reason; None where
    it meant to draft (at the end of a reply there may be no room) or only looked at plain
    decoding."""
    if not reason.startswith("Off"):
        return None
    if not any(drafter.is_available for drafter in drafters):
        return nothing_there(drafters)
    if not is_measured:
        return measuring()
    return nothing_to_propose() if reason == NOTHING_TO_PROPOSE else does_not_pay(reason)


def nothing_there(drafters: Sequence[DrafterStatus]) -> OffReason:
    """No drafter can be used: of their reasons the one that says most."""
    for drafter in drafters:
        if drafter.code in ("no_memory", "incompatible_vocabulary"):
            said = f"{drafter.name}: {drafter.reason}"
            return OffReason(drafter.code, said, REMEDIES[drafter.code])
    why = "; ".join(f"{drafter.name}: {drafter.reason}" for drafter in drafters)
    said = f"No drafter can be used: {why or 'none is there.'}"
    return OffReason("no_draft", said, REMEDIES["no_draft"])


def measuring() -> OffReason:
    text = "This machine has not been measured yet, so nobody knows whether drafting pays."
    return OffReason("measuring", text, "Wait a moment: it measures whenever nobody waits.")


def restarted() -> OffReason:
    text = "The engine was started again and has not measured this machine yet."
    return OffReason("engine_restarted", text, "Wait a moment: it measures whenever nobody waits.")


def as_chosen(drafter: str, num_draft_tokens: int | None) -> OffReason | None:
    """Of a turn in which drafting was switched off by the person; None where it was not."""
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
    return OffReason("no_room", text, "Nothing needs doing: a longer reply is drafted for.")


def nothing_to_propose() -> OffReason:
    text = "No drafter has anything to propose for this text."
    return OffReason("nothing_to_propose", text, LONGER_CHAT)


REMEDIES = {
    "no_memory": "Close other programs, shorten the context, or choose a smaller model.",
    "incompatible_vocabulary": "Choose a draft of the same family as the model.",
    "no_draft": "Choose a draft model for it.",
}
