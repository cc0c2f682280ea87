"""The thought and the answer of one reply by their tokens: which is being written, where it ends.

Contract: `ReplyParts` follows a reply token by token, so whatever drafts, a thought ends at its
budget exactly. With a budget, max_tokens are those of the answer, unless the limit says that
thought and answer share them; without one they do.

Not here: the text of both (chat.thinking), the loop (engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ThoughtLimit:
    """How a thought before the answer is told by its tokens, and where it is ended.

    opening: what a reply with a thought begins with. close: the token that ends one. closing: what
    ends one early. budget: tokens of a thought, None: no limit of its own. num_begun: of a thought
    that has begun in the prompt, None where none has. shares_max_tokens: max_tokens are those of
    thought and answer together, also with a budget.
    """

    opening: tuple[int, ...]
    close: int
    closing: tuple[int, ...]
    budget: int | None = None
    num_begun: int | None = None
    shares_max_tokens: bool = False


class ReplyParts:
    """end: length of prompt and reply at which the thought or the answer ends."""

    def __init__(self, prompt_length: int, max_tokens: int, limit: ThoughtLimit | None) -> None:
        self.is_thinking = False
        self.end = prompt_length + max_tokens
        self._prompt_length, self._max_tokens = prompt_length, max_tokens
        self._limit = limit  # None once no thought can come
        if limit is not None and limit.num_begun is not None:
            self._think(limit, prompt_length, limit.num_begun)

    @property
    def has_budget(self) -> bool:
        """Whether a thought with a budget is being written."""
        return self.is_thinking and self._limit is not None and self._limit.budget is not None

    def follow(self, tokens: Sequence[int]) -> None:
        """tokens: of prompt and reply, with one more than before."""
        limit = self._limit
        if limit is None:
            return
        begun = tuple(tokens[self._prompt_length :]) if not self.is_thinking else ()
        if self.is_thinking:
            if tokens[-1] == limit.close:
                self._answer(limit, len(tokens))
        elif begun == limit.opening:
            self._think(limit, len(tokens), 0)
        elif limit.opening[: len(begun)] != begun:
            self._limit = None
        elif limit.budget is not None:  # the opening is written whole
            self.end = max(self.end, len(tokens) + 1)

    def closing(self, num_tokens: int) -> tuple[int, ...]:
        """What ends a thought that has reached its budget at this length; the answer follows. Empty
        where there is nothing to end."""
        limit = self._limit
        if limit is None or not self.has_budget or num_tokens < self.end:
            return ()
        self._answer(limit, num_tokens + len(limit.closing))
        return limit.closing

    def _think(self, limit: ThoughtLimit, num_tokens: int, num_begun: int) -> None:
        self.is_thinking = True
        if limit.budget is not None:
            self.end = num_tokens + max(0, limit.budget - num_begun)

    def _answer(self, limit: ThoughtLimit, num_tokens: int) -> None:
        self.is_thinking, self._limit = False, None
        if limit.budget is not None:
            start = self._prompt_length if limit.shares_max_tokens else num_tokens
            self.end = start + self._max_tokens
