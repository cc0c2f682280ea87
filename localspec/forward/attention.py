"""Attention over keys and values that stand in a cache, the same for all that runs here.

Contract: query heads that share a key head become further rows of that head, group by group. So one
kernel reads keys and values where they stand, without a copy of them for each query head.
`grouped_mask` brings a mask into the same order once for all layers. `cached_attention` writes the
new rows into a KVCache and attends to all of it up to their end.

Not here: masks (tree), attention over fixed slots (static), attention in training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from localspec.forward.cache import KVCache

# layer, queries [n, heads, head_dim], keys then values [n, 2 * kv_heads, head_dim]
# -> [n, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


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


def cached_attention(
    cache: KVCache, start: int, num_rows: int, num_heads: int, mask: torch.Tensor | None
) -> Attend:
    """Attention of `num_rows` rows whose keys and values are written from slot `start` on.
    mask: added to the scores, [1, 1, n, start + n]; None where every row sees all."""
    grouped = grouped_mask(mask, num_heads // cache.shape.num_kv_heads)

    def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        keys, values = cache.write(layer, start, start + num_rows, keys_values)
        return grouped_attention(queries, keys, values, grouped)

    return attend
