"""Why nothing drafts: a fixed word for pages and statistics, and the reason for a person.

Contract: the words are kept; the engine gives some, the planner and the chat the others.

Not here: the sentences (chat.off_reasons).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OffCode = Literal[
    "does_not_pay",  # drafting would not be faster here
    "no_room",  # the reply was over before anything could be drafted
    "nothing_to_propose",  # no drafter has anything to propose for this text
    "no_memory",  # the drafters were unloaded, or did not fit
    "no_draft",  # there is nothing that could draft
    "incompatible_vocabulary",  # the chosen draft has another vocabulary
    "switched_off",  # the person chose plain decoding
    "measuring",  # this machine has not been measured yet
    "engine_restarted",  # the engine has just been started again
]


@dataclass(frozen=True)
class OffReason:
    """text: a sentence. remedy: what the person can do, "" where nothing needs doing."""

    code: OffCode
    text: str
    remedy: str = ""
