"""Rows that only the first blocks of a decoder have seen, and how the rest is made up for.

Contract: a `Begun` stands in the cache whose slots it wrote (`KVCache.begun`), and the cache drops
it as soon as anything else is written. So what is found there is valid for its tokens whenever the
cache ends where it starts: to end there with another text before it, something had to be written.
`within` says what of it a chain may go on from, `finish` runs
the lower blocks for the chain's other rows and the upper ones for all.

Not here: who begins rows (partial), when to go on from them (decoder).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from localspec.forward.cache import common_prefix_length

if TYPE_CHECKING:
    from localspec.forward.decoder import Attend, Decoder

Hidden = dict[int, torch.Tensor]


@dataclass(frozen=True)
class Begun:
    """Tokens from position `start` on after the first `depth` blocks of `owner`, the weights.

    hidden: layer -> [n, d] for layer depth - 1 and those below it that are followed."""

    owner: object
    start: int
    depth: int
    tokens: tuple[int, ...]
    hidden: Mapping[int, torch.Tensor]

    @property
    def size(self) -> int:
        return len(self.tokens)

    def first(self, size: int) -> Begun:
        """The first `size` of the rows."""
        hidden = {layer: rows[:size] for layer, rows in self.hidden.items()}
        return replace(self, tokens=self.tokens[:size], hidden=hidden)

    def within(
        self, owner: object, start: int, tokens: Sequence[int], wanted: frozenset[int]
    ) -> Begun | None:
        """The rows that a chain of `tokens` from `start` on begins with, None if there are none.

        At least one token is left to run from the first block on. wanted: layers whose states the
        forward must give."""
        size = min(common_prefix_length(self.tokens, tokens), len(tokens) - 1)
        needed = {layer for layer in wanted if 0 <= layer < self.depth}
        is_same = owner is self.owner and start == self.start
        return self.first(size) if is_same and size > 0 and needed <= self.hidden.keys() else None

    def then(self, later: Begun) -> Begun:
        """Both in a row; `later` alone where it does not start within or right after this one."""
        size = later.start - self.start  # fewer than it has after a rollback within them
        is_same = later.owner is self.owner and later.depth == self.depth
        if not is_same or not 0 < size <= self.size or later.hidden.keys() != self.hidden.keys():
            return later
        kept = self.first(size)
        hidden = {i: torch.cat((kept.hidden[i], rows)) for i, rows in later.hidden.items()}
        return replace(kept, tokens=(*kept.tokens, *later.tokens), hidden=hidden)


def finish(
    whole: Decoder,
    begun: Begun,
    tokens: Sequence[int],
    turns: tuple[torch.Tensor, torch.Tensor],
    attends: tuple[Attend, Attend],
    wanted: frozenset[int],
) -> tuple[torch.Tensor, Hidden]:
    """As Decoder.layers, of a chain of `tokens` that begins with the rows of `begun`.

    turns: cos and sin of all tokens. attends: of the tokens that were not begun, and of all."""
    cos, sin = turns
    below, above = attends
    last = begun.depth - 1
    rows = whole.embed(tokens[begun.size :])
    rest = (rows, cos[begun.size :], sin[begun.size :])
    _, lower = whole.layers(*rest, below, wanted | {last}, end=begun.depth)
    hidden = {layer: torch.cat((begun.hidden[layer], new)) for layer, new in lower.items()}
    rows, upper = whole.layers(hidden[last], cos, sin, above, wanted, first=begun.depth)
    return rows, {**hidden, **upper}
