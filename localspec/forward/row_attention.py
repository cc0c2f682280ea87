"""Attention on a processor that gives a row the same bits whatever rows run beside it.

torch's fused kernel does so if it is always called alike. The query heads that share a key head are
rows of that head. Rows are filled up and go to the kernel at most so many at once as one of TILES
says, with the keys in whole blocks of KEY_BLOCK slots. What a row does not see is masked, and a
block that is masked whole changes no bit. Which tile holds depends on the processor's library, so
it is tried once for each precision and head size (`tile_of`); `row_check` then compares the model.

A row of a tree has the bits of its chain because it runs as one: the keys and values of each path
from the root to a leaf stand in the new slots in order while the rows of that path are computed.

In a ring a position has one slot, so a row sees the same keys in the same order at every width. The
rows of a call are written just before it runs: those of a long prompt would otherwise overwrite
what its first rows still see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from localspec.core.prefix import common_prefix_length
from localspec.forward.cache import KEY_BLOCK, KVCache
from localspec.forward.key_values import SlotViews
from localspec.forward.rings import stretches
from localspec.forward.row_masks import PartMasks, SeenSlots, hidden_slots, spread
from localspec.forward.tree import leaf_paths
from localspec.weights.linear import filled

# layer, queries [n, heads, head_dim], keys then values [n, 2 * kv_heads, head_dim]
# -> [n, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class CachedAttend(Protocol):
    """An `Attend` for any layer of a cache. sinks: a further score of each head, [heads] fp32."""

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Heads:
    """How many heads of queries and of keys a layer has, and their size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_groups(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Tile:
    """Rows of a key head go to the kernel in multiples of `multiple`, at most `most` at once."""

    multiple: int
    most: int


# In the order of their speed. MKL's strict mode gives every number of rows the same bits, in bf16
# from 2 on. Without it there are other kernels for few rows, with AVX-512 for up to 10 in heads of
# 256, and with AVX2 for each number and place. The last tile holds by construction.
TILES = (
    *(Tile(multiple, 128) for multiple in (1, 2, 4, 8, 16)),
    Tile(24, 24),
    Tile(1, 1),
)
# The kernel cuts up to 191 rows into so many. What is left decides its products, so a multiple that
# does not divide them would leave fewer rows than itself.
KERNEL_ROWS = 32
PROBED_ROWS = 200  # A difference in fp32 shows in few of the numbers of bf16, so many are compared.


@dataclass(frozen=True)
class _Write:
    """Rows of the keys and values of a forward, and the slots they go to: a view for each layer."""

    rows: slice
    slots: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class _Part:
    """The rows of one call of the kernel.

    rows: a view of them all, [1, kv_heads, n, head_dim], filled up by the rows behind them, whose
    results are dropped. size: how many count. keys_values: views of the slots that they may see, by
    layer. seen: what they see of these slots. groups: of each row the query head among those that
    share a key head. writes: what is written before; of a tree among the keys and values of all
    paths, one path after the other."""

    rows: torch.Tensor
    size: int
    keys_values: Mapping[int, SlotViews]
    seen: SeenSlots
    groups: torch.Tensor
    writes: tuple[_Write, ...]


class RowAttention:
    """Attention of the new rows of one forward: an `Attend`.

    The rows are a chain, or a tree by `parents`; each sees the last `window` positions up to its
    own, or all. mask: what rows see in place of that, added to the scores, [1, 1, n, start + n].
    num_slots: of the layers that it serves, None for those of the cache."""

    def __init__(
        self,
        cache: KVCache,
        start: int,
        num_rows: int,
        heads: Heads,
        parents: Sequence[int] | None = None,
        window: int | None = None,
        mask: torch.Tensor | None = None,
        num_slots: int | None = None,
    ) -> None:
        self._cache, self._start, self._num_rows = cache, start, num_rows
        self._window, self._mask = window, mask
        self._num_slots = num_slots or cache.num_slots
        # Whether the first row still sees its window when the last one's keys are written.
        self._fits = start + num_rows <= self._num_slots or num_rows <= self._num_slots - (
            window or 0
        )
        assert self._fits or parents is None, "a tree has fewer nodes than a ring has to spare"
        self._kv_heads, self._groups = heads.num_kv_heads, heads.num_groups
        tile, factor = tile_of(cache.dtype, heads.head_dim), spread(self._kv_heads)
        self._tile = Tile(factor * tile.multiple, factor * tile.most)
        count = num_rows * self._groups
        size = (1, self._kv_heads, count + self._tile.multiple - 1, heads.head_dim)
        self._rows = torch.zeros(size, dtype=cache.dtype)
        self._by_head = self._rows[0, :, :count].view(-1, num_rows, self._groups, heads.head_dim)
        # Many parts see the same slots.
        self._views = lru_cache(partial(cache.key_values.between, num_slots=self._num_slots))
        # Of the nodes of a tree: as they are computed, and as they are moved into their paths.
        self._order, self._moves = torch.empty(2, 0, dtype=torch.int64)
        self._is_tree = parents is not None
        # Each node of a tree in its own slot.
        self._own = self._writes(start, start + num_rows, 0) if self._is_tree else ()
        self._parts = self._tree_parts(parents) if parents is not None else self._chain_parts()
        self._masks = PartMasks([part.seen for part in self._parts], self._kv_heads)

    def __call__(
        self,
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows beyond `num_rows` only fill a forward up; of them nothing is written."""
        size, heads, head_dim = self._num_rows, queries.shape[1], queries.shape[2]
        is_written = keys_values.shape[1] > 0  # else an earlier layer has written them
        assert is_written or self._fits, "keys of other layers are read after all rows"
        if not is_written and self._is_tree:
            held = [write.slots[layer] for write in self._own]
            keys_values = torch.cat(held, 2).flatten(0, 1).transpose(0, 1)
        new = queries.index_select(0, self._order) if self._is_tree else queries[:size]
        by_row = new.view(size, self._kv_heads, self._groups, head_dim)
        self._by_head.copy_(by_row.transpose(0, 1))
        moved = keys_values.index_select(0, self._moves) if self._is_tree else keys_values
        parts = [self._seen(layer, part, moved, sinks) for part in self._parts]
        seen = parts[0] if len(parts) == 1 else torch.cat(parts)  # [n * groups, kv_heads, head_dim]
        result = seen.view(size, self._groups, self._kv_heads, head_dim).transpose(1, 2)
        result = result.reshape(size, heads * head_dim).to(queries.dtype)
        if self._is_tree:
            _write(layer, self._own, keys_values)  # each node into its own slot
            result = torch.empty_like(result).index_copy_(0, self._order, result)
        return filled(result, queries.shape[0])

    def _seen(
        self, layer: int, part: _Part, moved: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the results of a part, [size, kv_heads, head_dim]."""
        if moved.shape[1]:  # else an earlier layer has written them
            _write(layer, part.writes, moved)
        if sinks is not None:
            sinks = sinks.view(self._kv_heads, -1).index_select(1, part.groups).T
        mask = self._masks.mask_of(part.seen)
        seen = fused_attention(part.rows, *part.keys_values[layer], mask, sinks)
        return seen if seen.shape[0] == part.size else seen[: part.size]

    def _writes(self, first: int, end: int, row: int) -> tuple[_Write, ...]:
        """Return what puts the rows from `row` on into the slots of these positions."""
        return tuple(
            _Write(
                slice(row + rows.start, row + rows.stop),
                self._cache.key_values.pairs_between(slots.start, slots.stop, self._num_slots),
            )
            for slots, rows in stretches(first, end, self._num_slots)
        )

    def _chain_parts(self) -> list[_Part]:
        return list(self._parts_of(0, range(self._num_rows), None))

    def _tree_parts(self, parents: Sequence[int]) -> list[_Part]:
        """Return the parts of one path after the other: of each the nodes that none before had."""
        parts, order, moves = list[_Part](), list[int](), list[int]()
        standing: tuple[int, ...] = ()  # the nodes whose keys and values stand in the new slots
        for nodes in leaf_paths(parents):
            num_shared = common_prefix_length(nodes, standing)
            num_computed = sum(node in order for node in nodes)
            positions = (self._start + num_shared, self._start + len(nodes))
            path = self._writes(*positions, len(moves))
            parts += self._parts_of(len(order), range(num_computed, len(nodes)), path)
            order += nodes[num_computed:]
            moves += nodes[num_shared:]
            standing = nodes
        self._order, self._moves = torch.tensor(order), torch.tensor(moves)
        return parts

    def _parts_of(
        self, place: int, depths: range, path: tuple[_Write, ...] | None
    ) -> Iterator[_Part]:
        """Yield the parts of rows that stand one after the other from `place` on, so many positions
        behind the start as `depths` says. path: what is written before all of them; None for a
        chain, of which each part writes its own positions."""
        groups, tile, written = self._groups, self._tile, self._start
        for at in range(0, len(depths) * groups, tile.most):
            size = min(tile.most, len(depths) * groups - at)
            filled = torch.arange(at, at + size + -size % tile.multiple).clamp(max=at + size - 1)
            begin = self._start + depths.start
            positions = filled // groups + begin  # of each row
            oldest, newest = begin + at // groups, begin + (at + size - 1) // groups
            writes = path
            if writes is None:
                writes = self._writes(written, newest + 1, written - self._start)
                written = newest + 1
            first, end = self._keys_seen(oldest, newest)
            rows = self._rows.narrow(2, place * groups + at, len(filled))
            seen = self._seen_slots(positions, first, end)
            yield _Part(rows, size, self._views(first, end), seen, filled % groups, writes)
            path = () if path is not None else None  # a path stays where it is

    def _keys_seen(self, first: int, last: int) -> tuple[int, int]:
        """Return whole blocks of slots with all that is seen from the positions `first` to `last`:
        a whole ring if these go on from its end at its start."""
        if self._mask is not None:
            first, last = self._start, self._start + self._num_rows - 1
        oldest = 0 if self._window is None else max(0, first - self._window + 1)
        first, end = oldest - oldest % KEY_BLOCK, last + 1 + -(last + 1) % KEY_BLOCK
        if first // self._num_slots < (end - 1) // self._num_slots:
            return 0, self._num_slots
        return first % self._num_slots, (end - 1) % self._num_slots + 1

    def _seen_slots(self, positions: torch.Tensor, first: int, end: int) -> SeenSlots:
        """Return what rows at these positions see of the slots from `first` to `end`."""
        if self._mask is not None:
            given = self._mask[0, 0].index_select(0, positions - self._start)
            mask = F.pad(given, (0, end - given.shape[1]), value=float("-inf"))
            return SeenSlots(first, first, end, mask)
        # Without a window all rows see what stood before the forward.
        common = first if self._window is not None else self._start
        columns = torch.arange(common, end)
        hidden = hidden_slots(positions, columns, self._num_slots, self._window)
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype)
        return SeenSlots(first, common, end, mask.masked_fill_(hidden, float("-inf")))


def _write(layer: int, writes: Sequence[_Write], keys_values: torch.Tensor) -> None:
    """keys_values: [n, 2 * kv_heads, head_dim], keys first."""
    for write in writes:
        slots = write.slots[layer]  # [2, kv_heads, m, head_dim]
        _, kv_heads, size, head_dim = slots.shape
        rows = keys_values[write.rows].view(size, 2, kv_heads, head_dim)
        slots.copy_(rows.permute(1, 2, 0, 3))


# -- the kernel -----------------------------------------------------------------------------


def fused_attention(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention by torch's kernel, [n, kv_heads, head_dim].

    rows: [1, kv_heads, n, head_dim]. keys, values: [1, kv_heads, m, head_dim]. mask: as
    `mask_of_heads` returns it. sinks: [n, kv_heads]."""
    _, kv_heads, num_rows, head_dim = rows.shape
    parts = spread(kv_heads)
    if parts > 1:
        rows = rows.view(1, parts, -1, head_dim)
        keys, values = keys.expand(-1, parts, -1, -1), values.expand(-1, parts, -1, -1)
    result, log_sum = _kernel(rows, keys, values, mask)
    result = result.reshape(kv_heads, num_rows, head_dim).transpose(0, 1)
    return result if sinks is None else with_sinks(result, log_sum.reshape(kv_heads, -1).T, sinks)


def with_sinks(seen: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return attention that leaves the sinks their share of each row's softmax.

    seen: without them, [..., head_dim]. log_sum: the logarithm of each row's sum of exponentials,
    [...]. A softmax over two numbers has the same bits wherever a row stands; torch's sigmoid has
    other bits in the last numbers of a tensor."""
    scores = torch.stack((log_sum, sinks.expand_as(log_sum)), -1)
    return (seen * torch.softmax(scores, -1)[..., :1]).to(seen.dtype)


def _kernel(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention, and the logarithm of each row's sum of exponentials."""
    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: tuple[torch.Tensor, torch.Tensor] = kernel(rows, keys, values, attn_mask=mask)
    return result


@lru_cache
@torch.inference_mode()
def tile_of(dtype: torch.dtype, head_dim: int) -> Tile:
    """Return the first of TILES with which the kernel gives a row its bits at every width and
    place."""
    return next(tile for tile in TILES if tile.most == 1 or _holds(tile, dtype, head_dim))


def _holds(tile: Tile, dtype: torch.dtype, head_dim: int) -> bool:
    """True if rows that are cut into pieces of other sizes, at other places, have the same bits."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((PROBED_ROWS, 2, head_dim), *[(2, 2 * KEY_BLOCK, head_dim)] * 2)
    rows, *keys_values = (torch.randn(size, generator=generator).to(dtype) for size in sizes)

    def results(first: int, size: int) -> torch.Tensor:
        """Return the results of rows from `first` on in pieces, [n, 2, head_dim]."""
        count = (PROBED_ROWS - first) // size
        pieces = rows.narrow(0, first, count * size).view(count, size, 2, head_dim).transpose(1, 2)
        keys, values = (part.expand(count, -1, -1, -1) for part in keys_values)
        mask = torch.zeros(size, keys.shape[2], dtype=dtype)
        seen, log_sum = _kernel(pieces.contiguous(), keys, values, mask)
        both = torch.cat((seen, log_sum[..., None]), -1)  # [pieces, 2, size, head_dim + 1]
        return both.transpose(1, 2).flatten(0, 1)

    whole = results(0, tile.most)
    for size in (*range(tile.multiple, min(tile.most, KERNEL_ROWS) + 1, tile.multiple), tile.most):
        first = size // 2 + 1
        pieces = results(first, size)
        num_compared = min(len(whole) - first, len(pieces))
        if not torch.equal(pieces[:num_compared], whole[first:][:num_compared]):
            return False
    return True
