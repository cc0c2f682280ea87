"""Hidden states of chosen layers for every cached position, for drafters that read the target.

Contract: `Features` belongs to a KV cache and follows it: a forward writes the rows of the tokens
it appends, `keep` compacts both alike, and what a rollback forgets is written anew before it counts
again. Row i of a layer belongs to cached token i. Layer i is the residual after block i; LAST is
what the head reads, normalised. Only layers that somebody asked for are held.

Not here: running the layers (decoder, model), what is made of the rows (drafters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

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

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._slots)

    @property
    def hidden_size(self) -> int:
        return self._shape[1]

    @property
    def held_bytes(self) -> int:
        return sum(slots.numel() * slots.element_size() for slots in self._slots.values())

    def follow(self, layers: Sequence[int]) -> None:
        """Hold these layers as well from now on. Ask before the first forward: positions that are
        cached already have no rows."""
        for layer in layers:
            if layer not in self._slots:
                empty = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
                self._slots[layer] = empty

    def rows(self, layer: int, start: int, end: int) -> torch.Tensor:
        """The rows of cached tokens start to end, [end - start, d], a view: read before the next
        forward. KeyError for a layer that is not followed."""
        return self._slots[layer][start:end]

    def write(self, start: int, rows: Mapping[int, torch.Tensor]) -> None:
        """rows: layer -> [n, d] of the tokens from `start` on, all that are followed among them."""
        for layer, slots in self._slots.items():
            slots[start : start + rows[layer].shape[0]].copy_(rows[layer])

    def slots(self, layer: int) -> torch.Tensor:
        """All rows of a layer, [capacity, d], to be written in place by a captured forward."""
        return self._slots[layer]

    def compact(self, base: int, path: Sequence[int]) -> None:
        """Bring rows base + path[i] to base + i; as KVCache.keep."""
        index = torch.tensor([base + offset for offset in path], device=self._device)
        for slots in self._slots.values():
            slots[base : base + len(path)] = slots.index_select(0, index)
