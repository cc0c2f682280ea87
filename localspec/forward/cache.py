"""A preallocated KV cache addressed by absolute lengths.

Contract: `tokens` mirrors on the host what the slots hold. `reuse` (longest common prefix)
serves rejection, cancel, edit, regenerate and the next turn alike; `rollback` shortens;
`keep` compacts the accepted path of a tree. Every position is kept, so every length can be
returned to. `append` is the context of one forward, which writes by `write`, or by the methods that
transformers calls on a cache (`update`, `get_seq_length`, `get_mask_sizes`, `get_query_offset`).

Not here: attention, masks, models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from localspec.core.errors import CacheError
from localspec.core.prefix import common_prefix_length
from localspec.formats.delta_settings import DeltaSettings
from localspec.forward.delta_chunks import ClosedStates
from localspec.forward.features import Features
from localspec.forward.snapshots import Memory, Snapshots
from localspec.forward.states import WIDEST as WIDEST
from localspec.forward.states import OrderedStates, States
from localspec.forward.upload import indices

STRETCH = 256  # keys that attention on a GPU takes at once
KEY_BLOCK = 512  # keys that attention on a processor takes at once, as torch's kernel does
SNAPSHOT_EVERY = 2048  # tokens of a prompt after which a snapshot is taken


@dataclass(frozen=True)
class KVShape:
    """What a cache must hold: layers, key/value heads, head size, slots. of_layers: heads and head
    size of each layer where they differ; the two before are then those of the widest. num_layers
    counts those with keys and values; states: of the layers that have a state in their place."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    of_layers: tuple[tuple[int, int], ...] = ()
    states: DeltaSettings | None = None

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Heads and head size of each layer."""
        return self.of_layers or ((self.num_kv_heads, self.head_dim),) * self.num_layers


def native_cache(shape: KVShape, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Return a cache as the native decoder reads it for a model in `dtype`. A processor has no
    kernels for fp16, so keys and values are fp32 there."""
    if device.type == "cpu":
        kept_in = torch.float32 if dtype == torch.float16 else dtype
        return KVCache(shape, kept_in, device, has_key_blocks=True)
    return KVCache(shape, dtype, device, num_spare=WIDEST if device.type == "cuda" else 0)


