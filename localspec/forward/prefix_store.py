"""Entries of what models have read, in host memory up to a budget, and of logged chats on the disk.

An entry is named by digests of tokens (`Key`). What leaves the memory is still on the disk, or is
gone. `prefixes` says which entries a text has.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch

from localspec.formats.prefix_files import PrefixFiles

DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16)}

Kind = Literal["rows", "copies"]


@dataclass(frozen=True)
class Key:
    """The name of an entry. parent: of the text before it. digest: of the text up to its end."""

    kind: Kind
    parent: bytes
    digest: bytes

    @cached_property
    def file_name(self) -> str:
        return f"{self.kind}-{self.parent.hex()}-{self.digest.hex()}.prefix"


@dataclass(frozen=True)
class Piece:
    """An entry in memory. details: what a reader needs to know beside the tensors."""

    tokens: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors) + 8 * len(self.tokens)


class PrefixStore:
    """Entries of all models of one process. One thread calls it. most_bytes: of host memory.
    files: those of logged chats; None where nothing is read or written."""

    def __init__(self, most_bytes: int, files: PrefixFiles | None = None) -> None:
        self.most_bytes = most_bytes
        self.files = files
        self.nbytes = 0
        if files is not None:
            files.sweep()
        self._pieces = OrderedDict[Key, Piece]()  # the last used ones at the end
        self._children = defaultdict[tuple[Kind, bytes], set[Key]](set)

    def __contains__(self, key: Key) -> bool:
        return key in self._pieces or self.is_on_disk(key)

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for a person about files that could not be read or written."""
        return () if self.files is None else self.files.notices

    def forget(self, chat: int) -> None:
        """Delete the files of a chat alone. Any thread may call it."""
        if self.files is not None:
            self.files.forget(chat)

    def welcome(self, chat: int) -> None:
        """Let a chat have files that may have been deleted before."""
        if self.files is not None:
            self.files.welcome(chat)

    def is_on_disk(self, key: Key) -> bool:
        return self.files is not None and key.file_name in self.files

    def after(self, kind: Kind, parent: bytes) -> set[Key]:
        """Return the entries of a kind after a text."""
        found = set(self._children.get((kind, parent), ()))
        if self.files is not None:
            names = self.files.children(kind, parent.hex())
            found.update(Key(kind, parent, bytes.fromhex(name[-39:-7])) for name in names)
        return found

    def tokens_of(self, key: Key) -> tuple[int, ...]:
        """Return the tokens of an entry; none where it cannot be read."""
        if key in self._pieces:
            return self._pieces[key].tokens
        entry = None if self.files is None else self.files.entry(key.file_name)
        return () if entry is None else entry.tokens

    def details_of(self, key: Key) -> Mapping[str, Any]:
        if key in self._pieces:
            return self._pieces[key].details
        entry = None if self.files is None else self.files.entry(key.file_name)
        return {} if entry is None else entry.details

    def is_held(self, key: Key) -> bool:
        """Return whether an entry is in memory."""
        return key in self._pieces

    def add(self, key: Key, piece: Piece, before: Sequence[Key] = ()) -> bool:
        """Hold an entry, letting go of those that were not used for longest; return whether it is
        held then. before: the entries of the same text that it follows, in order."""
        if key not in self._pieces:
            self._pieces[key] = piece
            self._children[key.kind, key.parent].add(key)
            self.nbytes += piece.nbytes
        self.touch([*before, key])
        while self.nbytes > self.most_bytes:
            self.drop(next(iter(self._pieces)))
        return key in self._pieces

    def touch(self, keys: Sequence[Key]) -> None:
        """Count entries of one text, in order, as used now: the last ones leave first, since a text
        is of use up to its first gap."""
        for key in reversed(keys):
            if key in self._pieces:
                self._pieces.move_to_end(key)

    def drop(self, key: Key) -> None:
        """Let go of an entry in memory."""
        piece = self._pieces.pop(key, None)
        if piece is not None:
            self.nbytes -= piece.nbytes
            children = self._children[key.kind, key.parent]
            children.discard(key)
            if not children:
                del self._children[key.kind, key.parent]

    def delete(self, key: Key) -> None:
        """Let go of an entry everywhere."""
        self.drop(key)
        if self.files is not None:
            self.files.delete(key.file_name)

    def get(self, key: Key) -> tuple[Piece, bool] | None:
        """Return an entry, and whether it comes from the disk; None where it cannot be read."""
        if key in self._pieces:
            return self._pieces[key], False
        found = None if self.files is None else self.files.read(key.file_name)
        if found is None or self.files is None:
            return None
        entry, numbers = found
        try:
            return Piece(entry.tokens, _tensors(entry.details, numbers), entry.details), True
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self.files.reject(key.file_name, f"its tensors cannot be read: {error}")
            return None

    def write(self, key: Key, piece: Piece, owner: int, before: Sequence[Key] = ()) -> bool:
        """Write an entry for a chat, and return whether it is there. before: see `add`."""
        if self.files is None:
            return False
        if self.is_on_disk(key):
            self.files.own(owner, [key.file_name])
            return True
        shapes = [[str(tensor.dtype), list(tensor.shape)] for tensor in piece.tensors]
        details = {**piece.details, "tensors": shapes}
        numbers = [_bytes_of(tensor) for tensor in piece.tensors]
        names = {each.file_name for each in before}
        return self.files.write(key.file_name, piece.tokens, details, numbers, owner, names)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    flat: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(flat)


def _tensors(details: Mapping[str, Any], numbers: bytearray) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a file. Raise KeyError, TypeError, ValueError for others."""
    tensors, start = list[torch.Tensor](), 0
    for name, sizes in details["tensors"]:
        dtype, count = DTYPES[name], prod(sizes)
        if any(type(size) is not int or size < 0 for size in sizes):
            raise ValueError("a size is no number")
        end = start + count * dtype.itemsize
        if end > len(numbers):
            raise ValueError("it has fewer numbers than its header says")
        flat = torch.frombuffer(numbers, dtype=dtype, count=count, offset=start) if count else None
        tensors.append(torch.empty(sizes, dtype=dtype) if flat is None else flat.view(*sizes))
        start = end
    if start != len(numbers):
        raise ValueError("it has more numbers than its header says")
    return tuple(tensors)
