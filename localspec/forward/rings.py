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

    def saved(self, first: int, end: int) -> torch.Tensor:
        """Return a copy of some positions on the host, [2, layers, 1, kv_heads, n, head_dim]. Layer
        by layer, so that a GPU holds little of it twice."""
        size = (*self.slots.shape[:4], end - first, self.slots.shape[5])
        copied = torch.empty(size, dtype=self.slots.dtype, device="cpu")
        for layer in range(size[1]):
            for slots, rows in stretches(first, end, self.num_slots):
                copied[:, layer, ..., rows, :] = self.slots[:, layer, ..., slots, :]
        return copied

    def restore(self, copied: torch.Tensor, end: int) -> None:
        """Put positions back that end at `end`."""
        self.first = end - copied.shape[4]
        for layer in range(copied.shape[1]):
            for slots, rows in stretches(self.first, end, self.num_slots):
                self.slots[:, layer, ..., slots, :] = copied[:, layer, ..., rows, :]

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
        parts = [ring.saved(max(0, first - ring.window + 1), length) for ring in self._rings]
        return Saved(first, length - first, tuple(parts))

    def restore(self, saved: Saved) -> None:
        """Go back to what was saved."""
        self._end = saved.length + saved.num_pending
        for ring, copied in zip(self._rings, saved.parts, strict=True):
            ring.restore(copied, self._end)

    def zero_beyond(self, length: int) -> None:
        """Zero the slots that hold no position of a text of this length."""
        for ring in self._rings:
            ring.zero_beyond(length, self._end)
