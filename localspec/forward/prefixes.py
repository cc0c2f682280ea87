"""What caches have read of texts, kept by the tokens so that no text is read twice.

The keys and values of a text, and the hidden states kept beside them, are kept in blocks of BLOCK
tokens and a rest; the copies of `snapshots` beside them. Each entry is named by a digest over all
tokens before it, and over what computed it, so texts that share a beginning share its blocks.

Bits are copied as they are: a text that goes on from an entry reads as if all of it had been read
afresh.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from localspec.core.prefix import common_prefix_length
from localspec.forward.prefix_store import Key, Kind, Piece, PrefixStore
from localspec.forward.snapshots import Memory, Saved, Snapshot

BLOCK = 256  # Tokens of a block. A smaller one makes more files, a larger one longer rests.
LEAST_REST = 16  # Tokens of a rest that are kept: fewer are read in one forward.
# Copies of states and windows on the disk for each chat: of two turns and their prompts. They may
# take hundreds of MiB each.
MOST_COPIES_OF_CHAT = 4
DIGEST_BYTES = 16
ROWS: Kind = "rows"
COPIES: Kind = "copies"


class Kept(Protocol):
    """What the store asks of a cache."""

    tokens: list[int]
    device: torch.device
    memories: tuple[Memory, ...]

    @property
    def num_savable(self) -> int:
        """Tokens whose rows a later text may go on from."""
        ...

    @property
    def row_layout(self) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """Type, sizes and axis of the tokens of each tensor that `saved_rows` returns."""
        ...

    @property
    def layout_name(self) -> str:
        """All of a cache that its numbers depend on."""
        ...

    def saved_rows(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return copies on the host of what is kept of the tokens from `start` to `end`."""
        ...

    def restore_rows(self, start: int, rows: Sequence[torch.Tensor]) -> None:
        """Put such rows back, from `start` on."""
        ...

    def saved_copies(self) -> list[Snapshot]:
        """Return the snapshots along the text, shortest first."""
        ...


