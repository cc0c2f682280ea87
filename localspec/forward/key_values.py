"""The slots for keys and values of all layers, allocated once, and what is done to them.

Position p of a layer stands in slot p modulo its number of slots: a layer with a window has a ring
of fewer slots than the text may have positions (`rings`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from localspec.formats.attention import RING_SPARE
from localspec.formats.delta_settings import DeltaSettings
from localspec.forward.rings import Ring, stretches
from localspec.forward.upload import indices, put_by


@dataclass(frozen=True)
class KVShape:
    """What a cache must hold: layers, key/value heads, head size, slots. of_layers: heads and head
    size of each layer where they differ; the two before are then those of the widest. num_layers
    counts those with keys and values; states: of the layers that have a state in their place.
    windows: how many positions up to its own a row of each layer sees, None for all; empty where
    every layer holds every position. spare: positions beyond the window that such a layer holds, at
    least."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    capacity: int
    of_layers: tuple[tuple[int, int], ...] = ()
    states: DeltaSettings | None = None
    windows: tuple[int | None, ...] = ()
    spare: int = RING_SPARE

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Heads and head size of each layer."""
        return self.of_layers or ((self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def windows_of_layers(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.num_layers


# Views of keys and values of a layer, [1, kv_heads, n, head_dim] each.
SlotViews = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Part:
    """Layers that are alike. slots: of their keys and values,
    [2, layers, 1, kv_heads, num_slots, head_dim]."""

    layers: tuple[int, ...]
    slots: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.slots.shape[4]


class KeyValues:
    """Keys and values of one sequence. num_slots: of a layer that sees everything. ring_unit: the
    slots of a ring come to a multiple of it, as many as attention takes at once. rings: of the
    layers with fewer slots."""

    def __init__(
        self,
        shape: KVShape,
        num_slots: int,
        ring_unit: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self._shape, self._ring_unit, self._device = shape, ring_unit, device
        alike = dict[tuple[int, int, int | None], list[int]]()
        of_layers = zip(shape.sizes, shape.windows_of_layers, strict=True)
        for layer, (size, window) in enumerate(of_layers):
            is_ring = self._slots_for(window) < num_slots
            alike.setdefault((*size, window if is_ring else None), []).append(layer)
        parts, rings = list[_Part](), list[Ring]()
        for (heads, width, window), layers in alike.items():
            held = (2, len(layers), 1, heads, self._slots_for(window), width)
            slots = torch.zeros(held, dtype=dtype, device=device)
            parts.append(_Part(tuple(layers), slots))
            if window is not None:
                rings.append(Ring(slots, window))
        self._parts, self.rings = tuple(parts), tuple(rings)
        # Views made once: indexing the big tensors for every layer of every step is host time.
        views = dict[int, SlotViews]()
        pairs = dict[int, torch.Tensor]()
        for count in {part.num_slots for part in parts}:
            views.update(self.between(0, count, count))
            pairs.update(self.pairs_between(0, count, count))
        self.slots = tuple(views[layer] for layer in range(shape.num_layers))
        self._pairs = tuple(pairs[layer] for layer in range(shape.num_layers))

    def _slots_for(self, window: int | None) -> int:
        """Return the slots of a layer with such a window."""
        if window is None:
            return self.num_slots
        needed = window + self._shape.spare
        return min(self.num_slots, needed + -needed % self._ring_unit)

    @property
    def nbytes(self) -> int:
        return sum(part.slots.nbytes for part in self._parts)

    def num_slots_of(self, layer: int) -> int:
        """Return the slots of a layer."""
        return self.slots[layer][0].shape[2]

    def between(self, first: int, end: int, num_slots: int) -> Mapping[int, SlotViews]:
        """Return keys and values of some slots, by layer, of the layers that have `num_slots`."""
        views = dict[int, SlotViews]()
        for part in self._parts:
            if part.num_slots == num_slots:
                both = part.slots.narrow(4, first, end - first).unbind(1)
                pairs = ((keys, values) for keys, values in both)
                views.update(zip(part.layers, pairs, strict=True))
        return views

    def pairs_between(self, first: int, end: int, num_slots: int) -> Mapping[int, torch.Tensor]:
        """Return the same of each layer as one view, [2, kv_heads, n, head_dim]."""
        views = dict[int, torch.Tensor]()
        for part in self._parts:
            if part.num_slots == num_slots:
                both = part.slots[:, :, 0].narrow(3, first, end - first).unbind(1)
                views.update(zip(part.layers, both, strict=True))
        return views

    @property
    def row_layout(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """Type, sizes and axis of the tokens of each tensor of `saved`."""
        shapes = (part.slots.shape for part in self._whole_parts)
        dtypes = (str(part.slots.dtype) for part in self._whole_parts)
        return tuple((dtype, (*s[:4], *s[5:]), 4) for dtype, s in zip(dtypes, shapes, strict=True))

    def saved(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return copies on the host of some positions of the layers that hold every position."""
        return tuple(put_by(part.slots[:, :, :, :, start:end]) for part in self._whole_parts)

    def restore(self, start: int, rows: Sequence[torch.Tensor]) -> None:
        """Put positions back, from `start` on."""
        for part, copied in zip(self._whole_parts, rows, strict=True):
            place = slice(start, start + copied.shape[4])
            part.slots[:, :, :, :, place].copy_(copied, non_blocking=True)

    def copied(self, start: int, end: int) -> list[torch.Tensor]:
        """Return copies on the device of some positions of all layers, for `put_back`."""
        places = indices(range(start, end), self._device)
        return [part.slots.index_select(4, places % part.num_slots) for part in self._parts]

    def put_back(self, start: int, end: int, copies: Sequence[torch.Tensor]) -> None:
        """Write what was copied to its positions."""
        places = indices(range(start, end), self._device)
        for part, rows in zip(self._parts, copies, strict=True):
            part.slots.index_copy_(4, places % part.num_slots, rows)

    @property
    def _whole_parts(self) -> tuple[_Part, ...]:
        return tuple(part for part in self._parts if part.num_slots == self.num_slots)

    def zero_beyond(self, length: int) -> None:
        """Zero the slots beyond the end of a text, but for those of rings."""
        for part in self._whole_parts:
            part.slots[:, :, :, :, length:].zero_()

    def compact(self, base: int, path: Sequence[int]) -> None:
        """Move the positions base + path[i] to base + i."""
        places = indices([base + offset for offset in path], self._device)
        kept = indices(range(base, base + len(path)), self._device)
        for part in self._parts:
            rows = part.slots.index_select(4, places % part.num_slots)
            part.slots.index_copy_(4, kept % part.num_slots, rows)

    def write(
        self, layer: int, start: int, end: int, keys_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put n = end - start rows, [n, 2 * kv_heads, head_dim], keys first, into their slots, none
        where there are no heads; returns all keys and values up to `end`, or of a whole ring,
        [1, kv_heads, m, head_dim] each."""
        pairs, (keys, values) = self._pairs[layer], self.slots[layer]
        num_slots = pairs.shape[2]
        if keys_values.shape[1]:
            rows = keys_values.view(end - start, 2, pairs.shape[1], pairs.shape[3])
            rows = rows.permute(1, 2, 0, 3)
            for slots, places in stretches(start, end, num_slots):
                pairs[:, :, slots].copy_(rows[:, :, places])
        shown = min(end, num_slots)
        return keys[:, :, :shown], values[:, :, :shown]
