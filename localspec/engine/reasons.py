"""The words for what a policy decided, with the figures it decided by.

Not here: the decision (policy).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localspec.engine.controller import Option


def why_off(options: Sequence[Option], plain_ms: float) -> str:
    """options: those that had something to propose. plain_ms: one step of plain decoding."""
    if not options:
        return "Off this round: no drafter has anything to propose."
    best = max(options, key=lambda option: option.rate)
    if all(option.curve.ceiling * plain_ms <= 1.0 for option in options):
        return f"Off: even with every token accepted {best.drafter} would not pay."
    gain = best.rate * plain_ms
    doubt = ", too little to be sure of" if gain > 1.0 else ""
    return (
        f"Off: {best.drafter} would reach {gain:.2f}x of plain decoding here{doubt} "
        f"(first draft token accepted {best.acceptance:.0%} of the time)."
    )


def why_drafting(option: Option, plain_ms: float, shapes_itself: bool) -> str:
    """shapes_itself: the drafter decides how much it drafts."""
    length, gain = option.num_draft_tokens, option.rate * plain_ms
    tokens = "token" if length == 1 else "tokens"
    about = "" if shapes_itself else f"about {length} {tokens} a round, "
    return (
        f"{option.drafter}: {about}{gain:.2f}x of plain decoding expected "
        f"(first draft token accepted {option.acceptance:.0%} of the time)."
    )
