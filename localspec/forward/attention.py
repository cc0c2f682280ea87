"""Attention over keys and values that stand in a cache, the same for all that runs here.

Contract: query heads that share a key head become further rows of that head, so one kernel reads
keys and values where they stand, without a copy of them for each query head. `cached_attention`
writes the new rows into a KVCache and attends to all of it up to their end. The cache's layout
chooses the kernel.

With keys in tiles a row's result has the same bits whatever rows are computed beside it. Both
products are sums of rows of a table by `torch.embedding_bag`, which adds up one after the other and
every sum by itself: the scores of a tile of keys are its rows, a row for each dimension, weighted
by the query; the result is the values weighted by the softmax. With plain keys it is torch's fused
attention, equal within rounding.

Not here: masks (tree), attention over fixed slots (static), attention in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from localspec.forward.cache import KEY_TILE, WIDEST, KVCache
from localspec.forward.tree import paths_of

# layer, queries [n, heads, head_dim], keys then values [n, 2 * kv_heads, head_dim]
# -> [n, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]

MOST_SCORES = 2**18  # at once: bounds their memory, and a processor's cache holds them


def cached_attention(
    cache: KVCache,
    start: int,
    num_rows: int,
    num_heads: int,
    mask: torch.Tensor | None,
    parents: Sequence[int] | None = None,
) -> Attend:
    """Attention of `num_rows` rows whose keys and values are written from slot `start` on. Where
    keys stand in tiles more rows may come (`weights.linear.padded`), of which nothing is written.

    mask: added to the scores, [1, 1, n, start + n]; None where every row sees all. parents: of a
    tree whose rows are to have the bits of chains, None for a chain."""
    if cache.has_key_tiles:
        return _RowAttention(cache, start, num_rows, num_heads).of_rows(mask, parents)
    grouped = grouped_mask(mask, num_heads // cache.shape.num_kv_heads)

    def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        keys, values = cache.write(layer, start, start + num_rows, keys_values)
        return grouped_attention(queries, keys, values, grouped)

    return attend


def each_its_own(attends: Sequence[Attend], places: Sequence[slice]) -> Attend:
    """Attention of the rows of several sequences, one sequence after the other; places: the rows
    of each. Rows beyond them are padding."""
    if len(attends) == 1:
        return attends[0]

    def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        pairs = zip(attends, places, strict=True)
        seen = [one(layer, queries[place], keys_values[place]) for one, place in pairs]
        spare = queries.shape[0] - places[-1].stop
        return torch.cat((*seen, queries.new_zeros(spare, seen[0].shape[1])))

    return attend


# -- the same bits for every number of rows -------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Some rows of a forward, n of them, which see the keys of the first t tiles.

    queries: written to, [kv_heads, t, n, groups, head_dim]; scores: written to,
    [kv_heads, n, groups, t, KEY_TILE]. mask: [n or 1, 1, t, KEY_TILE]. key_rows, value_rows: which
    rows of the cache's tables are added up, and where each sum begins. order: of a tree,
    [kv_heads, n, groups, nodes]: where among the new slots the tokens of a row's path stand, root
    first, then the others."""

    rows: slice
    queries: torch.Tensor
    scores: torch.Tensor
    mask: torch.Tensor
    key_rows: tuple[torch.Tensor, torch.Tensor]
    value_rows: tuple[torch.Tensor, torch.Tensor]
    order: torch.Tensor | None = None


