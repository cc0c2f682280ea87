"""The masks of attention on a processor (row_attention): what each row sees of the slots.

Only the slots that are new or at the edge of a window differ between the rows of a forward. So the
parts of a forward share one buffer, and each writes there what is its own. A mask for each part of
a long prompt would be larger than the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SeenSlots:
    """What rows see of the slots between `first` and `end`.

    All rows see the slots up to `common`. mask: of the slots from there on, added to the scores,
    [n, end - common]."""

    first: int
    common: int
    end: int
    mask: torch.Tensor


class PartMasks:
    """The masks of the parts of one forward, in one buffer [most rows, most slots]."""

    def __init__(self, parts: Sequence[SeenSlots], kv_heads: int) -> None:
        most_rows = max(part.mask.shape[0] for part in parts)
        most_slots = max(part.end - part.first for part in parts)
        self._buffer = parts[0].mask.new_zeros(most_rows, most_slots)
        self._kv_heads = kv_heads
        self._written: SeenSlots | None = None
        self._mask = self._buffer

    def mask_of(self, part: SeenSlots) -> torch.Tensor:
        """Return the mask of a part as `fused_attention` takes it. It holds until the next call."""
        if self._written is not part:
            mask = self._buffer[: part.mask.shape[0], : part.end - part.first]
            mask[:, part.common - part.first :] = part.mask
            self._written, self._mask = part, mask_of_heads(mask, self._kv_heads)
        return self._mask


def hidden_slots(
    positions: torch.Tensor, slots: torch.Tensor, num_slots: int, window: int | None
) -> torch.Tensor:
    """Return True where a row at a position does not see what a slot holds, [n, m].

    num_slots: of the layer; a position stands in its remainder by them. window: how many positions
    up to its own a row sees, None for all."""
    own = positions[:, None]
    distance = (own - slots) % num_slots  # to the position in a slot
    hidden = distance > own
    return hidden if window is None else hidden | (distance >= window)


def spread(kv_heads: int) -> int:
    """Return the parts of a key head's rows that the kernel takes as key heads of their own: with a
    single one it would leave its threads to the library's products, whose sums then change."""
    return 2 if kv_heads == 1 else 1


def mask_of_heads(mask: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return a mask [n, m] in the shape that the kernel takes for so many key heads."""
    parts = spread(kv_heads)
    return mask.view(1, parts, mask.shape[0] // parts, mask.shape[1])
