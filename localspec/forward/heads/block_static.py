"""A block drafter's forward with fixed shapes and no work on the host: what a graph can hold.

One forward takes the newest rows of the context, at most a block and one, and a block behind them.
Rows of the context that only fill up the number stand behind the block, where nothing is held.
`BlockGraphs` captures it for each stretch of the cache in idle time; what has no graph yet runs as
it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from localspec.forward.attention import grouped_attention
from localspec.forward.cache import KVCache
from localspec.forward.features import Features
from localspec.forward.graphs import (
    GraphPool,
    GraphStore,
    Recording,
    buckets,
    require_agreement,
)
from localspec.forward.heads.block_layout import EMBEDDING
from localspec.forward.heads.block_parts import BlockParts
from localspec.forward.mixer import LayerAttend, halves_swapped
from localspec.forward.static import undisturbed
from localspec.forward.upload import pinned

Run = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows [b, d], logits [b, V], root [1]


class StaticBlock:
    """One forward within the first `bucket` positions of a cache. features: of the target. hidden,
    logits: where the block's rows [b, d] and their logits [b, V] are written."""

    def __init__(
        self,
        parts: BlockParts,
        cache: KVCache,
        features: Features,
        bucket: int,
        hidden: torch.Tensor,
        logits: torch.Tensor,
    ) -> None:
        self._parts, self._cache, self._features = parts, cache, features
        self._bucket, self._hidden, self._logits = bucket, hidden, logits
        self._size = parts.layout.block_size
        self._num_new = self._size + 1
        device = parts.device
        # The first position, how many rows are new, their tokens and the root.
        self._inputs = torch.zeros(2 + self._num_new + 1, dtype=torch.int64, device=device)
        self._new = torch.arange(self._num_new, device=device)
        self._block = torch.arange(self._size, device=device)

    @property
    def root(self) -> torch.Tensor:
        return self._inputs[-1:]

    @torch.inference_mode()
    def fill(self, tokens: Sequence[int], first: int) -> None:
        """Set what a call runs: the tokens of new rows from position `first` on, and the root."""
        *new, root = tokens
        spare = [0] * (self._num_new - len(new))
        values = [first, len(new), *new, *spare, root]
        self._inputs.copy_(pinned(values, torch.int64, self._parts.device), non_blocking=True)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Write the block's rows, normalised, and their logits."""
        parts, first, count = self._parts, self._inputs[:1], self._inputs[1:2]
        known = first + count
        own = known + self._block  # [b]
        new = first + self._new  # [c]
        # A row that only fills up stands behind the block.
        slots = torch.cat((torch.where(self._new < count, new, new + self._size), own))
        context = parts.context([self._states(layer, new) for layer in parts.layout.layers])
        rows = parts.embed(torch.cat((self.root, parts.mask_ids)))
        tables = parts.tables_at(torch.cat((new, own)))
        for layer, draft in enumerate(parts.layers):
            attend = self._attend(layer, slots, own)
            rows = draft.with_context(context)(rows, tables, halves_swapped, attend)
        self._hidden.copy_(parts.final_norm(rows))
        self._logits.copy_(parts.output(self._hidden))

    def _states(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """The target's states of a layer at some positions, [c, d]."""
        if layer == EMBEDDING:
            return self._parts.embed(self._inputs[2:-1])
        slots = self._features.slots(layer)
        return slots.index_select(0, positions.clamp(max=slots.shape[0] - 1))

    def _attend(self, layer: int, slots: torch.Tensor, own: torch.Tensor) -> LayerAttend:
        """Attention of a block's rows. slots: of all rows, the new ones of the context first."""
        keys, values = self._cache.slots[layer]
        size = min(keys.shape[2], self._bucket)
        mask = self._parts.mask(layer, own, size, self._cache.dtype)
        places = torch.remainder(slots, size)

        def attend(queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            num_rows, _, head_dim = queries.shape
            rows = keys_values.view(num_rows, 2, -1, head_dim).permute(1, 2, 0, 3).to(keys.dtype)
            keys.index_copy_(2, places, rows[:1])
            values.index_copy_(2, places, rows[1:])
            held = (keys[:, :, :size], values[:, :, :size])
            return grouped_attention(queries[-self._size :], *held, mask)

        return attend


class BlockGraphs:
    """The forwards of one text, captured for each stretch of its cache: a graphs.Capturing.
    num_new: rows of the context that a forward takes."""

    def __init__(self, parts: BlockParts, cache: KVCache, pool: GraphPool) -> None:
        self._parts, self._cache = parts, cache
        self._store = GraphStore[int, StaticBlock](pool)
        self._features: Features | None = None
        size = parts.layout.block_size
        self.num_new = size + 1
        width, device = parts.layout.settings.hidden_size, parts.device
        self._hidden = torch.zeros(size, width, dtype=parts.dtype, device=device)
        self._logits = torch.zeros(size, parts.output.vocab_size, device=device)

    @property
    def notice(self) -> str | None:
        return self._store.notice

    @property
    def has_missing(self) -> bool:
        """See Capturing."""
        return self._features is not None and self._store.lacks(self._buckets)

    @property
    def buffer_bytes(self) -> int:
        """Of rows and logits; inputs are a few kB more."""
        return self._hidden.nbytes + self._logits.nbytes

    def run(self, tokens: Sequence[int], first: int, features: Features) -> Run:
        """Append the rows of all tokens but the last, the root, from position `first` on, and run a
        block behind them."""
        self._features = features
        size = self._parts.layout.block_size
        end = first + self.num_new + size
        bucket = next(each for each in self._buckets if each >= end)
        ready = self._store.captured_or(bucket, lambda: self._static(bucket))
        # A block and rows that fill up stand behind the new rows until the next forward.
        self._cache.claim(self.num_new + size)
        with self._cache.append(tokens[:-1]):
            ready.work.fill(tokens, first)
            ready.replay()
        return self._hidden, self._logits, ready.work.root

    def capture(self) -> Iterator[str]:
        """See Capturing; nothing is captured before the first block has run."""
        if self._features is not None:
            yield from self._store.fill(self._buckets, _phrase, self._captured)

    @property
    def _buckets(self) -> tuple[int, ...]:
        return buckets(self._cache.num_slots)

    def _static(self, bucket: int) -> StaticBlock:
        assert self._features is not None, "a block ran before"
        return StaticBlock(
            self._parts, self._cache, self._features, bucket, self._hidden, self._logits
        )

    @torch.inference_mode()
    def _captured(self, bucket: int) -> list[Recording[StaticBlock]]:
        """Record one graph and compare a replay with the forward that was recorded."""
        static, size = self._static(bucket), self._parts.layout.block_size
        vocab_size = self._parts.output.vocab_size
        with undisturbed(self._cache, self.num_new + size):
            static.fill([1, 2], 0)
            replay = self._store.pool.capture(static)
            static.fill([3, 1, min(4, vocab_size - 1), 2], 0)  # other inputs than recorded
            static()
            wanted = self._logits.clone()
            self._logits.zero_()
            replay()
            require_agreement(self._logits, wanted, "a block")
        return [Recording(static, replay)]


def _phrase(bucket: int) -> str:
    return f"preparing blocks of draft tokens within {bucket} tokens of context"