View = TypeVar("View")
# Views of keys and values of each layer, [1, kv_heads, n, head_dim] each.
SlotViews = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class KVCache:
    """K and V of one sequence, allocated once: [2, layers, 1, kv_heads, capacity, head_dim] of all
    layers that are alike.

    has_key_blocks: whether the slots come to a multiple of KEY_BLOCK, for the attention that gives
    a row the same bits whatever rows run beside it; states are then moved in order. num_spare:
    slots after the last token's, at least, which a forward of a fixed width fills up; with them the
    slots come to a multiple of STRETCH. piece: how many tokens of a prompt are read at once where a
    row's bits depend on that, None where they do not; see `reuse_read`. features: hidden states
    kept beside keys and values, None until a layer is followed (`follow`)."""

    is_compileable = False  # read by transformers: this cache is not to be traced

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device,
        has_key_blocks: bool = False,
        num_spare: int = 0,
    ) -> None:
        self.shape = shape
        self.tokens: list[int] = []
        self.has_key_blocks = has_key_blocks
        self.piece: int | None = None
        self._num_spare = num_spare
        self._num_whole = 0  # tokens from the start on that were read in whole pieces
        slots = shape.capacity + num_spare
        if has_key_blocks:
            slots += -slots % KEY_BLOCK
        if num_spare:
            slots += -slots % STRETCH
        self.num_slots = slots
        self.dtype, self.device = dtype, device
        self._parts = tuple(
            torch.zeros(2, count, 1, heads, slots, width, dtype=dtype, device=device)
            for (heads, width), count in Counter(shape.sizes).items()
        )
        # Views made once: indexing the big tensors for every layer of every step is host time.
        self.slots = self.between(0, slots)
        self._pairs = self.pairs_between(0, slots)
        self._start = 0
        self._end = 0
        self.features: Features | None = None
        kind = OrderedStates if has_key_blocks else ClosedStates
        self.states: States | None = None
        if shape.states is not None:
            self.states = kind(shape.states, dtype, device)
        self._memories: tuple[Memory, ...] = () if self.states is None else (self.states,)
        self._snapshots = Snapshots()

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_settled(self) -> int:
        """The tokens that states have settled; 0 where there are no states."""
        return 0 if self.states is None else self.states.num_settled

    @property
    def takes_trees(self) -> bool:
        """Whether one forward can check several continuations, with the bits that each has."""
        return self.piece is None and self.states is None

    @property
    def prefers_chains(self) -> bool:
        """Whether a draft is better a chain. Attention on a processor runs once for each leaf of a
        tree (row_attention)."""
        return self.has_key_blocks or not self.takes_trees

    @property
    def kv_bytes(self) -> int:
        slots = sum(part.nbytes for part in self._parts)
        return slots + (0 if self.states is None else self.states.nbytes)

    def another(self) -> KVCache:
        """An empty cache of the same shape, for another sequence."""
        return KVCache(self.shape, self.dtype, self.device, self.has_key_blocks, self._num_spare)

    def follow(
        self, layers: Sequence[int], width: int, dtype: torch.dtype, of_last_row: bool = False
    ) -> Features:
        """Keep the hidden states of these layers as well, in the width and precision of the
        model's embedding. Ask before the first forward: tokens cached already have no rows.
        of_last_row: see Features.follow."""
        if self.features is None:
            self.features = Features(self.num_slots, width, dtype, self.device)
        self.features.follow(layers, of_last_row)
        return self.features

    def between(self, first: int, end: int) -> SlotViews:
        """Return keys and values of some slots."""
        parts = (part.narrow(4, first, end - first).unbind(1) for part in self._parts)
        return self._by_layer([[(keys, values) for keys, values in part] for part in parts])

    def pairs_between(self, first: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return the same of each layer as one view, [2, kv_heads, n, head_dim]."""
        parts = (part[:, :, 0].narrow(3, first, end - first) for part in self._parts)
        return self._by_layer([part.unbind(1) for part in parts])

    def _by_layer(self, parts: Sequence[Sequence[View]]) -> tuple[View, ...]:
        """Return in the order of the layers what stands together where layers are alike."""
        if len(parts) < 2:
            return tuple(parts[0]) if parts else ()
        rows = dict(zip(dict.fromkeys(self.shape.sizes), map(iter, parts), strict=True))
        return tuple(next(rows[size]) for size in self.shape.sizes)

    @property
    def earliest(self) -> int:
        """The shortest length that it can return to without a token being read again."""
        if self.states is None:
            return 0
        reach = self.states.reach
        return reach[0] if self.length in reach else self.length

    @property
    def most_rows(self) -> int:
        """Rows of one forward that can all be taken back without a token being read again."""
        return self.shape.capacity if self.states is None else WIDEST

    def reuse(self, tokens: Sequence[int]) -> int:
        """Shorten to the longest prefix of `tokens` that is held; returns its length."""
        length = self._held_length(common_prefix_length(self.tokens, tokens))
        self.rollback(length)
        return length

    def hold(self) -> None:
        """Hold what later texts may go on from: copies of what exists at few lengths only."""
        if self._memories and self.length in self._reach:
            copies = [memory.saved(self.length) for memory in self._memories]
            self._snapshots.add(self.tokens, copies)

    def unread(self) -> list[int]:
        """Drop the last tokens that some memory cannot go to, and return them: after a rollback
        behind all snapshots' reach they have to be read again."""
        held = self._held_length(self.length)
        tokens = self.tokens[held:]
        del self.tokens[held:]
        return tokens

    @property
    def _reach(self) -> range:
        """The lengths that every memory can go to without a snapshot."""
        reaches = [memory.reach for memory in self._memories]
        return range(max(each.start for each in reaches), min(each.stop for each in reaches))

    def _held_length(self, length: int) -> int:
        """The longest prefix of the first `length` tokens after which every layer can go on."""
        if not self._memories or length in self._reach:
            return length
        nearest = self._snapshots.longest(self.tokens[:length])
        reach = self._reach
        return max(nearest, reach[-1]) if reach and reach[-1] < length else nearest

    def _go_to(self, length: int) -> None:
        """Bring every memory to the tokens that are held, of which there are so many."""
        if not self._memories or length in self._reach:
            return
        copies = self._snapshots.at(self.tokens)
        assert copies is not None or not length, "`unread` went before"
        for place, memory in enumerate(self._memories):
            if copies is None:
                memory.clear()
            else:
                memory.restore(copies[place])

    def reuse_read(self, tokens: Sequence[int]) -> int:
        """As `reuse`, of a prompt that is read from there on. Where bits depend on how many rows
        run at once only whole pieces stay, so that a prompt's keys and values are always those of
        the same forwards, whatever turns came before."""
        length = self.reuse(tokens)
        if self.piece is not None:
            self.rollback(min(length, self._num_whole))
        return self.length

    def rollback(self, length: int) -> None:
        """Forget every slot from `length` on. Raises CacheError if that many were never held."""
        if not 0 <= length <= self.length:
            raise CacheError(
                f"The cache holds {self.length} tokens and cannot return to {length}. "
                "This is a fault of localspec; start a new chat and report it."
            )
        del self.tokens[length:]
        if self.piece is not None:
            self._num_whole = min(self._num_whole, length - length % self.piece)

    @torch.inference_mode()
    def zero_beyond(self) -> None:
        """Zero the slots beyond the end, after NaN may have been written there: a mask does not
        hide NaN, and a rollback does not erase it."""
        for part in self._parts:
            part[:, :, :, :, self.length :].zero_()
        if self.states is not None:
            self.states.zero_beyond()

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Compact the slots after `base` to `path`, in order.

        base: tokens kept untouched. path: slot offsets from `base`, ascending. The length
        becomes base + len(path). Cost: nothing for a chain, else one gather over all layers.
        """
        if not all(0 <= offset < self.length - base for offset in path):
            raise CacheError(f"The path {list(path)} names a slot that was never written.")
        if list(path) != list(range(len(path))):
            places = indices([base + offset for offset in path], self.device)
            for part in self._parts:
                part[:, :, :, :, base : base + len(path)] = part.index_select(4, places)
            if self.features is not None:
                self.features.compact(base, path)
        tokens = [self.tokens[base + offset] for offset in path]
        self.tokens[base:] = tokens

    @contextmanager
    def append(self, tokens: Sequence[int]) -> Iterator[int]:
        """Open slots for `tokens` during one forward; yields the first one's position. After an
        error in the forward the length is unchanged. Raises CacheError at the context's end."""
        start, end = self.length, self.length + len(tokens)
        if end > self.shape.capacity:
            raise CacheError(
                f"The context holds {self.shape.capacity} tokens and this needs {end}. "
                "Start a new chat or load the model with a longer context."
            )
        self._start, self._end = start, end
        self.claim(len(tokens))
        yield start
        self.tokens.extend(tokens)
        if self.states is not None:
            self.states.finish(end, len(tokens))
        self._hold_seldom(end, len(tokens))
        if len(tokens) == self.piece and start == self._num_whole:
            self._num_whole = end

    def claim(self, num_rows: int) -> None:
        """Make room for so many rows after the end. A forward that writes more rows than it appends
        tokens claims them itself."""
        self._go_to(self.length)
        if self.states is not None:
            self.states.begin(self.length, num_rows)

    def _hold_seldom(self, end: int, num_rows: int) -> None:
        """Hold a long prompt every SNAPSHOT_EVERY tokens."""
        is_read = self._memories and num_rows > WIDEST
        if is_read and end - self._snapshots.longest(self.tokens) >= SNAPSHOT_EVERY:
            self.hold()

    def write(
        self, layer: int, start: int, end: int, keys_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put n = end - start rows, [n, 2 * kv_heads, head_dim], keys first, into their slots, none
        where there are no heads; returns all keys and values up to `end`,
        [1, kv_heads, end, head_dim] each."""
        slots, (keys, values) = self._pairs[layer], self.slots[layer]
        if keys_values.shape[1]:
            rows = keys_values.view(end - start, 2, slots.shape[1], slots.shape[3])
            slots[:, :, start:end].copy_(rows.permute(1, 2, 0, 3))
        return keys[:, :, :end], values[:, :, :end]

    # What transformers asks of a cache during a forward.

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, heads, n, dim] into this forward's slots; returns all K and V so far. Raises
        CacheError for keys or values of another size: torch would repeat a single head."""
        held_keys, held_values = self.slots[layer]
        for made, held in ((keys, held_keys), (values, held_values)):
            if (made.shape[1], made.shape[3]) != (held.shape[1], held.shape[3]):
                raise CacheError(
                    f"Layer {layer} has {made.shape[1]} heads of {made.shape[3]}, where the config "
                    f"names {held.shape[1]} of {held.shape[3]}."
                )
        held_keys[:, :, self._start : self._end] = keys
        held_values[:, :, self._start : self._end] = values
        return held_keys[:, :, : self._end], held_values[:, :, : self._end]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._start

    def get_query_offset(self, layer: int = 0) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        return self._start + query_length, 0
