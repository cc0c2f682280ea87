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

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from localspec.forward.cache import KVCache
from localspec.forward.row_bits import ROW_MULTIPLE, rounded_up, summed_length

# layer, queries [m, heads, head_dim], keys then values [m, 2 * kv_heads, head_dim]
# -> [m, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]

TILE_ROWS = 64  # rows of a prompt that attend at once: bounds the scores' memory


def cached_attention(
    cache: KVCache, start: int, num_rows: int, num_heads: int, mask: torch.Tensor | None
) -> Attend:
    """Attention of `num_rows` rows whose keys and values are written from slot `start` on. On
    a processor more queries may come (`row_bits.padded`), of which nothing is written.

    mask: added to the scores, [1, 1, n, start + n]; None where every row sees all."""
    if cache.device.type == "cpu":
        return _tiled_attention(cache, start, num_rows, num_heads, mask)
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
    length, head_dim]."""

    first: int
    end: int
    mask: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


def _tiled_attention(
    cache: KVCache, start: int, num_rows: int, num_heads: int, mask: torch.Tensor | None
) -> Attend:
    kv_heads, head_dim = cache.shape.num_kv_heads, cache.shape.head_dim
    groups, scale = num_heads // kv_heads, head_dim**-0.5
    new_keys, new_values = cache.layers_between(start, start + num_rows)
    tiles = [
        _tile(cache, start, first, min(first + TILE_ROWS, num_rows), groups, mask)
        for first in range(0, num_rows, TILE_ROWS)
    ]
    widest = rounded_up(groups * max(ROW_MULTIPLE, min(num_rows, TILE_ROWS)), ROW_MULTIPLE)
    rows = torch.zeros(kv_heads, widest, head_dim)

    def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        new = keys_values[:num_rows].transpose(0, 1)  # [2 * kv_heads, n, head_dim]
        new_keys[layer].copy_(new[:kv_heads])
        new_values[layer].copy_(new[kv_heads:])
        grouped = queries.view(-1, kv_heads, groups, head_dim).transpose(0, 1)
        out = torch.empty(queries.shape, dtype=queries.dtype)  # [m, heads, head_dim]
        seen = out.view(-1, kv_heads, groups, head_dim).transpose(0, 1)
        for tile in tiles:
            place = slice(tile.first, tile.end if len(tiles) > 1 else None)
            size = (tile.end - tile.first if len(tiles) > 1 else queries.shape[0]) * groups
            used = rows[:, : rounded_up(size, ROW_MULTIPLE)]
            used[:, :size].view(kv_heads, -1, groups, head_dim).copy_(grouped[:, place])
            scores = torch.baddbmm(tile.mask[: used.shape[1]], used, tile.keys[layer], alpha=scale)
            found = torch.bmm(torch.softmax(scores, -1), tile.values[layer])
            seen[:, place].copy_(found[:, :size].view(kv_heads, -1, groups, head_dim))
        return out.view(-1, num_heads * head_dim)

    return attend


def _tile(
    cache: KVCache, start: int, first: int, end: int, groups: int, mask: torch.Tensor | None
) -> _Tile:
    held = start + end
    length = summed_length(held)
    hidden = torch.zeros(1, length)
    hidden[:, held:] = float("-inf")
    if mask is not None:
        size = groups * (end - first)
        most = rounded_up(max(size, groups * ROW_MULTIPLE), ROW_MULTIPLE)
        shown = hidden.expand(most, -1).clone()
        shown[:size, :held] = mask[0, 0, first:end, :held].repeat_interleave(groups, 0)
        hidden = shown
    return _Tile(first, end, hidden, *cache.layers_up_to(length))


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
