"""A preallocated KV cache addressed by absolute lengths.

Contract: `tokens` mirrors on the host what the slots hold. `reuse` (longest common prefix)
serves rejection, cancel, edit, regenerate and the next turn alike; `rollback` shortens;
`keep` compacts the accepted path of a tree. Every position is kept, so every length can be
returned to. `append` is the context of one forward, which writes by `write`, or by the methods that
transformers calls on a cache (`update`, `get_seq_length`, `get_mask_sizes`, `get_query_offset`).

Not here: attention, masks, models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from localspec.core.errors import CacheError
from localspec.forward.features import Features
from localspec.forward.upload import indices

WIDEST = 16  # rows of a forward that checks a draft
STRETCH = 256  # keys that attention on a GPU takes at once
KEY_BLOCK = 512  # keys that attention on a processor takes at once, as torch's kernel does


@dataclass(frozen=True)
class KVShape:
    """What a cache must hold: layers, key/value heads, head size, slots. of_layers: heads and head
    size of each layer where they differ; the two before are then those of the widest."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    of_layers: tuple[tuple[int, int], ...] = ()


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix. Slices compare in C, so this bisects over them."""
    if type(left) is not type(right):  # a list never equals a tuple
        left, right = list(left), list(right)
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # equal up to low, different somewhere below high
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def native_cache(shape: KVShape, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Return a cache as the native decoder reads it for a model in `dtype`. A processor has no
    kernels for fp16, so keys and values are fp32 there."""
    if device.type == "cpu" and not shape.of_layers:
        kept_in = torch.float32 if dtype == torch.float16 else dtype
        return KVCache(shape, kept_in, device, has_key_blocks=True)
    return KVCache(shape, dtype, device, num_spare=WIDEST if device.type == "cuda" else 0)


def _of_layers(slots: torch.Tensor, shape: KVShape) -> tuple[torch.Tensor, ...]:
    """Views of keys or values, [1, kv_heads, capacity, head_dim] each."""
    if not shape.of_layers:
        return slots.unbind(0)
    parts = torch.split(slots[0, :, 0], [heads * width for heads, width in shape.of_layers], -1)
    pairs = zip(parts, shape.of_layers, strict=True)
    return tuple(part.view(*part.shape[:-1], *size).transpose(1, 2) for part, size in pairs)


# Views of keys and values of each layer, [1, kv_heads, n, head_dim] each.
SlotViews = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class KVCache:
    """K and V of one sequence, [layers, 1, kv_heads, capacity, head_dim] each, allocated once;
    [1, 1, 1, capacity, all layers] where layers differ, which only transformers' forward writes.

    has_key_blocks: whether the slots come to a multiple of KEY_BLOCK, for the attention that gives
    a row the same bits whatever rows run beside it. num_spare: slots after the last token's, at
    least, which a forward of a fixed width fills up; with them the slots come to a multiple of
    STRETCH. piece: how many tokens of a prompt are read at once where a row's bits
    depend on that, None where they do not; see `reuse_read`. features: hidden states kept beside
    keys and values, None until a layer is followed (`follow`)."""

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
        size = (2, shape.num_layers, 1, shape.num_kv_heads, slots, shape.head_dim)
        if shape.of_layers:  # side by side in every slot
            size = (2, 1, 1, 1, slots, sum(heads * width for heads, width in shape.of_layers))
        self._slots = torch.zeros(size, dtype=dtype, device=device)
        # Views made once: indexing the big tensors for every layer of every step is host time.
        self._keys, self._values = (_of_layers(part, shape) for part in self._slots)
        self._pairs = self._slots[:, :, 0].unbind(1)  # [2, kv_heads, capacity, head_dim]
        self._start = 0
        self._end = 0
        self.features: Features | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def takes_trees(self) -> bool:
        """Whether one forward can check several continuations, with the bits that each has."""
        return self.piece is None

    @property
    def num_slots(self) -> int:
        return int(self._slots.shape[4])

    @property
    def dtype(self) -> torch.dtype:
        return self._slots.dtype

    @property
    def device(self) -> torch.device:
        return self._slots.device

    @property
    def kv_bytes(self) -> int:
        return self._slots.nbytes

    def another(self) -> KVCache:
        """An empty cache of the same shape, for another sequence."""
        return KVCache(self.shape, self.dtype, self.device, self.has_key_blocks, self._num_spare)

    def follow(self, layers: Sequence[int], width: int, dtype: torch.dtype) -> Features:
        """Keep the hidden states of these layers as well, in the width and precision of the
        model's embedding. Ask before the first forward: tokens cached already have no rows."""
        if self.features is None:
            self.features = Features(self.num_slots, width, dtype, self.device)
        self.features.follow(layers)
        return self.features

    @property
    def slots(self) -> SlotViews:
        """Keys and values of all slots."""
        return tuple(zip(self._keys, self._values, strict=True))

    def between(self, first: int, end: int) -> SlotViews:
        """Return keys and values of some slots, of layers that are alike."""
        keys, values = self._slots.narrow(4, first, end - first)
        return tuple(zip(keys.unbind(0), values.unbind(0), strict=True))

    def pairs_between(self, first: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return the same of each layer as one view, [2, kv_heads, n, head_dim]."""
        return self._slots[:, :, 0].narrow(3, first, end - first).unbind(1)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Shorten to the longest common prefix with `tokens`; returns its length."""
        length = common_prefix_length(self.tokens, tokens)
        self.rollback(length)
        return length

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
        self._slots[:, :, :, :, self.length :].zero_()

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Compact the slots after `base` to `path`, in order.

        base: tokens kept untouched. path: slot offsets from `base`, ascending. The length
        becomes base + len(path). Cost: nothing for a chain, else one gather over all layers.
        """
        if not all(0 <= offset < self.length - base for offset in path):
            raise CacheError(f"The path {list(path)} names a slot that was never written.")
        if list(path) != list(range(len(path))):
            places = indices([base + offset for offset in path], self.device)
            kept = self._slots.index_select(4, places)
            self._slots[:, :, :, :, base : base + len(path)] = kept
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
        yield start
        self.tokens.extend(tokens)
        if len(tokens) == self.piece and start == self._num_whole:
            self._num_whole = end

    def write(
        self, layer: int, start: int, end: int, keys_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put n = end - start rows, [n, 2 * kv_heads, head_dim], keys first, into their slots;
        returns all keys and values up to `end`, [1, kv_heads, end, head_dim] each."""
        rows = keys_values.view(end - start, 2, self.shape.num_kv_heads, self.shape.head_dim)
        self._pairs[layer][:, :, start:end].copy_(rows.permute(1, 2, 0, 3))
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    # What transformers asks of a cache during a forward.

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, heads, n, dim] into this forward's slots; returns all K and V so far. Raises
        CacheError for keys or values of another size: torch would repeat a single head."""
        held_keys, held_values = self._keys[layer], self._values[layer]
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
