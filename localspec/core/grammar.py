"""What a reply may be, as the engine and the drafters ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Grammar(Protocol):
    """What the reply of one turn may be. A state is named by the tokens of the reply up to it, so
    nothing is advanced or rolled back by the caller."""

    def masks(self, reply: Sequence[int], texts: Sequence[Sequence[int]]) -> list[bytes]:
        """Which tokens may follow `reply` and each of the drafted `texts`: one bit a token, the
        lowest bit of the first byte is token 0. All may follow a text that itself may not be."""
        ...

    def forced(self, text: Sequence[int]) -> tuple[int, ...]:
        """Tokens that spell all that must follow this beginning of the reply, as texts are usually
        spelled: a guess, since the target may spell it otherwise. Empty where nothing is forced."""
        ...
