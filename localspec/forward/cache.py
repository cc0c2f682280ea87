"""A preallocated KV cache addressed by absolute lengths.

`tokens` mirrors on the host what the slots hold. `reuse` (longest common prefix) serves rejection,
cancel, edit, regenerate and the next turn alike; `rollback` shortens; `keep` compacts the accepted
path of a tree. Layers that see everything can return to every length. Rings and states can return
to a few last lengths, and to those of which `hold` took a snapshot; tokens behind these are read
again (`unread`). `reuse` also brings back what any cache of the model has read (`prefixes`).
`append` is the context of one forward, which writes to `key_values` or as transformers does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from localspec.core.errors import CacheError
from localspec.core.prefix import common_prefix_length
from localspec.forward.delta_chunks import ClosedStates
from localspec.forward.features import Features
from localspec.forward.key_values import KeyValues, SlotViews
from localspec.forward.key_values import KVShape as KVShape
from localspec.forward.prefixes import Prefixes
from localspec.forward.rings import Rings
from localspec.forward.snapshots import Memory, Snapshot, Snapshots
from localspec.forward.states import WIDEST as WIDEST
from localspec.forward.states import OrderedStates, States

STRETCH = 256  # keys that attention on a GPU takes at once
KEY_BLOCK = 512  # keys that attention on a processor takes at once, as torch's kernel does
SNAPSHOT_EVERY = 2048  # tokens of a prompt after which a snapshot is taken
# What two texts share at their beginning, such as a system prompt, is held for a third one if so
# many tokens of it had to be read again. A snapshot costs less than reading them.
LEAST_SHARED = 128


def native_cache(shape: KVShape, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Return a cache as the native decoder reads it for a model in `dtype`. A processor has no
    kernels for fp16, so keys and values are fp32 there."""
    if device.type == "cpu":
        kept_in = torch.float32 if dtype == torch.float16 else dtype
        return KVCache(shape, kept_in, device, has_key_blocks=True)
    return KVCache(shape, dtype, device, num_spare=WIDEST if device.type == "cuda" else 0)


