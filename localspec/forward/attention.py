"""Attention over keys and values that stand in a cache, the same for all that runs here.

Contract: query heads that share a key head become further rows of that head, so one kernel reads
keys and values where they stand, without a copy of them for each query head. `cached_attention`
writes the new rows into a KVCache and attends to all of it up to their end.

On a processor a row's result has the same bits whatever rows are computed beside it: scores,
softmax and values are batched products in fp32 over a multiple of ROW_MULTIPLE rows and over
`summed_length` keys, of which those beyond the end are masked. Elsewhere it is torch's fused
attention, equal within rounding.

Not here: masks (tree), attention over fixed slots (static), attention in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from localspec.forward.cache import KVCache
from localspec.forward.row_bits import ROW_MULTIPLE, begins_part, rounded_up, summed_length
from localspec.forward.tree import additive_mask, paths_of

# layer, queries [m, heads, head_dim], keys then values [m, 2 * kv_heads, head_dim]
# -> [m, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]

TILE_ROWS = 64  # rows of a prompt that attend at once: bounds the scores' memory


def cached_attention(
    cache: KVCache,
    start: int,
    num_rows: int,
    num_heads: int,
    mask: torch.Tensor | None,
    parents: Sequence[int] | None = None,
) -> Attend:
    """Attention of `num_rows` rows whose keys and values are written from slot `start` on. On a
    processor more queries may come (`row_bits.padded`), of which nothing is written.

    mask: added to the scores, [1, 1, n, start + n]; None where every row sees all. parents: of a
    tree whose rows are to have the bits of chains, None for a chain."""
    if cache.device.type == "cpu":
        together = min(num_rows, TILE_ROWS) if parents is None else num_rows
        made = _RowAttention(cache, start, num_rows, num_heads, together)
        return made.of_rows(mask) if parents is None else made.of_tree(mask, parents)
    grouped = grouped_mask(mask, num_heads // cache.shape.num_kv_heads)

    def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        keys, values = cache.write(layer, start, start + num_rows, keys_values)
        return grouped_attention(queries, keys, values, grouped)

    return attend


# -- on a processor -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tile:
    """Rows first to end of a forward, which see the slots before `length`.

    mask: [1 or rows, length]. keys: of each layer, [kv_heads, head_dim, length]; values: [kv_heads,
    length, head_dim]. order: of a tree, [rows, n]: where in the new slots the tokens of a row's
    path stand, root first, then the others; unorder: the inverse."""

    first: int
    end: int
    mask: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    order: torch.Tensor | None = None
    unorder: torch.Tensor | None = None


class _RowAttention:
    """Attention of the rows of one forward, as batched products. together: rows at once.

    A row of a tree has the bits of the chain that its path is. Scores do not depend on a key's
    slot. Softmax adds up by slot, so scores are put into the order of the path before it. The
    product with the values adds one key after the other, and keys of weight 0 between them change
    nothing, unless the library begins a new part of its sum between a key's slot and its place in
    the chain (`row_bits.begins_part`): then every path is computed as a chain of its own."""

    def __init__(
        self, cache: KVCache, start: int, num_rows: int, num_heads: int, together: int
    ) -> None:
        self._cache = cache
        self._start, self._num_rows = start, num_rows
        self._kv_heads, self._head_dim = cache.shape.num_kv_heads, cache.shape.head_dim
        self._groups = num_heads // self._kv_heads
        self._new_keys, self._new_values = cache.layers_between(start, start + num_rows)
        most = rounded_up(self._groups * max(ROW_MULTIPLE, together), ROW_MULTIPLE)
        self._rows = torch.zeros(self._kv_heads, most, self._head_dim)

    def of_rows(self, mask: torch.Tensor | None) -> Attend:
        size = self._num_rows
        if size <= TILE_ROWS:
            return self._of_tile(self._tile(0, size, mask))
        starts = range(0, size, TILE_ROWS)
        tiles = [self._tile(first, min(first + TILE_ROWS, size), mask) for first in starts]

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            self._write(layer, keys_values)
            parts = [self._seen(layer, tile, queries[tile.first : tile.end]) for tile in tiles]
            return torch.cat(parts)

        return attend

    def _of_tile(self, tile: _Tile) -> Attend:
        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            self._write(layer, keys_values)
            return self._seen(layer, tile, queries)

        return attend

    def of_tree(self, mask: torch.Tensor | None, parents: Sequence[int]) -> Attend:
        paths = paths_of(parents)
        if any(begins_part(slot) for slot in range(self._start + 1, self._start + len(parents))):
            return self._of_paths(paths)
        others = [[node for node in range(len(parents)) if node not in path] for path in paths]
        order = torch.tensor([[*path, *rest] for path, rest in zip(paths, others, strict=True)])
        order = order.repeat_interleave(self._groups, 0)  # [rows, n]
        tile = self._tile(0, len(parents), mask)
        return self._of_tile(replace(tile, order=order, unorder=order.argsort(-1)))

    def _of_paths(self, paths: Sequence[Sequence[int]]) -> Attend:
        """Every path from the root as a chain, in the slots from `start` on."""
        mask = additive_mask(self._num_rows, None, self._start, torch.float32, torch.device("cpu"))
        longest = {path[-1]: path for path in paths}
        for path in paths:
            for inner in path[:-1]:
                longest.pop(inner, None)
        chains = [(list(path), self._tile(0, len(path), mask)) for path in longest.values()]

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            out = queries.new_zeros(queries.shape[0], queries.shape[1] * self._head_dim)
            for path, tile in chains:
                self._write(layer, keys_values[path])
                out[path] = self._seen(layer, tile, queries[path])
            self._write(layer, keys_values)
            return out

        return attend

    def _tile(self, first: int, end: int, mask: torch.Tensor | None) -> _Tile:
        held = self._start + end
        length = summed_length(held)
        hidden = torch.zeros(1, length)
        hidden[:, held:] = float("-inf")
        if mask is not None:
            shown = mask[0, 0, first:end, :held].repeat_interleave(self._groups, 0)
            hidden = hidden.expand(self._rows.shape[1], -1).clone()
            hidden[: shown.shape[0], :held] = shown
        return _Tile(first, end, hidden, *self._cache.layers_up_to(length))

    def _write(self, layer: int, keys_values: torch.Tensor) -> None:
        """keys_values: [m, 2 * kv_heads, head_dim]; of more than the rows, the first ones."""
        size = min(keys_values.shape[0], self._num_rows)
        new = keys_values[:size].transpose(0, 1)  # [2 * kv_heads, n, head_dim]
        self._new_keys[layer][:, :size].copy_(new[: self._kv_heads])
        self._new_values[layer][:, :size].copy_(new[self._kv_heads :])

    def _seen(self, layer: int, tile: _Tile, queries: torch.Tensor) -> torch.Tensor:
        """queries: [m, heads, head_dim] -> [m, heads * head_dim]."""
        num_rows, heads, head_dim = queries.shape
        split = (num_rows, self._kv_heads, self._groups, head_dim)
        size = num_rows * self._groups
        rows = self._rows[:, : rounded_up(size, ROW_MULTIPLE)]
        by_head = (self._kv_heads, num_rows, self._groups, head_dim)
        rows[:, :size].view(by_head).copy_(queries.view(split).transpose(0, 1))
        mask = tile.mask[: rows.shape[1]]
        scores = torch.baddbmm(mask, rows, tile.keys[layer], alpha=head_dim**-0.5)
        weights = self._weights(scores, tile)
        found = torch.bmm(weights, tile.values[layer])[:, :size].view(by_head)
        out = torch.empty(split, dtype=queries.dtype)
        out.copy_(found.transpose(0, 1))
        return out.view(num_rows, heads * head_dim)

    def _weights(self, scores: torch.Tensor, tile: _Tile) -> torch.Tensor:
        """Softmax over the last dimension, of a tree in the order of its paths."""
        if tile.order is None or tile.unorder is None:
            return torch.softmax(scores, -1)
        place = slice(self._start, self._start + self._num_rows)
        size = tile.order.shape[0]
        new = scores[:, :size, place]
        new.copy_(new.gather(-1, tile.order.expand(self._kv_heads, -1, -1)))
        weights = torch.softmax(scores, -1)
        new = weights[:, :size, place]
        new.copy_(new.gather(-1, tile.unorder.expand(self._kv_heads, -1, -1)))
        return weights


# -- elsewhere ------------------------------------------------------------------------------


def grouped_mask(mask: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """The mask of all query heads of one key head: [1, 1, n, m] -> [1, 1, groups * n, m]."""
    return None if mask is None else mask.repeat(1, 1, groups, 1)


def grouped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """queries [n, heads, head_dim], keys and values [1, kv_heads, m, head_dim], mask as
    `grouped_mask` gives it -> [n, heads * head_dim] in the precision of the queries."""
    num_rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    # [n, kv_heads, groups, head_dim] -> [1, kv_heads, groups * n, head_dim]
    grouped = queries.view(num_rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    rows = grouped.reshape(1, kv_heads, groups * num_rows, head_dim)
    seen = F.scaled_dot_product_attention(rows.to(keys.dtype), keys, values, attn_mask=mask)
    out = seen.view(kv_heads, groups, num_rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_rows, heads * head_dim).to(queries.dtype)
