"""Attention over keys and values that stand in a cache, the same for all that runs here.

Query heads that share a key head become further rows of that head, so one kernel reads keys and
values where they stand, without a copy of them for each query head. `cached_attention` writes the
new rows into a KVCache and attends to all of it up to their end: on a processor by `row_attention`,
where a row has the same bits whatever rows run beside it, elsewhere by torch's fused attention,
equal within rounding. `static` attends to fixed slots with the functions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from localspec.forward.cache import WIDEST, KVCache
from localspec.forward.row_attention import Attend, CachedAttend, Heads, RowAttention, with_sinks
from localspec.forward.tree import additive_mask, block_mask, depths, slot_mask
from localspec.forward.upload import indices
from localspec.weights.linear import filled


def cached_attention(
    cache: KVCache,
    start: int,
    num_rows: int,
    heads: Heads,
    parents: Sequence[int] | None = None,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    num_slots: int | None = None,
) -> CachedAttend:
    """Attention of `num_rows` rows whose keys and values are written from position `start` on. On a
    processor more rows may come (`weights.dense.fewest_rows`), of which nothing is written.

    parents: of a tree, None for a chain. window: how many positions up to its own a row sees, None
    for all. mask: what rows see in place of that, added to the scores, [1, 1, n, start + n].
    num_slots: of the layers that it serves, None for those of the cache."""
    if cache.has_key_blocks:
        return RowAttention(cache, start, num_rows, heads, parents, window, mask, num_slots)
    num_slots = num_slots or cache.num_slots
    if start + num_rows > num_slots:
        assert window is not None and mask is None, "a ring holds a window"
        return _ring_attention(cache, start, num_rows, heads, parents, window, num_slots)
    if mask is None:
        mask = additive_mask(num_rows, parents, start, cache.dtype, cache.device, window)
    grouped = grouped_mask(mask, heads.num_groups)

    def attend(
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = cache.key_values.write(layer, start, start + num_rows, keys_values)
        return grouped_attention(queries, keys, values, grouped, sinks)

    return attend


def _ring_attention(
    cache: KVCache,
    start: int,
    num_rows: int,
    heads: Heads,
    parents: Sequence[int] | None,
    window: int,
    num_slots: int,
) -> CachedAttend:
    """The same in a ring that has no slot for every position: so many rows at once that the first
    one's window stands when the last one's keys are written."""
    most = num_slots - window
    assert parents is None or num_rows <= most, "a tree has fewer nodes than a ring has to spare"
    columns = torch.arange(num_slots, device=cache.device)
    stretches = list[tuple[slice, torch.Tensor | None]]()
    for first in range(0, num_rows, most):
        size = min(most, num_rows - first)
        slots = torch.arange(start + first, start + first + size, device=cache.device)
        positions = slots
        if parents is not None:
            positions = indices([start + depth for depth in depths(parents)], cache.device)
        block = block_mask(size, parents, cache.dtype, cache.device)
        mask = slot_mask(positions, slots, block, columns, window)
        shown = mask[..., : min(num_slots, start + first + size)]
        stretches.append((slice(first, first + size), grouped_mask(shown, heads.num_groups)))

    def attend(
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert keys_values.shape[1] or num_rows <= most, "keys of others are read after all rows"
        seen = list[torch.Tensor]()
        for rows, grouped in stretches:
            held = cache.key_values.write(
                layer, start + rows.start, start + rows.stop, keys_values[rows]
            )
            seen.append(grouped_attention(queries[rows], *held, grouped, sinks))
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    return attend


def each_its_own(attends: Sequence[Attend], places: Sequence[slice]) -> Attend:
    """Attention of the rows of several sequences, one sequence after the other; places: the rows
    of each. Rows beyond them are padding."""
    if len(attends) == 1:
        return attends[0]

    def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        pairs = zip(attends, places, strict=True)
        seen = [one(layer, queries[place], keys_values[place]) for one, place in pairs]
        return filled(torch.cat(seen), queries.shape[0])

    return attend


def grouped_mask(mask: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """The mask of all query heads of one key head: [1, 1, n, m] -> [1, 1, groups * n, m]. Of more
    than WIDEST rows it stays as it is: of a long prompt it is the largest tensor there is."""
    is_apart = mask is not None and mask.shape[2] > WIDEST and mask.device.type != "mps"
    return mask if mask is None or is_apart else mask.repeat(1, 1, groups, 1)


SHORTEST_PART = 256  # keys; fewer are not worth a merge
MOST_PARTS = 16
KEY_STEP = 64  # of the kernels
MASK_STEP = 16  # The kernel for CUDA reads so many numbers of a mask at once.
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


# Largest heads whose keys are lent to several sequences of rows at once. A kernel of torch for GPUs
# was reported to be wrong for lent keys with heads of 512 (pytorch issue 191937).
WIDEST_LENT_HEAD = 256


def grouped_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """queries [n, heads, head_dim], keys and values [1, kv_heads, m, head_dim], mask as
    `grouped_mask` gives it, sinks [heads] -> [n, heads * head_dim] in the precision of the
    queries."""
    rows = _by_key_head(queries, keys)
    kv_heads, num_rows = rows.shape[1], queries.shape[0]
    if mask is None or mask.shape[2] == rows.shape[2]:
        by_row = None if sinks is None else _sinks_by_row(sinks, kv_heads, num_rows)
        seen = _fused(rows, keys, values, mask, by_row)
    else:  # the query heads of a key head as sequences over the same keys
        apart = rows.view(kv_heads, -1, num_rows, rows.shape[3]).transpose(0, 1)
        num_lent = 1 if rows.shape[3] > WIDEST_LENT_HEAD else apart.shape[0]
        keys, values = (part.expand(num_lent, -1, -1, -1) for part in (keys, values))
        lent = torch.split(apart, num_lent)
        of_parts: Sequence[torch.Tensor | None] = [None] * len(lent)
        if sinks is not None:
            of_parts = torch.split(sinks.view(kv_heads, -1).T[..., None], num_lent)
        parts = [
            _fused(part, keys, values, mask, of_part)
            for part, of_part in zip(lent, of_parts, strict=True)
        ]
        seen = (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(0, 1)
    return _by_row(seen, queries)


def _sinks_by_row(sinks: torch.Tensor, kv_heads: int, num_rows: int) -> torch.Tensor:
    """[heads] -> [1, kv_heads, groups * n], as `_by_key_head` lays rows out."""
    return sinks.view(1, kv_heads, -1, 1).expand(-1, -1, -1, num_rows).flatten(2)


def _fused(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """torch's fused attention. sinks: as many as rows, or fewer that are expanded."""
    if sinks is None:
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    seen, log_sum = _with_log_sum(rows, keys, values, mask)
    return with_sinks(seen, log_sum[..., : rows.shape[2]], sinks)


