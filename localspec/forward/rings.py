"""Keys and values of layers that see a window alone, in rings of slots.

Position p of a layer stands in slot p modulo its number of slots. A layer without a window has a
slot for every position of the context, so that each position has its own. A ring has fewer slots
than the context has positions: the window's and some to spare, so that a text can go back a little
way. A row at position p sees the window up to p, which stands as long as no later row has been
written over it: `Rings.reach` says from which length on that is so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from localspec.formats.attention import NUM_PENDING
from localspec.forward.snapshots import Saved
from localspec.forward.upload import put_by


def stretches(first: int, end: int, num_slots: int) -> Iterator[tuple[slice, slice]]:
    """Yield the slots of the positions from `first` to `end`, and which of these positions stand
    there: unbroken stretches, in order."""
    place = first
    while place < end:
        slot = place % num_slots
        size = min(end - place, num_slots - slot)
        yield slice(slot, slot + size), slice(place - first, place - first + size)
        place += size


@dataclass(eq=False)
class Ring:
    """Layers that see `window` positions up to their own. slots: of their keys and values, written
    to, [2, layers, 1, kv_heads, num_slots, head_dim]. first: the first position that was put back
    into them, 0 where none was."""

    slots: torch.Tensor
    window: int
    first: int = 0

    @property
    def num_slots(self) -> int:
        return self.slots.shape[4]

    def oldest(self, end: int) -> int:
        """Return the first position that stands where those up to `end` may have been written."""
        return max(self.first, end - self.num_slots)

    def shortest(self, end: int) -> int:
        """Return the shortest length whose window stands; from there on each does."""
        oldest = self.oldest(end)
        return oldest + self.window - 1 if oldest else 0

    def saved(self, first: int, end: int) -> list[torch.Tensor]:
        """Return copies of some positions on the host, [2, 1, kv_heads, n, head_dim] of each layer.
        Layer by layer, so that a GPU holds little of it twice."""
        places = [slots for slots, _ in stretches(first, end, self.num_slots)]
        return [
            put_by(torch.cat([layer[..., slots, :] for slots in places], 3))
            for layer in self.slots.unbind(1)
        ]

    def restore(self, copies: Sequence[torch.Tensor], end: int) -> None:
        """Put positions back that end at `end`."""
        self.first = end - copies[0].shape[3]
        for layer, copied in zip(self.slots.unbind(1), copies, strict=True):
            brought = copied.to(layer.device, non_blocking=True)
            for slots, rows in stretches(self.first, end, self.num_slots):
                layer[..., slots, :] = brought[..., rows, :]

    def zero_beyond(self, length: int, end: int) -> None:
        """Zero the slots that hold no position of a text of this length."""
        oldest = self.oldest(end)
        for slots, _ in stretches(max(length, oldest), oldest + self.num_slots, self.num_slots):
            self.slots[:, :, :, :, slots].zero_()


class Rings:
    """All rings of one sequence: a `snapshots.Memory`."""

    def __init__(self, rings: Sequence[Ring]) -> None:
        self._rings = tuple(rings)
        self._end = 0  # of all positions that may have been written since some were put back

    @property
    def nbytes(self) -> int:
        return sum(ring.slots.nbytes for ring in self._rings)

    @property
    def reach(self) -> range:
        """The lengths that can be gone to without a snapshot."""
        return range(max(ring.shortest(self._end) for ring in self._rings), self._end + 1)

    @property
    def most_rows(self) -> int:
        """Rows of one forward that can all be taken back."""
        return min(ring.num_slots - ring.window for ring in self._rings)

    def claim(self, end: int) -> None:
        """Note that the positions up to `end` may be written from now on."""
        self._end = max(self._end, end)

    def clear(self) -> None:
        """Go to the start of a text."""
        self._end = 0
        for ring in self._rings:
            ring.first = 0

    def saved(self, length: int) -> Saved:
        """Return the windows at `length` and at a few lengths before it, as many as states have."""
        assert length in self.reach, "the windows at this length stand"
        first = max(self.reach.start, length - NUM_PENDING)
        parts = list[torch.Tensor]()
        for ring in self._rings:
            parts += ring.saved(max(0, first - ring.window + 1), length)
        return Saved(first, length - first, tuple(parts))

    def restore(self, saved: Saved) -> None:
        """Go back to what was saved."""
        self._end = saved.length + saved.num_pending
        parts = iter(saved.parts)
        for ring in self._rings:
            ring.restore([next(parts) for _ in range(ring.slots.shape[1])], self._end)

    def zero_beyond(self, length: int) -> None:
        """Zero the slots that hold no position of a text of this length."""
        for ring in self._rings:
            ring.zero_beyond(length, self._end)
