"""A block drafter's forward with fixed shapes and no work on the host.

One forward takes the newest rows of the context, at most a block and one, and a block behind them.
Rows of the context that only fill up the number stand behind the block, where nothing is held.
"""

from __future__ import annotations

import torch

from localspec.forward.attention import grouped_attention
from localspec.forward.cache import KVCache
from localspec.forward.features import Features
from localspec.forward.heads.block_layout import EMBEDDING
from localspec.forward.heads.block_parts import BlockParts
from localspec.forward.heads.block_tail import BlockRows
from localspec.forward.mixer import LayerAttend, halves_swapped


class StaticBlock:
    """One forward within the first `bucket` positions of a cache, and the walk over its rows: a
    heads.fixed.FixedSteps. The numbers are the first position, how many rows are new, their tokens
    and the root."""

    def __init__(self, parts: BlockParts, cache: KVCache, bucket: int, features: Features) -> None:
        self._parts, self._cache, self._features, self._bucket = parts, cache, features, bucket
        self._size = parts.layout.block_size
        self._new = torch.arange(self._size + 1, device=parts.device)
        self._block = torch.arange(self._size, device=parts.device)
        self._masks = parts.mask_ids
        self._rows: BlockRows | None = None  # of the draft under way

    def start(self, numbers: torch.Tensor) -> torch.Tensor:
        """See FixedSteps: run a block behind the root."""
        parts, first, count, root = self._parts, numbers[:1], numbers[1:2], numbers[-1:]
        known = first + count
        own = known + self._block  # [b]
        new = first + self._new  # [c]
        # A row that only fills up stands behind the block.
        slots = torch.cat((torch.where(self._new < count, new, new + self._size), own))
        tokens = numbers[2:-1]
        context = parts.context([self._states(layer, new, tokens) for layer in parts.layout.layers])
        rows = parts.embed(torch.cat((root, self._masks)))
        tables = parts.tables_at(torch.cat((new, own)))
        for layer, draft in enumerate(parts.layers):
            attend = self._attend(layer, slots, own)
            rows = draft.with_context(context)(rows, tables, halves_swapped, attend)
        hidden = parts.final_norm(rows)
        self._rows = parts.opened(hidden, parts.output(hidden), root)
        return self._rows.row

    def resume(self, numbers: torch.Tensor, num_drafted: torch.Tensor) -> None:
        """Not to be called: a block is drafted at once."""
        raise AssertionError("a block is drafted at once")

    def extend(self, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See FixedSteps."""
        self._begun.advance(token)
        return self._begun.row

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """See FixedSteps."""
        return self._begun.logits()

    def stated(self) -> torch.Tensor | None:
        """See FixedSteps."""
        return self._begun.confidence()

    @property
    def _begun(self) -> BlockRows:
        assert self._rows is not None, "`start` came before"
        return self._rows

    def _states(self, layer: int, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The target's states of a layer at some positions, [c, d]."""
        if layer == EMBEDDING:
            return self._parts.embed(tokens)
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