class _RowAttention:
    """Attention of the rows of one forward, as sums of table rows.

    A row of a tree has the bits of the chain that its path is: scores do not depend on a key's
    slot, and softmax and values are added up in the order of the path. Keys of weight 0 change
    nothing."""

    def __init__(self, cache: KVCache, start: int, num_rows: int, num_heads: int) -> None:
        self._cache = cache
        self._start, self._num_rows = start, num_rows
        self._kv_heads, self._head_dim = cache.shape.num_kv_heads, cache.shape.head_dim
        self._groups = num_heads // self._kv_heads
        self._scale = torch.tensor([self._head_dim**-0.5])  # a tensor: bf16 queries become fp32
        self._written = cache.written_slots(start, start + num_rows)

    def of_rows(self, mask: torch.Tensor | None, parents: Sequence[int] | None) -> Attend:
        size = self._num_rows
        scores_of_row = self._kv_heads * self._groups * (self._start + size)
        at_once = max(1, MOST_SCORES // scores_of_row)
        orders = None if parents is None else _path_orders(parents)
        firsts = range(0, size, at_once)
        parts = [self._part(at, min(at + at_once, size), mask, orders) for at in firsts]

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            self._write(layer, keys_values)
            seen = [self._seen(layer, part, queries[part.rows]) for part in parts]
            if queries.shape[0] > size:
                seen.append(queries.new_zeros(queries.shape[0] - size, seen[0].shape[1]))
            return seen[0] if len(seen) == 1 else torch.cat(seen)

        return attend

    def _part(
        self, first: int, end: int, mask: torch.Tensor | None, orders: torch.Tensor | None
    ) -> _Part:
        num_rows = end - first
        num_keys = self._start + (end if orders is None else self._num_rows)
        num_tiles = -(-num_keys // KEY_TILE)
        hidden = torch.zeros(1 if mask is None else num_rows, num_tiles * KEY_TILE)
        if mask is not None:
            hidden[:, :num_keys] = mask[0, 0, first:end, :num_keys]
        hidden[:, num_keys:] = float("-inf")
        by_row = (self._kv_heads, num_rows, self._groups)
        key_rows, value_rows = _table_rows(self._cache.table_sizes, by_row, num_tiles)
        order = None
        if orders is not None:
            order = orders[first:end, None].expand(*by_row, -1)
            value_rows = (self._in_order(value_rows[0].view(*by_row, -1), order), value_rows[1])
        return _Part(
            slice(first, end),
            torch.empty(self._kv_heads, num_tiles, num_rows, self._groups, self._head_dim),
            torch.empty(*by_row, num_tiles, KEY_TILE),
            hidden.view(-1, 1, num_tiles, KEY_TILE),
            key_rows,
            value_rows,
            order,
        )

    def _in_order(self, slots: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """slots: [kv_heads, n, groups, m] of every row, m reaching beyond the new ones."""
        new = slice(self._start, self._start + self._num_rows)
        made = slots.clone()
        made[..., new] = slots[..., new].gather(-1, order)
        return made.view(-1)

    def _write(self, layer: int, keys_values: torch.Tensor) -> None:
        """keys_values: [n, 2 * kv_heads, head_dim]."""
        keys, values = torch.split(keys_values, self._kv_heads, 1)
        for rows, key_slots, value_slots in self._written:
            key_slots[layer].copy_(keys[rows])
            value_slots[layer].copy_(values[rows])

    def _seen(self, layer: int, part: _Part, queries: torch.Tensor) -> torch.Tensor:
        """queries: [n, heads, head_dim] -> [n, heads * head_dim] in their precision."""
        key_table, value_table = self._cache.tables[layer]
        kv_heads, num_rows, groups, num_tiles, _ = part.scores.shape
        by_head = queries.view(num_rows, kv_heads, groups, -1).transpose(0, 1)
        torch.mul(by_head[:, None].expand(part.queries.shape), self._scale, out=part.queries)
        scores = _sums(key_table, part.key_rows, part.queries)
        scores = scores.view(kv_heads, num_tiles, num_rows, groups, -1).permute(0, 2, 3, 1, 4)
        torch.add(scores, part.mask, out=part.scores)
        by_slot = part.scores.view(kv_heads, num_rows, groups, -1)
        if part.order is not None:
            new = by_slot[..., self._start : self._start + self._num_rows]
            new.copy_(new.gather(-1, part.order))
        seen = _sums(value_table, part.value_rows, torch.softmax(by_slot, -1))
        by_row = seen.view(kv_heads, num_rows, -1).transpose(0, 1)
        return by_row.reshape(num_rows, -1).to(queries.dtype)


def _sums(
    table: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sums of rows of a table, [sums, width]. rows: their numbers and, of each sum, where
    they begin. weights: one for each number, in any shape."""
    numbers, begins = rows
    made: torch.Tensor = torch.embedding_bag(
        table, numbers, begins, False, 0, False, weights.view(-1)
    )[0]
    return made


def _path_orders(parents: Sequence[int]) -> torch.Tensor:
    """Of each node all nodes, [n, n]: those of its path, root first, then the others."""
    nodes = range(len(parents))
    paths = paths_of(parents)
    return torch.tensor([[*path, *(node for node in nodes if node not in path)] for path in paths])


@lru_cache(maxsize=16)
def _table_rows(
    table_sizes: tuple[int, int, int], by_row: tuple[int, int, int], num_tiles: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """What `_sums` takes for scores, [kv_heads, num_tiles, n, groups] sums, and for values,
    [kv_heads, n, groups] sums. by_row: kv_heads, n, groups. Numbers of 4 bytes: they are read with
    every key, and of a long prompt 8 bytes take a tenth longer."""
    all_tiles, head_dim, num_slots = table_sizes
    kv_heads, num_rows = by_row[0], by_row[1] * by_row[2]
    num_keys = num_tiles * KEY_TILE
    tiles = torch.arange(kv_heads)[:, None] * all_tiles + torch.arange(num_tiles)
    keys = tiles[:, :, None, None] * head_dim + torch.arange(head_dim)  # [kv_heads, t, 1, head_dim]
    keys = keys.int().expand(-1, -1, num_rows, -1).reshape(-1)
    values = (torch.arange(kv_heads)[:, None] * num_slots + torch.arange(num_keys))[:, None]
    values = values.int().expand(-1, num_rows, -1).reshape(-1)
    key_begins = torch.arange(0, keys.shape[0], head_dim, dtype=torch.int32)
    value_begins = torch.arange(0, values.shape[0], num_keys, dtype=torch.int32)
    return (keys, key_begins), (values, value_begins)


# -- fused, of plain keys -------------------------------------------------------------------


def grouped_mask(mask: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """The mask of all query heads of one key head: [1, 1, n, m] -> [1, 1, groups * n, m]. Of more
    than WIDEST rows it stays as it is: of a long prompt it is the largest tensor there is."""
    is_apart = mask is not None and mask.shape[2] > WIDEST and mask.device.type != "mps"
    return mask if mask is None or is_apart else mask.repeat(1, 1, groups, 1)


SHORTEST_PART = 256  # keys; fewer are not worth a merge
MOST_PARTS = 16
KEY_STEP = 64  # of the kernels
SPLIT_TOLERANCE = 2e-2  # of the largest number, in bf16


def parts_of(num_keys: int) -> int:
    """Into how many parts so many keys are split, 1 for not at all. Parts are whole steps of the
    kernels."""
    parts = 1
    while 2 * parts <= MOST_PARTS and num_keys % (2 * parts * KEY_STEP) == 0:
        if num_keys // (2 * parts) < SHORTEST_PART:
            break
        parts *= 2
    return parts


def can_split(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `split_attention`, whose kernels are private to torch, runs here and is right."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, 64), (1, 2, 4 * KEY_STEP, 64), (1, 2, 4 * KEY_STEP, 64))
    made = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    queries, keys, values = made
    mask = torch.zeros(1, 1, 4, 4 * KEY_STEP, dtype=dtype, device=device)
    mask[..., KEY_STEP + 3 :] = float("-inf")
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
    kv_heads, num_rows = rows.shape[1], queries.shape[0]
    if mask is None or mask.shape[2] == rows.shape[2]:
        seen = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    else:  # the query heads of a key head as sequences over the same keys
        apart = rows.view(kv_heads, -1, num_rows, rows.shape[3]).transpose(0, 1)
        keys, values = (part.expand(apart.shape[0], -1, -1, -1) for part in (keys, values))
        seen = F.scaled_dot_product_attention(apart, keys, values, attn_mask=mask).transpose(0, 1)
    return _by_row(seen, queries)


def split_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    parts: int,
) -> torch.Tensor:
    """As `grouped_attention`, over `parts` equal stretches of the keys at once, merged by the
    logarithm of their sums (as in Flash-Decoding). A GPU gives a key head and a stretch to one of
    its processors: unsplit, the few key heads of a model leave most of them idle. Stretches of
    which a row sees nothing change none of its bits."""
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
    weights = torch.exp(log_sum - log_sum.amax(0))  # [parts, kv_heads, r, 1] fp32
    weighted = torch.cat((seen.masked_fill(~is_seen, 0.0) * weights, weights), -1)
    merged = _sum_of_pairs(weighted)  # [1, kv_heads, r, head_dim + 1]
    return _by_row(merged[..., :-1] / merged[..., -1:], queries)


def _sum_of_pairs(parts: torch.Tensor) -> torch.Tensor:
    """Neighbours are added, then neighbours of the sums: [parts, ...] -> [1, ...]. Zeros after the
    last part change no bit, which torch's own sum does not promise."""
    while parts.shape[0] > 1:
        if parts.shape[0] % 2:
            parts = torch.cat((parts, torch.zeros_like(parts[:1])))
        parts = parts[0::2] + parts[1::2]
    return parts


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
    """[1, kv_heads, groups * n, head_dim], or with the groups apart, -> [n, heads * head_dim] in
    the queries' precision."""
    num_rows, heads, head_dim = queries.shape
    out = seen.reshape(-1, heads, num_rows, head_dim)[0].transpose(0, 1)
    return out.reshape(num_rows, heads * head_dim).to(queries.dtype)