@dataclass(frozen=True)
class Place:
    """An entry that a text can use, `num_tokens` of it, from position `start` on."""

    key: Key
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Prefixes:
    """The entries of one model, as its caches find and leave them."""

    def __init__(self, store: PrefixStore, identity: str) -> None:
        """identity: all that the numbers of the model depend on."""
        self.store = store
        self._identity = identity

    # finding

    def rows(self, cache: Kept, tokens: Sequence[int]) -> list[Place]:
        """Return the entries that hold the rows of the longest prefix of a text, in order."""
        found, parent = list[Place](), self._root(cache)
        for start in range(0, len(tokens), BLOCK):
            block = tuple(tokens[start : start + BLOCK])
            key = Key(ROWS, parent, _digest(parent, block))
            if len(block) < BLOCK or key not in self.store:
                longest = self._longest_after(parent, block)
                return found if longest is None else [*found, Place(longest[0], start, longest[1])]
            found.append(Place(key, start, BLOCK))
            parent = key.digest
        return found

    def num_kept(self, cache: Kept, tokens: Sequence[int]) -> int:
        """Return the length of the longest prefix of a text that a cache can go on from."""
        known = max(common_prefix_length(cache.tokens, tokens), _end(self.rows(cache, tokens)))
        copies = self.copies(cache, tokens[:known]) if cache.memories else None
        return copies.end if copies else 0 if cache.memories else known

    def _longest_after(self, parent: bytes, block: tuple[int, ...]) -> tuple[Key, int] | None:
        """Return the entry that shares most with a block, and how many tokens."""
        keys = self.store.after(ROWS, parent)
        shared = {key: common_prefix_length(self.store.tokens_of(key), block) for key in keys}
        best = max(shared, key=lambda key: shared[key], default=None)
        return None if best is None or not shared[best] else (best, shared[best])

    def copies(self, cache: Kept, tokens: Sequence[int]) -> Place | None:
        """Return the entry that brings the memories of a model to the longest prefix of a text."""
        best: Place | None = None
        for start, parent in self._nodes(cache, tokens):
            tail = tuple(tokens[start : start + 2 * BLOCK])
            for key in self.store.after(COPIES, parent):
                shared = common_prefix_length(self.store.tokens_of(key), tail)
                least = self.store.details_of(key).get("least")
                if not isinstance(least, int) or shared < least:
                    continue
                if best is None or start + shared > best.end:
                    best = Place(key, start, shared)
        return best if best is not None and best.end else None

    def _nodes(self, cache: Kept, tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the starts of the blocks of a text, and the digests of the text before them."""
        parent = self._root(cache)
        for start in range(0, len(tokens) + 1, BLOCK):
            yield start, parent
            parent = _digest(parent, tokens[start : start + BLOCK])

    def _root(self, cache: Kept) -> bytes:
        """Return the digest of the empty text: of all that the rows of a cache depend on."""
        return _hashed(f"{self._identity}\n{BLOCK}\n{cache.layout_name}".encode())

    # keeping

    def save(self, cache: Kept, owner: int | None = None) -> Iterator[str]:
        """Keep what a cache holds, one entry a step; yields a phrase after each. owner: the logged
        chat whose text it is, None for a text that may not be written."""
        text = cache.tokens[: cache.num_savable]
        used = list[Key]()
        for key, start, end in self._row_keys(cache, text, on_disk=owner is not None):
            used.append(key)
            if key in self.store and (owner is None or self.store.is_on_disk(key)):
                continue
            found = self.store.get(key)
            piece = (
                found[0] if found else Piece(tuple(text[start:end]), cache.saved_rows(start, end))
            )
            self._delete_shorter(key, piece.tokens)
            is_held = self.store.add(key, piece, used[:-1])
            if owner is not None:
                _wait_for(cache)
                is_held = self.store.write(key, piece, owner, used[:-1])
            if not is_held:
                break  # nothing behind it would be of use
            yield "keeping what was read"
        self._count_as_used(used, owner)
        yield from self._save_copies(cache, text, owner, used)

    def _count_as_used(self, keys: Sequence[Key], owner: int | None) -> None:
        self.store.touch(keys)
        files = self.store.files
        if owner is not None and files is not None:
            names = [key.file_name for key in keys if key.file_name in files]
            files.own(owner, names)
            files.touch(names)

    def _row_keys(
        self, cache: Kept, text: Sequence[int], on_disk: bool
    ) -> Iterator[tuple[Key, int, int]]:
        """Yield the entries for the rows of a text, with the tokens from where to where."""
        for start, parent in self._nodes(cache, text):
            end = min(start + BLOCK, len(text))
            if end - start < (LEAST_REST if start else 1):
                return
            rest = tuple(text[start:end])
            key = Key(ROWS, parent, _digest(parent, rest))
            if end - start < BLOCK and self._has_longer(key, rest, on_disk):
                return
            yield key, start, end

    def _has_longer(self, key: Key, rest: tuple[int, ...], on_disk: bool) -> bool:
        """Return whether another entry holds a rest and more."""
        others = self.store.after(ROWS, key.parent) - {key}
        return any(
            self.store.tokens_of(other)[: len(rest)] == rest
            for other in others
            if not on_disk or self.store.is_on_disk(other)
        )

    def _delete_shorter(self, key: Key, tokens: tuple[int, ...]) -> None:
        """Delete the rests that an entry begins with."""
        for other in self.store.after(ROWS, key.parent) - {key}:
            shorter = self.store.tokens_of(other)
            if len(shorter) < len(tokens) and tokens[: len(shorter)] == shorter:
                self.store.delete(other)

    def _save_copies(
        self, cache: Kept, text: Sequence[int], owner: int | None, used: Sequence[Key]
    ) -> Iterator[str]:
        """Keep the snapshots along a text; on the disk the shortest one and the last two. used: the
        entries of the rows."""
        snapshots = [each for each in cache.saved_copies() if len(each.tokens) <= len(text)]
        on_disk = {id(each) for each in (*snapshots[:1], *snapshots[-2:])}
        for snapshot in snapshots:
            key, piece = self._copy_of(cache, snapshot)
            if not self.store.is_held(key):
                self.store.add(key, piece)
            if owner is not None and id(snapshot) in on_disk and not self.store.is_on_disk(key):
                _wait_for(cache)
                if self.store.write(key, piece, owner, used):
                    self._limit_copies(owner)
                yield "keeping what was read"

    def _limit_copies(self, owner: int) -> None:
        files = self.store.files
        if files is not None:
            for name in files.names_of(owner, COPIES)[:-MOST_COPIES_OF_CHAT]:
                files.delete(name)

    def _copy_of(self, cache: Kept, snapshot: Snapshot) -> tuple[Key, Piece]:
        earliest = max(saved.length for saved in snapshot.copies)
        start = earliest - earliest % BLOCK
        parent = next(node for at, node in self._nodes(cache, snapshot.tokens) if at == start)
        tokens = snapshot.tokens[start:]
        details = {
            "least": earliest - start,
            "copies": [
                [saved.length, saved.num_pending, len(saved.parts)] for saved in snapshot.copies
            ],
        }
        tensors = tuple(chain.from_iterable(saved.parts for saved in snapshot.copies))
        return Key(COPIES, parent, _digest(parent, tokens)), Piece(tokens, tensors, details)

    # bringing back

    def put_rows(self, cache: Kept, places: Sequence[Place], end: int) -> tuple[int, int]:
        """Put rows into a cache up to `end`; returns up to where they are there, and how many come
        from the disk."""
        reached, num_from_disk, used = 0, 0, list[Key]()
        for place in places:
            found = self._fitting(cache, place.key) if place.start < end else None
            if found is None:
                break
            piece, is_from_disk = found
            count = min(place.num_tokens, end - place.start)
            parts = zip(piece.tensors, cache.row_layout, strict=True)
            rows = [tensor.narrow(axis, 0, count) for tensor, (_, _, axis) in parts]
            cache.restore_rows(place.start, rows)
            reached = place.start + count
            num_from_disk += count if is_from_disk else 0
            used.append(place.key)
        self.store.touch(used)
        if self.store.files is not None:
            self.store.files.touch([key.file_name for key in used])
        return reached, num_from_disk

    def _fitting(self, cache: Kept, key: Key) -> tuple[Piece, bool] | None:
        """Return the entry of some rows, and whether it comes from the disk; None where it does
        not fit the cache."""
        found = self.store.get(key)
        if found is None:
            return None
        shapes = tuple((str(each.dtype), tuple(each.shape)) for each in found[0].tensors)
        if shapes == _shapes(cache.row_layout, len(found[0].tokens)):
            return found
        self.reject(key)
        return None

    def put_copies(self, memories: Sequence[Memory], key: Key) -> list[Saved] | None:
        """Bring memories to the copies of an entry, and return these; None, with all memories at
        the start of a text, where they do not fit."""
        found = self.store.get(key)
        try:
            copies, parts = list[Saved](), iter(found[0].tensors if found else ())
            for length, num_pending, count in found[0].details["copies"] if found else ():
                tensors = tuple(next(parts) for _ in range(count))
                copies.append(Saved(int(length), int(num_pending), tensors))
            for memory, saved in zip(memories, copies, strict=True):
                memory.restore(saved)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError, StopIteration):
            self.reject(key)
            for memory in memories:
                memory.clear()
            return None
        return copies

    def reject(self, key: Key) -> None:
        """Delete an entry that does not fit."""
        self.store.drop(key)
        if self.store.files is not None:
            self.store.files.reject(key.file_name, "its numbers do not fit the model")


def _end(places: Sequence[Place]) -> int:
    return places[-1].end if places else 0


def _shapes(
    layout: Sequence[tuple[str, tuple[int, ...], int]], count: int
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the types and sizes of the tensors of so many tokens."""
    return tuple((dtype, (*sizes[:axis], count, *sizes[axis:])) for dtype, sizes, axis in layout)


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    return _hashed(parent + array("q", tokens).tobytes())


def _hashed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _wait_for(cache: Kept) -> None:
    """Wait until the copies that a GPU makes are there. Nobody else waits meanwhile."""
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
