"""The steps of an autoregressive head with fixed shapes and no work on the host.

The first step takes the newest pairs of a text, at most NEW_PAIRS. Rows that only fill up the
number stand behind them, where the draft writes next. Each further step reads the output before it
and one token, or several of a tree, and writes their keys and values behind the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch

from localspec.forward.attention import grouped_attention, grouped_mask
from localspec.forward.cache import KVCache
from localspec.forward.features import Features
from localspec.forward.graphs import buckets
from localspec.forward.heads.autoregressive import AutoregressiveHead, HeadParts
from localspec.forward.heads.fixed import DRAFT_SIZES
from localspec.forward.heads.layer import Rotation
from localspec.forward.passes import Pass
from localspec.forward.restoring import undisturbed
from localspec.forward.tree import block_mask, slot_mask

NEW_PAIRS = 8  # After a round as many as its accepted tokens and one.


class StaticChain:
    """A head's steps within the first `bucket` slots of its cache: a heads.fixed.FixedSteps."""

    def __init__(
        self,
        parts: HeadParts,
        rotation: Rotation,
        cache: KVCache,
        bucket: int,
        features: Features,
    ) -> None:
        self._parts, self._rotation, self._features = parts, rotation, features
        self._groups = parts.network.layer.heads.num_groups
        keys, values = cache.slots[0]
        self._keys, self._values = keys[:, :, :bucket], values[:, :, :bucket]
        device = keys.device
        self._columns = torch.arange(bucket, device=device)
        self._new = torch.arange(NEW_PAIRS, device=device)
        self._causal = block_mask(NEW_PAIRS, None, cache.dtype, device)
        self._seen = torch.zeros(1, 1, dtype=cache.dtype, device=device)  # a row sees itself
        self._end = self._new[:1]  # the first slot behind what was run, [1]

    def start(self, numbers: torch.Tensor) -> torch.Tensor:
        """See FixedSteps: the output of the last pair."""
        first, count, tokens = numbers[:1], numbers[1:2], numbers[2:]
        slots = first + self._new  # [NEW_PAIRS]
        rows = self._parts.network.enter(
            [
                states.index_select(0, slots.clamp(max=states.shape[0] - 1))
                for states in map(self._features.slots, self._parts.layers)
            ]
        )
        made = self._run(tokens, rows, slots, slots, self._causal)
        self._end = first + count
        return made.index_select(0, count - 1)

    def resume(self, numbers: torch.Tensor, num_drafted: torch.Tensor) -> None:
        """See FixedSteps; the newest token was not run."""
        self._end = numbers[:1] + numbers[1:2] + num_drafted - 1

    def extend(self, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See FixedSteps."""
        slot, self._end = self._end, self._end + 1
        return self._run(token, rows, slot, slot, self._seen)

    def branch(
        self, tokens: torch.Tensor, rows: torch.Tensor, depth: int, seen: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of tokens [n] of a tree at one depth from 0, [n, d].

        rows: of their parents, [n, d]. seen: which of the rows of the tree, m with these as the
        last, a row sees, [n, m]."""
        count, num_rows = seen.shape
        first = self._end
        slots = first + torch.arange(num_rows, device=first.device)
        block = torch.zeros(seen.shape, dtype=self._causal.dtype, device=first.device)
        block.masked_fill_(~seen, float("-inf"))
        places = (first + depth).expand(count)
        return self._run(tokens, rows, places, slots, block, num_written=count)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] fp32 of outputs [n, d]."""
        return self._parts.output(self._parts.network.leave(rows))

    def stated(self) -> None:
        """See FixedSteps."""

    def _run(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        places: torch.Tensor,
        slots: torch.Tensor,
        block: torch.Tensor,
        num_written: int | None = None,
    ) -> torch.Tensor:
        """Return outputs [n, d]. places: of the rows, [n]. slots: of the rows that `block` [n, m]
        speaks of, [m], the last `num_written` of which are new; None for all."""
        mask = grouped_mask(slot_mask(places, slots, block, self._columns), self._groups)
        own = slots if num_written is None else slots[-num_written:]
        cos, sin = self._rotation.at(places)
        attend = partial(self._attend, own, mask)
        embedded = self._parts.embed(tokens)
        return self._parts.network.step(rows, embedded, cos, sin, attend)

    def _attend(
        self,
        slots: torch.Tensor,
        mask: torch.Tensor | None,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
    ) -> torch.Tensor:
        count, _, head_dim = queries.shape
        rows = keys_values.view(count, 2, -1, head_dim).permute(1, 2, 0, 3).to(self._keys.dtype)
        self._keys.index_copy_(2, slots, rows[:1])
        self._values.index_copy_(2, slots, rows[1:])
        return grouped_attention(queries, self._keys, self._values, mask)


class ChainHead(AutoregressiveHead):
    """An AutoregressiveHead whose drafts may also have fixed shapes: a heads.fixed.FixedHead. The
    numbers are the first new pair's slot, how many pairs are new, and their second tokens."""

    num_numbers = 2 + NEW_PAIRS
    draft_sizes = DRAFT_SIZES
    can_resume = True

    @property
    def width(self) -> int:
        """See FixedHead."""
        return self._parts.embed([0]).shape[1]

    @property
    def kept_dtype(self) -> torch.dtype:
        """See FixedHead."""
        return self._parts.dtype

    @property
    def buckets(self) -> tuple[int, ...]:
        """See FixedHead."""
        return buckets(self.cache.num_slots)

    def end_of(self, num_tokens: int, num_rows: int) -> int:
        """See FixedHead. The rows that fill up the newest pairs stand behind the text too."""
        return num_tokens - 1 + max(num_rows, NEW_PAIRS)

    def missing(self, tokens: Sequence[int], features: Features) -> Pass | None:
        """See FixedHead. The last pair is read again where it is held already."""
        num_pairs = len(tokens) - 1
        self.forget(min(self.reuse(tokens), num_pairs - 1))
        if num_pairs - self.cache.length <= NEW_PAIRS:
            return None
        return replace(self.read(tokens[: len(tokens) - NEW_PAIRS], features), is_reading=True)

    @contextmanager
    def begun(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """See FixedHead."""
        first = self.cache.length
        new = tokens[first + 1 :]
        with self.cache.append(new):
            yield [first, len(new), *new, *[0] * (NEW_PAIRS - len(new))]
        self._num_pairs = len(tokens) - 1

    def steps(self, bucket: int, features: Features) -> StaticChain:
        """See FixedHead."""
        return StaticChain(self._parts, self._rotation, self.cache, bucket, features)

    def probe(self, which: int) -> list[int]:
        """See FixedHead."""
        new = [2, 1][: 1 + which]
        return [0, len(new), *new, *[0] * (NEW_PAIRS - len(new))]

    def undisturbed(self, num_rows: int) -> AbstractContextManager[None]:
        """See FixedHead."""
        return undisturbed(self.cache, NEW_PAIRS + num_rows)

    def recover(self) -> None:
        """See FixedHead."""
        self.cache.zero_beyond()
