"""Attention over keys and values that stand in a cache, the same for all that runs here.

Contract: query heads that share a key head become further rows of that head, so one kernel reads
keys and values where they stand, without a copy of them for each query head. `cached_attention`
writes the new rows into a KVCache and attends to all of it up to their end. The cache's layout
chooses the kernel.

With transposed keys a row's result has the same bits whatever rows are computed beside it: scores,
softmax and values are batched products in fp32 over a multiple of ROW_MULTIPLE rows and over
`summed_length` keys, of which those beyond the end are masked. With plain keys it is torch's fused
attention, equal within rounding.

Not here: masks (tree), attention over fixed slots (static), attention in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from localspec.forward.cache import KVCache
from localspec.forward.row_bits import (
    KEY_MULTIPLE,
    ROW_MULTIPLE,
    begins_part,
    rounded_up,
    summed_length,
)
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
    """Attention of `num_rows` rows whose keys and values are written from slot `start` on. Where
    the cache has transposed keys more rows may come (`row_bits.padded`), of which nothing is
    written or computed.

    mask: added to the scores, [1, 1, n, start + n]; None where every row sees all. parents: of a
    tree whose rows are to have the bits of chains, None for a chain."""
    if cache.has_transposed_keys:
        made = _RowAttention(cache, start, num_rows, num_heads)
        return made.of_rows(mask) if parents is None else made.of_tree(mask, parents)
    grouped = grouped_mask(mask, num_heads // cache.shape.num_kv_heads)

    def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        keys, values = cache.write(layer, start, start + num_rows, keys_values)
        return grouped_attention(queries, keys, values, grouped)

    return attend


def each_its_own(attends: Sequence[Attend], sizes: Sequence[int]) -> Attend:
    """Attention of the rows of several sequences, one sequence after the other; sizes: rows of
    each. Rows beyond them are padding."""
    if len(attends) == 1:
        return attends[0]
    ends = list(accumulate(sizes))
    places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        pairs = zip(attends, places, strict=True)
        seen = [one(layer, queries[place], keys_values[place]) for one, place in pairs]
        spare = queries.shape[0] - ends[-1]
        return torch.cat((*seen, queries.new_zeros(spare, seen[0].shape[1])))

    return attend


# -- the same bits for every number of rows -------------------------------------------------


@dataclass(frozen=True)
class _Tile:
    """Rows first to end of a forward, which see the slots before `length`.

    rows: queries of a layer, [kv_heads, m, head_dim], m a multiple of ROW_MULTIPLE; put: the view
    of them that is written to, [n, kv_heads, groups, head_dim]. mask: [1 or m, length]. keys: of
    each layer, [kv_heads, head_dim, length]; values: [kv_heads, length, head_dim]. order: of a
    tree, [groups * n, n]: where in the new slots the tokens of a row's path stand, root first, then
    the others; unorder: the inverse."""

    first: int
    end: int
    rows: torch.Tensor
    put: torch.Tensor
    mask: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    order: torch.Tensor | None = None
    unorder: torch.Tensor | None = None


class _RowAttention:
    """Attention of the rows of one forward, as batched products.

    A row of a tree has the bits of the chain that its path is. Scores do not depend on a key's
    slot. Softmax adds up by slot, so scores are put into the order of the path before it. The
    product with the values adds one key after the other, and keys of weight 0 between them change
    nothing, unless the library begins a new part of its sum between a key's slot and its place in
    the chain (`row_bits.begins_part`): then every path is computed as a chain of its own."""

    def __init__(self, cache: KVCache, start: int, num_rows: int, num_heads: int) -> None:
        self._cache = cache
        self._start, self._num_rows = start, num_rows
        self._kv_heads, self._head_dim = cache.shape.num_kv_heads, cache.shape.head_dim
        self._groups = num_heads // self._kv_heads
        self._new_keys, self._new_values = cache.layers_between(start, start + num_rows)

    def of_rows(self, mask: torch.Tensor | None) -> Attend:
        size = self._num_rows
        starts = range(0, size, TILE_ROWS)
        return self._of([self._tile(at, min(at + TILE_ROWS, size), mask) for at in starts])

    def _of(self, tiles: Sequence[_Tile]) -> Attend:
        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            self._write(layer, keys_values)
            out = queries.new_zeros(queries.shape[0], queries.shape[1] * self._head_dim)
            for tile in tiles:
                place = slice(tile.first, tile.end)
                out[place].view(tile.put.shape).copy_(self._seen(layer, tile, queries[place]))
            return out

        return attend

    def of_tree(self, mask: torch.Tensor | None, parents: Sequence[int]) -> Attend:
        paths = paths_of(parents)
        if any(begins_part(slot) for slot in range(self._start + 1, self._start + len(parents))):
            return self._of_paths(paths)
        others = [[node for node in range(len(parents)) if node not in path] for path in paths]
        order = torch.tensor([[*path, *rest] for path, rest in zip(paths, others, strict=True)])
        order = order.repeat_interleave(self._groups, 0)  # [rows, n]
        tile = self._tile(0, len(parents), mask)
        return self._of([replace(tile, order=order, unorder=order.argsort(-1))])

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
                out[path] = self._seen(layer, tile, queries[path]).reshape(len(path), -1).to(out)
            self._write(layer, keys_values)
            return out

        return attend

    def _tile(self, first: int, end: int, mask: torch.Tensor | None) -> _Tile:
        held, num_rows = self._start + end, end - first
        size = num_rows * self._groups
        rows = torch.zeros(self._kv_heads, rounded_up(size, ROW_MULTIPLE), self._head_dim)
        by_head = rows[:, :size].view(self._kv_heads, num_rows, self._groups, self._head_dim)
        length = summed_length(held)
        hidden = torch.zeros(1, length)
        hidden[:, held:] = float("-inf")
        if mask is not None:
            shown = mask[0, 0, first:end, :held].repeat_interleave(self._groups, 0)
            hidden = hidden.repeat(rows.shape[1], 1)
            hidden[:size, :held] = shown
        put = by_head.transpose(0, 1)
        return _Tile(first, end, rows, put, hidden, *self._cache.layers_up_to(length))

    def _write(self, layer: int, keys_values: torch.Tensor) -> None:
        """keys_values: [m, 2 * kv_heads, head_dim]; of more than the rows, the first ones."""
        keys, values = torch.split(keys_values[: self._num_rows], self._kv_heads, 1)
        self._new_keys[layer][: keys.shape[0]].copy_(keys)
        self._new_values[layer][: keys.shape[0]].copy_(values)

    def _seen(self, layer: int, tile: _Tile, queries: torch.Tensor) -> torch.Tensor:
        """queries: [n, heads, head_dim] -> [n, kv_heads, groups, head_dim], a view."""
        tile.put.copy_(queries.view(tile.put.shape))
        scores = torch.baddbmm(tile.mask, tile.rows, tile.keys[layer], alpha=self._head_dim**-0.5)
        found = torch.bmm(self._weights(scores, tile), tile.values[layer])
        # What stands where the queries stood, the product having the shape and strides of `rows`.
        return found.as_strided(tile.put.shape, tile.put.stride())

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


# -- fused, of plain keys -------------------------------------------------------------------


def grouped_mask(mask: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """The mask of all query heads of one key head: [1, 1, n, m] -> [1, 1, groups * n, m]."""
    return None if mask is None else mask.repeat(1, 1, groups, 1)


SHORTEST_PART = 256  # keys; fewer are not worth a merge
MOST_PARTS = 16
SPLIT_TOLERANCE = 2e-2  # of the largest number, in bf16


def parts_of(num_keys: int) -> int:
    """Into how many parts so many keys are split, 1 for not at all. Parts are whole steps of the
    kernels."""
    parts = 1
    while 2 * parts <= MOST_PARTS and num_keys % (2 * parts * KEY_MULTIPLE) == 0:
        if num_keys // (2 * parts) < SHORTEST_PART:
            break
        parts *= 2
    return parts


def can_split(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `split_attention`, whose kernels are private to torch, runs here and is right."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, 64), (1, 2, 4 * KEY_MULTIPLE, 64), (1, 2, 4 * KEY_MULTIPLE, 64))
    made = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    queries, keys, values = made
    mask = torch.zeros(1, 1, 4, 4 * KEY_MULTIPLE, dtype=dtype, device=device)
    mask[..., KEY_MULTIPLE + 3 :] = float("-inf")
    try:
        found = split_attention(queries, keys, values, mask, 4)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    wanted = grouped_attention(queries, keys, values, mask)
    return float((found - wanted).abs().max()) <= SPLIT_TOLERANCE * float(wanted.abs().max())


def grouped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """queries [n, heads, head_dim], keys and values [1, kv_heads, m, head_dim], mask as
    `grouped_mask` gives it -> [n, heads * head_dim] in the precision of the queries."""
    rows = _by_key_head(queries, keys)
    return _by_row(F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask), queries)


def split_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    parts: int,
) -> torch.Tensor:
    """As `grouped_attention`, over `parts` equal stretches of the keys at once, merged by the
    logarithm of their sums (as in Flash-Decoding). A GPU gives a key head and a stretch to one of
    its processors: unsplit, the few key heads of a model leave most of them idle."""
    rows = _by_key_head(queries, keys)  # [1, kv_heads, r, head_dim]
    kv_heads, num_rows, head_dim = keys.shape[1], rows.shape[2], keys.shape[3]
    size = keys.shape[2] // parts
    in_parts = (kv_heads, parts, size, head_dim)
    shown = mask.view(num_rows, parts, size).transpose(0, 1)[:, None]  # [parts, 1, r, size]
    seen, log_sum = _with_log_sum(
        rows.expand(parts, -1, -1, -1),
        keys[0].view(in_parts).transpose(0, 1),
        values[0].view(in_parts).transpose(0, 1),
        shown.expand(-1, kv_heads, -1, -1),
    )
    # Nothing is known of what a kernel makes of rows that see no key of a stretch.
    is_seen = shown.amax(-1, keepdim=True) > float("-inf")  # [parts, 1, r, 1]
    log_sum = log_sum[:, :, :num_rows, None].masked_fill(~is_seen, float("-inf"))
    weights = torch.softmax(log_sum, dim=0)  # [parts, kv_heads, r, 1] fp32
    merged = (seen.masked_fill(~is_seen, 0.0) * weights).sum(dim=0, keepdim=True)
    return _by_row(merged, queries)


def _with_log_sum(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of each row's sum of exponentials, of at least all rows."""
    kernels: Any = torch.ops.aten
    if rows.device.type == "cpu":
        made = kernels._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, attn_mask=mask
        )
    else:
        made = kernels._scaled_dot_product_efficient_attention(rows, keys, values, mask, True)
    seen, log_sum = made[:2]
    return seen, log_sum


def _by_key_head(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n, heads, head_dim] -> [1, kv_heads, groups * n, head_dim] in the keys' precision."""
    num_rows, kv_heads, head_dim = queries.shape[0], keys.shape[1], queries.shape[2]
    grouped = queries.view(num_rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    return grouped.reshape(1, kv_heads, -1, head_dim).to(keys.dtype)


def _by_row(seen: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """[1, kv_heads, groups * n, head_dim] -> [n, heads * head_dim] in the queries' precision."""
    num_rows, heads, head_dim = queries.shape
    out = seen.view(seen.shape[1], -1, num_rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_rows, heads * head_dim).to(queries.dtype)
