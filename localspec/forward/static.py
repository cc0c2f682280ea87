"""The native decoder's forward with fixed shapes and no work on the host: what a graph can hold.

Contract: `Window.forward` runs rows whose ids, positions and slots are tensors, writes their keys
and values into those slots and attends to the first `bucket` slots of the cache, or to all of a
ring, under a mask that is made on the device. `StaticForward` adds buffers: `fill` copies the
description of the tokens to the device in one small copy, a call computes their logits into a
buffer. Both are plain tensor code and give the decoder's own logits on any device, captured or not.

Rows that only pad a width write to slots beyond the sequence's end, which the cache must be told
(`KVCache.claim`): in a ring they overwrite what stood a ring's length before. These slots are
masked, which hides finite values only, so they must not hold NaN (`KVCache.zero_beyond`).

Capturing has never been tried on CUDA hardware: no GPU was available.

Not here: choosing widths and buckets, capturing (graphs), the cache's bookkeeping (cache).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from localspec.forward.attention import (
    can_split,
    grouped_attention,
    grouped_mask,
    parts_of,
    split_attention,
)
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.forward.row_attention import Attend
from localspec.forward.tree import block_mask, depths, slot_mask
from localspec.forward.upload import pinned


class Window:
    """The slots of the first `bucket` positions of a decoder's cache, addressed by tensors only: of
    a ring with fewer slots all of them. parts: into how many stretches attention splits so many
    keys."""

    def __init__(
        self, decoder: Decoder, bucket: int, parts: Callable[[int], int] = lambda _: 1
    ) -> None:
        assert bucket <= decoder.cache.num_slots, "a window ends within the cache"
        self.bucket = bucket
        self.weights = decoder.weights
        self.device = decoder.device
        self.dtype = decoder.cache.dtype
        self._parts = parts
        self.looked_up = decoder.looked_up
        self._decoder = decoder
        self._slots = decoder.cache.slots
        self._columns = torch.arange(bucket, device=decoder.device)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        block: torch.Tensor,
        state_slots: torch.Tensor,
        looked_up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Through every layer: [w, d]. ids, positions, slots: [w]; slots are those of a layer
        without a ring, ascend without a gap and lie in the window. block: [w, w] additive, what
        the rows see of each other; they see every position before their first. state_slots: [w],
        those where states hold the rows; not read where there are no states. looked_up: of the
        tokens, see Decoder.looked_up."""
        weights = self.weights
        rows = weights.embed(ids)  # [w, d]
        tables = weights.tables_at(positions)
        features = self._decoder.written_features
        keep = frozenset(() if features is None else features.layers)
        attend = self._attention(positions, slots, block, state_slots)
        rows, hidden = self._decoder.unpadded_layers(rows, tables, attend, keep, looked_up)
        if features is not None:
            hidden[LAST] = weights.final_norm(rows)
            for layer in features.layers:
                features.slots(layer).index_copy_(0, slots, hidden[layer])
        return rows

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[w, d] -> [w, V] in the weights' own precision."""
        return self.weights.logits(self.weights.final_norm(rows))

    def _attention(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        block: torch.Tensor,
        state_slots: torch.Tensor,
    ) -> Attend:
        attentions, kv_layers = self.weights.attentions, self.weights.kv_layers
        sizes = [min(self.bucket, self._slots[layer][0].shape[2]) for layer in kv_layers]
        kinds = [
            (each.window, each.heads.num_groups, size)
            for each, size in zip(attentions, sizes, strict=True)
        ]
        masks = {
            (window, groups, size): grouped_mask(
                slot_mask(positions, slots, block, self._columns[:size], window), groups
            )
            for window, groups, size in dict.fromkeys(kinds)
        }
        of_layers = [masks[kind] for kind in kinds]
        own = {size: torch.remainder(slots, size) for size in dict.fromkeys(sizes)}

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            width, _, head_dim = queries.shape
            keys, values = self._slots[kv_layers[layer]]
            size = sizes[layer]
            if keys_values.shape[1]:  # else an earlier layer has written them
                new = keys_values.view(width, 2, -1, head_dim).permute(1, 2, 0, 3).to(keys.dtype)
                keys.index_copy_(2, own[size], new[:1])
                values.index_copy_(2, own[size], new[1:])
            held = (keys[:, :, :size], values[:, :, :size])
            mask, sinks, parts = of_layers[layer], attentions[layer].sinks, self._parts(size)
            if parts == 1 or mask is None:
                return grouped_attention(queries, *held, mask, sinks)
            return split_attention(queries, *held, mask, parts, sinks)

        states = self._decoder.cache.states
        state_rows = None if states is None else states.rows_at(state_slots)
        of_attentions = [partial(attend, layer) for layer in range(len(attentions))]
        return self._decoder.by_block(of_attentions, state_rows, len(slots))


def windows(decoder: Decoder, bucket: int) -> tuple[Window, ...]:
    """Every way of attending in a bucket that may be the fastest on the decoder's device."""
    whole = Window(decoder, bucket)
    if decoder.device.type != "cuda" or parts_of(bucket) == 1:
        return (whole,)
    has_kernel = can_split(decoder.cache.dtype, decoder.device)
    return (whole, Window(decoder, bucket, parts_of)) if has_kernel else (whole,)


class StaticForward:
    """`width` rows in one window. out: [>= width, V] fp32, where the logits are written; several
    forwards may share it, since each is read before the next one runs."""

    def __init__(self, window: Window, width: int, out: torch.Tensor) -> None:
        assert 0 < width <= window.bucket, "the rows fit the window"
        self.width = width
        self.window = window
        self._out = out[:width]
        self._inputs = torch.zeros(4, width, dtype=torch.int64, device=window.device)
        self._parents: tuple[int, ...] | None = None
        self._block = block_mask(width, None, window.dtype, window.device)
        self._looked_up = window.looked_up([0] * width)

    @torch.inference_mode()
    def fill(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None,
        start: int,
        num_settled: int = 0,
    ) -> None:
        """Set the tokens that a call runs after `start` cached ones; at most `width`.

        parents: as in Decoder.forward. num_settled: the cached tokens that the states have settled.
        Rows that are left over are padding; they write to the slots
        after the tokens' own, so all `width` slots must lie in the window.
        """
        spare = self.width - len(tokens)
        assert spare >= 0 and start + self.width <= self.window.bucket, "the rows fit the window"
        slots = list(range(start, start + self.width))
        positions, tree = slots[: len(tokens)], None
        if parents is not None:
            positions = [start + depth for depth in depths(parents)]
            tree = (*parents, *[-1] * spare)
        # Slots may go beyond the last position, which has no rotation.
        state_slots = [slot - num_settled for slot in slots]
        values = [[*tokens, *[0] * spare], [*positions, *[start] * spare], slots, state_slots]
        self._inputs.copy_(pinned(values, torch.int64, self.window.device), non_blocking=True)
        looked_up = self.window.looked_up(values[0])
        if looked_up is not None and self._looked_up is not None:
            self._looked_up.copy_(looked_up)
        if tree != self._parents:  # mostly a chain after a chain, with nothing to copy
            block = block_mask(self.width, tree, self.window.dtype, self.window.device)
            self._block.copy_(block)
            self._parents = tree

    @torch.inference_mode()
    def __call__(self) -> None:
        """Write the logits of all `width` rows into `out`."""
        ids, positions, slots, state_slots = self._inputs.unbind()
        rows = self.window.forward(ids, positions, slots, self._block, state_slots, self._looked_up)
        self._out.copy_(self.window.logits(rows))
