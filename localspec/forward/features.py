"""Hidden states of chosen layers for every cached position, for drafters that read the target.

Contract: `Features` belongs to a KV cache: a forward writes the rows of the tokens it appends,
`keep` compacts both alike, and rows beyond a rollback are overwritten before they are read again.
Row i of a layer belongs to cached token i. Layer i is the residual after block i; LAST is what the
head reads, normalised. Only layers that were asked for are held.

Not here: running the layers (decoder, model), what is made of the rows (drafters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from localspec.forward.upload import indices, put_by

LAST = -1


class Features:
    """[capacity, d] for each layer that is followed."""

    def __init__(
        self, capacity: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (capacity, hidden_size)
        self._dtype = dtype
        self._device = device
        self._slots = dict[int, torch.Tensor]()
        self._of_all_rows = set[int]()

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._slots)

    @property
    def of_all_rows(self) -> frozenset[int]:
        """The layers that are wanted of every token; the others are wanted of the last token of a
        forward alone."""
        return frozenset(self._of_all_rows)

    def follow(self, layers: Sequence[int], of_last_row: bool = False) -> None:
        """Hold these layers as well from now on. of_last_row: of the last token of each forward,
        which is all that is promised then."""
        if not of_last_row:
            self._of_all_rows.update(layers)
        for layer in layers:
            if layer not in self._slots:
                empty = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
                self._slots[layer] = empty

    def rows(self, layer: int, start: int, end: int) -> torch.Tensor:
        """The rows of cached tokens start to end, [end - start, d], a view: read before the next
        forward. KeyError for a layer that is not followed."""
        return self._slots[layer][start:end]

    def write(self, end: int, rows: Mapping[int, torch.Tensor]) -> None:
        """rows: layer -> [n, d] of the last tokens before `end`, at least for all followed
        layers."""
        for layer, slots in self._slots.items():
            slots[end - rows[layer].shape[0] : end].copy_(rows[layer])

    def slots(self, layer: int) -> torch.Tensor:
        """All rows of a layer, [capacity, d]; a captured forward writes them in place."""
        return self._slots[layer]

    @property
    def row_layout(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """Type, sizes and axis of the tokens of each tensor of `saved`."""
        return ((str(self._dtype), (self._shape[1],), 0),) * len(self._slots)

    def saved(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return copies on the host of the rows of some tokens, of each layer."""
        return tuple(put_by(slots[start:end]) for slots in self._slots.values())

    def restore(self, start: int, rows: Sequence[torch.Tensor]) -> None:
        """Put rows back, from token `start` on."""
        for slots, copied in zip(self._slots.values(), rows, strict=True):
            slots[start : start + copied.shape[0]].copy_(copied, non_blocking=True)

    def compact(self, base: int, path: Sequence[int]) -> None:
        """Move rows base + path[i] to base + i, as KVCache.keep does."""
        places = indices([base + offset for offset in path], self._device)
        for slots in self._slots.values():
            slots[base : base + len(path)] = slots.index_select(0, places)
