"""The words for what the controller decided, with the figures it decided by.

Not here: the decision (controller).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.engine.options import Option

NOTHING_TO_PROPOSE = "Off this round: no drafter has anything to propose."
UNMEASURED = "Off: this machine has not been measured yet."
PLAIN_LOOK = "A round of plain decoding, to keep its cost measured."
TRIED = 0.5  # rounds of evidence: below it a rate is only assumed


def why_off(options: Sequence[Option], plain_ms: float) -> str:
    """options: those that had something to propose. plain_ms: one step of plain decoding."""
    if not options:
        return NOTHING_TO_PROPOSE
    best = max(options, key=lambda option: option.rate)
    if all(option.ceiling * plain_ms <= 1.0 for option in options):
        return f"Off: even with every token accepted {best.drafter} would not pay."
    gain = best.rate * plain_ms
    doubt = ", too little to be sure of" if gain > 1.0 else ""
    return (
        f"Off: {best.drafter} would reach {gain:.2f}x of plain decoding here{doubt} "
        f"({_accepted(best)})."
    )


def why_drafting(option: Option, plain_ms: float, shapes_itself: bool) -> str:
    """shapes_itself: the drafter decides how much it drafts."""
    length, gain = option.num_draft_tokens, option.rate * plain_ms
    about = "" if shapes_itself else f"about {_tokens(length)} a round, "
    return f"{option.drafter}: {about}{gain:.2f}x of plain decoding expected ({_accepted(option)})."


def why_exploring(option: Option, length: int, shapes_itself: bool) -> str:
    about = "" if shapes_itself else f" with {_tokens(length)} a round"
    return (
        f"A look at {option.drafter}{about}: little is known of it here, and it may be faster "
        f"({_accepted(option)})."
    )


def why_unmeasured(drafter: str) -> str:
    return f"{drafter}, as you chose; this machine has not been measured yet."


def why_silent(drafter: str) -> str:
    return f"{drafter}, as you chose: nothing to go by here."


def _accepted(option: Option) -> str:
    if option.evidence < TRIED:
        return f"assumed: first draft token accepted {option.rates[0]:.0%} of the time, not tried"
    return f"first draft token accepted {option.rates[0]:.0%} of the time"


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
