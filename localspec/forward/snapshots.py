"""Copies of what a model remembers at few lengths of a text only.

Keys and values of every position can be returned to at any length. A recurrent state and a ring of
slots stand at the end of the text, and reach back a few tokens: each is a `Memory`. `Snapshots`
holds copies of them at earlier lengths, on the host. `KVCache` goes back to the nearest one and
reads on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from localspec.core.prefix import common_prefix_length
from localspec.formats.attention import MOST_SNAPSHOT_BYTES, MOST_SNAPSHOTS


@dataclass(frozen=True)
class Saved:
    """A copy of a memory, on the host, from which it can go to `length` and to every length of the
    `num_pending` tokens after it."""

    length: int
    num_pending: int
    parts: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Memory(Protocol):
    """What exists at few lengths of a text."""

    @property
    def nbytes(self) -> int: ...

    @property
    def reach(self) -> range:
        """The lengths that can be gone to without a snapshot."""
        ...

    @property
    def most_rows(self) -> int:
        """Rows of one forward that can all be taken back."""
        ...

    def clear(self) -> None:
        """Go to the start of a text."""
        ...

    def saved(self, length: int) -> Saved:
        """Return a copy for `length`, which is in `reach`."""
        ...

    def restore(self, saved: Saved) -> None:
        """Go back to what was saved."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """A copy of each memory after these tokens of a text."""

    tokens: tuple[int, ...]
    copies: tuple[Saved, ...]

    @property
    def nbytes(self) -> int:
        return sum(saved.nbytes for saved in self.copies)

    def longest(self, text: Sequence[int]) -> int | None:
        """Return the length of the longest prefix of a text that all memories can go to."""
        length = common_prefix_length(self.tokens, tuple(text))
        return length if length >= max(saved.length for saved in self.copies) else None


class Snapshots:
    """Copies of memories by the tokens before them, the last used ones."""

    def __init__(self) -> None:
        self._held = list[Snapshot]()

    @property
    def nbytes(self) -> int:
        return sum(snapshot.nbytes for snapshot in self._held)

    def add(self, tokens: Sequence[int], copies: Sequence[Saved]) -> None:
        """Hold copies; let go of the oldest beyond the bounds, never of these."""
        key = tuple(tokens)
        self._held = [snapshot for snapshot in self._held if snapshot.tokens != key]
        self._held = [*self._held, Snapshot(key, tuple(copies))][-MOST_SNAPSHOTS:]
        while len(self._held) > 1 and self.nbytes > MOST_SNAPSHOT_BYTES:
            del self._held[0]

    def along(self, text: Sequence[int]) -> list[Snapshot]:
        """Return the snapshots after a prefix of a text, shortest first."""
        held = (each for each in self._held if each.longest(text) == len(each.tokens))
        return sorted(held, key=lambda each: len(each.tokens))

    def longest(self, text: Sequence[int]) -> int:
        """Return the length of the longest prefix of `text` that a snapshot can go to, or 0."""
        return max((snapshot.longest(text) or 0 for snapshot in self._held), default=0)

    def at(self, tokens: Sequence[int]) -> tuple[Saved, ...] | None:
        """Return what goes to exactly these tokens, and count it as used."""
        for snapshot in reversed(self._held):
            if snapshot.longest(tokens) == len(tokens):
                others = (other for other in self._held if other is not snapshot)
                self._held = [*others, snapshot]
                return snapshot.copies
        return None
