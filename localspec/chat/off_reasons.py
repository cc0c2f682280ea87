"""Why nothing drafts: the reason codes, each with its sentence and its remedy.

Contract: pure functions. None means that something may draft, or that nothing is known yet.

Not here: the decision itself (controller.controller).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localspec.core.backend import Description, DrafterStatus
from localspec.core.decoding import OFF, DraftPlan
from localspec.core.off_code import OffCode, OffReason
from localspec.core.turn_stats import TurnStats
from localspec.drafters.registry import label_of, labelled

SHORTEST_DRAFTED = 2  # tokens: every round ends with one of the target's own
WAIT = "Wait a moment: it is measured while no reply is being written."
LONGER_CHAT = "It is tried again automatically as the chat continues."
# Code: sentence, "" where the caller knows it, and remedy.
REASONS: Mapping[OffCode, tuple[str, str]] = {
    "does_not_pay": ("", LONGER_CHAT),
    "no_room": (
        "The reply was over before anything could be drafted.",
        "No action needed: longer replies are drafted.",
    ),
    "nothing_to_propose": ("No drafter has anything to propose for this text.", LONGER_CHAT),
    "no_memory": ("", "Close other programs, shorten the context, or choose a smaller model."),
    "no_draft": ("", "Choose a draft model for it."),
    "incompatible_vocabulary": ("", "Choose a draft of the same family as the model."),
    "measuring": (
        "This machine has not been measured yet, so it is not known whether drafting is faster.",
        WAIT,
    ),
    "engine_restarted": (
        "The engine was started again and has not measured this machine yet.",
        WAIT,
    ),
}


def off_now(
    loaded: Description | None, stats: TurnStats | None, was_lost: bool, is_over: bool = True
) -> OffReason | None:
    """stats: of the turn under way or the latest one on this backend, None before the first.
    is_over: whether that turn is. was_lost: whether this backend replaces a lost one."""
    if loaded is None or loaded.server is not None:
        return None
    missing = _no_drafter(loaded.drafters)
    if missing is not None:
        return missing
    if stats is not None and stats.num_steps:
        if is_over and stats.num_drafts:
            return None  # what its last rounds did without says nothing of the reply
        if not is_over or stats.off is not None:
            return stats.off
        is_short = stats.num_output_tokens <= SHORTEST_DRAFTED
        return _reason("no_room" if is_short else "nothing_to_propose")
    if loaded.calibration is None:
        return _reason("engine_restarted" if was_lost else "measuring")
    return None


def as_chosen(drafter: str, num_draft_tokens: int | None) -> OffReason | None:
    """Of a turn in which the person switched drafting off; None where they did not."""
    if drafter == OFF:
        text, remedy = "You switched drafting off.", "Choose auto as the speed."
    elif num_draft_tokens == 0:
        text, remedy = (
            "You set the draft length to 0.",
            "Empty the field Draft length under Advanced.",
        )
    else:
        return None
    return OffReason("switched_off", text, remedy)


def of_round(plan: DraftPlan, drafters: Sequence[DrafterStatus]) -> OffReason | None:
    """Of a round that the person had not switched off; None where its policy did not decide
    against drafting (the end of a reply may leave no room for a draft)."""
    if plan.off is None:
        return None
    return _no_drafter(drafters) or _reason(plan.off, labelled(plan.reason))


def _no_drafter(drafters: Sequence[DrafterStatus]) -> OffReason | None:
    """Why no drafter can be used, by the most specific of their reasons; None where one can."""
    if any(drafter.is_available for drafter in drafters):
        return None
    for drafter in drafters:
        if drafter.code in ("no_memory", "incompatible_vocabulary"):
            return _reason(drafter.code, f"{label_of(drafter.name)}: {drafter.reason}")
    why = "; ".join(f"{label_of(drafter.name)}: {drafter.reason}" for drafter in drafters)
    return _reason("no_draft", f"No drafter can be used: {why or 'there is none.'}")


def _reason(code: OffCode, text: str = "") -> OffReason:
    usual, remedy = REASONS[code]
    return OffReason(code, usual or text, remedy)
