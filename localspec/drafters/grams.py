"""A pool of n-grams: which token came last after one, and after two.

Contract: for a context of one to GRAM - 1 tokens the tokens that were seen to follow it, most
recent first, at most MAX_FOLLOWERS; contexts not touched for longest are forgotten beyond
MAX_CONTEXTS. Reads a growing text once, each token a few dictionary writes.

Not here: where grams come from beside the text, and what is made of them (lookahead).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.forward.cache import common_prefix_length

GRAM = 3  # tokens of one n-gram
MAX_FOLLOWERS = 4
MAX_CONTEXTS = 20_000
MAX_READ = 2048  # tokens of a new text, its newest

Context = tuple[int, ...]


class Pool:
    """Recent n-grams of what was written and of what the target would have written."""

    def __init__(self) -> None:
        self._followers: dict[Context, list[int]] = {}
        self._source: list[int] = []
        self._num_read = 0

    def add(self, context: Sequence[int], token: int) -> None:
        """`token` was seen after `context`, of which the last GRAM - 1 count."""
        for size in range(1, min(GRAM, len(context) + 1)):
            key = tuple(context[-size:])
            known = self._followers.pop(key, None)
            if known is None:
                known = []
            elif token in known:
                known.remove(token)
            known.insert(0, token)
            del known[MAX_FOLLOWERS:]
            self._followers[key] = known  # put back last: touched last
        while len(self._followers) > MAX_CONTEXTS:
            del self._followers[next(iter(self._followers))]

    def followers(self, context: Context) -> Sequence[int]:
        """What followed exactly this context, most recent first."""
        return self._followers.get(context, ())

    def read(self, tokens: list[int]) -> None:
        """Take in what is new of a text; it is held, and may only grow from here on."""
        if tokens is not self._source:
            held = self._source[: self._num_read]
            self._num_read = max(common_prefix_length(held, tokens), len(tokens) - MAX_READ)
            self._source = tokens
        for place in range(max(1, self._num_read), len(tokens)):
            self.add(tokens[max(0, place - GRAM + 1) : place], tokens[place])
        self._num_read = len(tokens)