class KVCache:
    """K and V of one sequence, allocated once for all layers that are alike. Position p of a layer
    stands in slot p modulo its number of slots (`rings`).

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
        unit = KEY_BLOCK if has_key_blocks else STRETCH
        self.key_values = KeyValues(shape, slots, unit, dtype, device)
        self._start = 0
        self._end = 0
        self.features: Features | None = None
        kind = OrderedStates if has_key_blocks else ClosedStates
        self.states: States | None = None
        if shape.states is not None:
            self.states = kind(shape.states, dtype, device)
        rings = self.key_values.rings
        self._rings = Rings(rings) if rings else None
        memories: tuple[Memory | None, ...] = (self.states, self._rings)
        self.memories = tuple(memory for memory in memories if memory is not None)
        self._snapshots = Snapshots()
        self._branch: int | None = None  # where the text that is read leaves the one before
        self.prefixes: Prefixes | None = None
        self.num_from_disk = 0  # tokens that the last `reuse` brought from the disk
        self.is_rerun = False  # while tokens run once more (`restoring`)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def slots(self) -> tuple[SlotViews, ...]:
        """Keys and values of each layer, [1, kv_heads, num_slots, head_dim] each."""
        return self.key_values.slots

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
        return self.key_values.nbytes + (0 if self.states is None else self.states.nbytes)

    def another(self) -> KVCache:
        """An empty cache of the same shape, for another sequence."""
        other = KVCache(self.shape, self.dtype, self.device, self.has_key_blocks, self._num_spare)
        other.prefixes = self.prefixes
        return other

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

    @property
    def earliest(self) -> int:
        """The shortest length that it can return to without a token being read again."""
        if not self.memories:
            return 0
        reach = self._reach
        return reach[0] if self.length in reach else self.length

    @property
    def most_rows(self) -> int:
        """Rows of one forward that can all be taken back without a token being read again."""
        return min([self.shape.capacity, *(memory.most_rows for memory in self.memories)])

    def reuse(self, tokens: Sequence[int]) -> int:
        """Shorten to the longest prefix of `tokens` that is held, here or in `prefixes`; returns
        its length."""
        shared = common_prefix_length(self.tokens, tokens)
        length = self._held_length(shared)
        self.num_from_disk = 0
        if self.prefixes is not None and len(tokens) - length >= LEAST_SHARED:
            if self.num_savable - length >= LEAST_SHARED:
                deque(self.prefixes.save(self), maxlen=0)  # there was no time for it before
            shared, length = self._bring_back(self.prefixes, tokens, shared, length)
        shared -= shared % (self.piece or 1)
        self._branch = shared if shared - length >= LEAST_SHARED else None
        self.rollback(length)
        return length

    def _bring_back(
        self, prefixes: Prefixes, tokens: Sequence[int], shared: int, length: int
    ) -> tuple[int, int]:
        """Bring the longest kept prefix of `tokens` back where it is worth it. shared, length: how
        much of it stands here, and after how much this cache can go on. Returns both anew."""
        rows = prefixes.rows(self, tokens[: self.shape.capacity])
        known = max(shared, rows[-1].end if rows else 0)
        copies = prefixes.copies(self, tokens[:known]) if self.memories else None
        end = copies.end if copies else 0 if self.memories else known
        if end - length < LEAST_SHARED:
            return known, length
        start = shared if self.piece is None else min(shared, self._num_whole)
        held, places = self._held_length(start), [place for place in rows if place.end > start]
        reached, self.num_from_disk = prefixes.put_rows(self, places, end)
        reached = max(start, reached)
        self.tokens = [*tokens[:reached]]
        if self.piece is not None:
            self._num_whole = reached - reached % self.piece
        if copies is None:
            return known, min(end, reached)
        if reached < end:
            return known, held
        saved = prefixes.put_copies(self.memories, copies.key)
        if saved is None:
            self.tokens = []
            return known, 0
        self._snapshots.add(self.tokens[:end], saved)
        return known, end

    def piece_end(self, start: int, end: int) -> int:
        """Return the end of a piece of a prompt that may end at `end`: where the text leaves the
        one before it, if that lies between."""
        branch = self._branch
        return branch if branch is not None and start < branch < end else end

    def hold(self) -> None:
        """Hold what later texts may go on from: copies of what exists at few lengths only."""
        if self.tokens and self.memories and not self.is_rerun and self.length in self._reach:
            copies = [memory.saved(self.length) for memory in self.memories]
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
        reaches = [memory.reach for memory in self.memories]
        return range(max(each.start for each in reaches), min(each.stop for each in reaches))

    # what `prefixes` ask

    @property
    def num_savable(self) -> int:
        """Tokens whose rows a later text may go on from."""
        return self.length if self.piece is None else self._num_whole

    @property
    def row_layout(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """Type, sizes and axis of the tokens of each tensor of `saved_rows`."""
        features = () if self.features is None else self.features.row_layout
        return self.key_values.row_layout + features

    @property
    def layout_name(self) -> str:
        """All that the numbers here depend on beside the model."""
        followed = None if self.features is None else self.features.layers
        return repr((self.row_layout, followed, self.piece, self.has_key_blocks, self.shape))

    def saved_rows(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return copies on the host of what is held of the tokens from `start` to `end`."""
        more = () if self.features is None else self.features.saved(start, end)
        return (*self.key_values.saved(start, end), *more)

    def restore_rows(self, start: int, rows: Sequence[torch.Tensor]) -> None:
        """Put such rows back, from `start` on."""
        count = len(self.key_values.row_layout)
        self.key_values.restore(start, rows[:count])
        if self.features is not None:
            self.features.restore(start, rows[count:])

    def saved_copies(self) -> list[Snapshot]:
        """Return the snapshots along the text, shortest first."""
        return self._snapshots.along(self.tokens)

    def _held_length(self, length: int) -> int:
        """The longest prefix of the first `length` tokens after which every layer can go on."""
        if not self.memories or length in self._reach:
            return length
        nearest = self._snapshots.longest(self.tokens[:length])
        reach = self._reach
        return max(nearest, reach[-1]) if reach and reach[-1] < length else nearest

    def _go_to(self, length: int) -> None:
        """Bring every memory to the tokens that are held, of which there are so many."""
        if not self.memories or length in self._reach:
            return
        copies = self._snapshots.at(self.tokens)
        assert copies is not None or not length, "`unread` went before"
        for place, memory in enumerate(self.memories):
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
            self.rollback(self._whole_length(min(length, self._num_whole)))
        return self.length

    def _whole_length(self, length: int) -> int:
        """The longest length in whole pieces, up to `length`, after which every layer can go on."""
        assert self.piece is not None
        while length % self.piece or length != self._held_length(length):
            length = self._held_length(length - length % self.piece)
        return length

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
        self.key_values.zero_beyond(self.length)
        if self._rings is not None:
            self._rings.zero_beyond(self.length)
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
            self.key_values.compact(base, path)
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
        if self.piece is not None and start == self._num_whole and len(tokens) < self.piece:
            self.hold()  # a later prompt is read from the end of whole pieces on
        self.claim(len(tokens))
        yield start
        self.tokens.extend(tokens)
        if self.states is not None:
            self.states.finish(end, len(tokens))
        self._hold_seldom(end, len(tokens))
        if len(tokens) == self.piece and start == self._num_whole:
            self._num_whole = end

    def claim(self, num_rows: int, num_padding: int = 0) -> None:
        """Make room for so many rows after the end, and for padding behind them. A forward that
        writes more rows than it appends tokens claims them itself."""
        self._go_to(self.length)
        if self.states is not None:
            self.states.begin(self.length, num_rows, num_padding)
        if self._rings is not None:
            self._rings.claim(self.length + num_rows + num_padding)

    def _hold_seldom(self, end: int, num_rows: int) -> None:
        """Hold a long prompt every SNAPSHOT_EVERY tokens, and where it leaves the text before."""
        is_read = self.memories and num_rows > WIDEST
        is_long = is_read and end - self._snapshots.longest(self.tokens) >= SNAPSHOT_EVERY
        if is_long or end == self._branch:
            self.hold()

    # What transformers asks of a cache during a forward.

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, heads, n, dim] into this forward's slots; returns all K and V so far. Raises
        CacheError for keys or values of another size: torch would repeat a single head."""
        held_keys, held_values = self.key_values.slots[layer]
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