def split_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    parts: int,
    sinks: torch.Tensor | None = None,
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
    highest = log_sum.amax(0)
    weights = torch.exp(log_sum - highest)  # [parts, kv_heads, r, 1] fp32
    weighted = torch.cat((seen.masked_fill(~is_seen, 0.0) * weights, weights), -1)
    merged = _sum_of_pairs(weighted)  # [1, kv_heads, r, head_dim + 1]
    sums = merged[..., -1:]
    if sinks is not None:
        by_row = _sinks_by_row(sinks, kv_heads, queries.shape[0])
        sums = sums + torch.exp(by_row[..., None] - highest)
    return _by_row(merged[..., :-1] / sums, queries)


def _sum_of_pairs(parts: torch.Tensor) -> torch.Tensor:
    """Neighbours are added, then neighbours of the sums: [parts, ...] -> [1, ...]. Zeros after the
    last part change no bit, which torch's own sum does not promise."""
    while parts.shape[0] > 1:
        if parts.shape[0] % 2:
            parts = torch.cat((parts, torch.zeros_like(parts[:1])))
        parts = parts[0::2] + parts[1::2]
    return parts


def _with_log_sum(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of each row's sum of exponentials, of at least all rows."""
    kernels: Any = torch.ops.aten
    if rows.device.type == "mps":  # has no kernel that says the sum
        scores = (rows @ keys.mT).float() * rows.shape[3] ** -0.5
        scores = scores if mask is None else scores + mask
        return torch.softmax(scores, -1).to(values.dtype) @ values, scores.logsumexp(-1)
    if mask is not None:
        mask = _aligned(mask).expand(*rows.shape[:3], -1)
    if rows.device.type == "cpu":
        made = kernels._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, attn_mask=mask
        )
    else:
        made = kernels._scaled_dot_product_efficient_attention(rows, keys, values, mask, True)
    seen, log_sum = made[:2]
    return seen, log_sum


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask with rows that begin where CUDA's kernel reads them."""
    spare = -mask.shape[3] % MASK_STEP
    return F.pad(mask, (0, spare))[..., : mask.shape[3]] if spare else mask


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
