"""Files that keep what a model has read of logged chats, so that it is not read again.

A file holds one entry: numbers as the cache holds them, and a header that says of which tokens.
Entries form chains: the name of a file begins with its kind and the digest of the text before it,
so that a folder is an index. A list for each chat names its files; a file that no list names is
deleted. Nothing in a file is ever run, and every byte that is used is checked. A file that is
damaged, or that somebody else has put there, is left out with one notice.
"""

from __future__ import annotations

import json
import os
import re
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from localspec.core.files import parsed, replacing, write_private

FOLDER = "prefixes"  # The name of the folder beside the log.
MAGIC = b"localspec prefix 1\n"  # The first bytes of a file. The number is that of the format.
LENGTHS = struct.Struct("<II")  # Bytes of the header, and its checksum.
MOST_HEADER_BYTES = 16 * 2**20  # A header of a whole block has some thousand bytes.
NAME = re.compile(r"([a-z]+)-([0-9a-f]{32})-([0-9a-f]{32})\.prefix")
PART = re.compile(r"\..*\.(prefix|txt)\.part")  # What a killed process leaves.
# Bytes of the disk that the files may take where nobody has said otherwise.
USUAL_BYTES = 4 * 10**9

NOT_WRITTEN = (
    "What the model has read of this chat could not be kept on the disk ({reason}). Replies go on "
    "as usual; after a restart the chat is read again. Free some space, or choose less of it in "
    "the settings."
)
DAMAGED = (
    "A file that kept what the model had read of a chat is damaged ({reason}), so it was deleted "
    "and that text is read again."
)


@dataclass(frozen=True)
class Entry:
    """What a file says of itself. tokens: those that follow the text before it. details: of the
    numbers, as the writer needs them to read them again. num_bytes: of the numbers."""

    tokens: tuple[int, ...]
    details: Mapping[str, Any]
    num_bytes: int
    checksum: int
    start: int


class PrefixFiles:
    """The files of one folder. Any thread may call any method."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most_bytes: int | None = None  # of all files; None for no limit
        self._damage: str | None = None
        self._shortage: str | None = None
        self._lists = folder / "chats"
        self._lock = threading.RLock()
        self._entries = dict[str, Entry]()
        self._children: dict[tuple[str, str], set[str]] | None = None  # None until it is looked up
        self._forgotten = set[int]()

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences for a person about what could not be read, and what is not written now."""
        return tuple(each for each in (self._damage, self._shortage) if each is not None)

    # what is there

    def __contains__(self, name: str) -> bool:
        match = NAME.fullmatch(name)
        return match is not None and name in self.children(match[1], match[2])

    def children(self, kind: str, parent: str) -> Collection[str]:
        """Return the names of the entries of a kind after the text with this digest."""
        with self._lock:
            return tuple(self._index.get((kind, parent), ()))

    @property
    def _index(self) -> dict[tuple[str, str], set[str]]:
        if self._children is None:
            self._children = defaultdict(set)
            for path in self._paths():
                self._note(path.name)
        return self._children

    def _note(self, name: str) -> None:
        if (match := NAME.fullmatch(name)) and self._children is not None:
            self._children.setdefault((match[1], match[2]), set()).add(name)

    def _paths(self) -> list[Path]:
        """Return the files that are ours by name."""
        with suppress(OSError):
            return [path for path in self.folder.iterdir() if NAME.fullmatch(path.name)]
        return []

    def sweep(self) -> None:
        """Delete what a killed process left. Only while no other process writes."""
        for folder in (self.folder, self._lists):
            with suppress(OSError):
                for path in [*folder.iterdir()]:
                    if PART.fullmatch(path.name):
                        path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that all files take."""
        return sum(size for _, size, _ in self._sizes())

    def _sizes(self) -> list[tuple[int, int, Path]]:
        """Return when each file was used last, its bytes and its path, oldest first."""
        found = list[tuple[int, int, Path]]()
        for path in self._paths():
            with suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        return sorted(found)

    # reading

    def entry(self, name: str) -> Entry | None:
        """Return what a file says of itself; None where it cannot be used."""
        with self._lock:
            if name not in self._entries:
                try:
                    self._entries[name] = _entry(self.folder / name)
                except (OSError, ValueError) as error:
                    self._drop(name, error)
                    return None
            return self._entries[name]

    def read(self, name: str) -> tuple[Entry, bytearray] | None:
        """Return an entry with its numbers; None where they cannot be used."""
        entry = self.entry(name)
        if entry is None:
            return None
        try:
            numbers = bytearray(entry.num_bytes)
            with (self.folder / name).open("rb") as file:
                file.seek(entry.start)
                if file.readinto(numbers) != entry.num_bytes:
                    raise ValueError("it is cut off")
            if zlib.crc32(numbers) != entry.checksum:
                raise ValueError("its checksum does not fit")
        except (OSError, ValueError) as error:
            self._drop(name, error)
            return None
        return entry, numbers

    def touch(self, names: Sequence[str]) -> None:
        """Count entries of one text, in order, as used now: the last ones are deleted first."""
        first_ns = time.time_ns()
        for number, name in enumerate(reversed(names)):
            with suppress(OSError):  # a clock may tick more slowly than files are touched
                os.utime(self.folder / name, ns=(first_ns + number, first_ns + number))

    def reject(self, name: str, reason: str) -> None:
        """Delete an entry whose numbers do not fit the model."""
        self._drop(name, ValueError(reason))

    def _drop(self, name: str, error: OSError | ValueError) -> None:
        self.delete(name)
        if not isinstance(error, FileNotFoundError):
            self._damage = DAMAGED.format(reason=_words(error))

    # writing

    def write(
        self,
        name: str,
        tokens: Sequence[int],
        details: Mapping[str, Any],
        numbers: Sequence[memoryview],
        owner: int,
        before: Collection[str] = (),
    ) -> bool:
        """Write an entry for a chat, and return whether it is there. A chat that was deleted gets
        none. before: entries that it follows, which are not deleted to make room for it."""
        checksum = 0
        for values in numbers:
            checksum = zlib.crc32(values, checksum)
        num_bytes = sum(values.nbytes for values in numbers)
        about = {"tokens": list(tokens), "bytes": num_bytes, "checksum": checksum}
        header = json.dumps({**about, "details": dict(details)}).encode()
        lengths = LENGTHS.pack(len(header), zlib.crc32(header))
        try:
            self._make_folder()
            with self._lock:
                is_small = self._make_room(len(header) + num_bytes, before)
                if owner in self._forgotten or not is_small:
                    return False
                self._own(owner, [name])  # before the file: no file is ever without a list
            with replacing(self.folder / name) as part, _private(part) as file:
                file.write(MAGIC + lengths + header)
                file.writelines(numbers)
        except OSError as error:
            self._shortage = NOT_WRITTEN.format(reason=_words(error))
            return False
        return self._is_kept(name, owner)

    def _is_kept(self, name: str, owner: int) -> bool:
        """Return whether a file that was just written may stay."""
        with self._lock:
            self._note(name)
            self._shortage = None
            if owner not in self._forgotten or name in self._used():
                return True
            self.delete(name)  # its chat was deleted meanwhile
            return False

    def _make_folder(self) -> None:
        for folder in (self.folder, self._lists):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # whose they are

    def own(self, owner: int, names: Sequence[str]) -> None:
        """Note that a chat uses these entries."""
        with self._lock, suppress(OSError):
            if owner not in self._forgotten and self._lists.is_dir():
                self._own(owner, names)

    def _own(self, owner: int, names: Sequence[str]) -> None:
        path = self._lists / f"{owner}.txt"
        listed = _names(path)
        if not set(names) <= set(listed):
            kept = [name for name in listed if name in self]
            write_private(path, "".join(f"{name}\n" for name in dict.fromkeys([*kept, *names])))

    def welcome(self, owner: int) -> None:
        """Let a chat have entries again that was deleted and came back."""
        with self._lock:
            self._forgotten.discard(owner)

    def forget(self, owner: int) -> None:
        """Delete what no other chat uses of a chat's entries; it gets no further ones."""
        with self._lock:
            self._forgotten.add(owner)
            path = self._lists / f"{owner}.txt"
            names = _names(path)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            used = self._used()
            for name in names:
                if name not in used:
                    self.delete(name)

    def keep_only(self, owners: Collection[int]) -> None:
        """Forget every chat that is none of these, and delete entries that no chat uses. Only while
        no other process writes."""
        with self._lock:
            self.sweep()
            for path in self._list_paths():
                if not path.stem.isdecimal() or int(path.stem) not in owners:
                    path.unlink(missing_ok=True)
            used = self._used()
            for path in self._paths():
                if path.name not in used:
                    self.delete(path.name)

    def names_of(self, owner: int, kind: str) -> list[str]:
        """Return the entries of a kind that a chat uses, oldest first."""
        with self._lock:
            return [
                name
                for name in _names(self._lists / f"{owner}.txt")
                if name.startswith(f"{kind}-") and name in self
            ]

    def _used(self) -> set[str]:
        return {name for path in self._list_paths() for name in _names(path)}

    def _list_paths(self) -> Iterator[Path]:
        with suppress(OSError):
            yield from [*self._lists.iterdir()]

    # space

    def delete(self, name: str) -> None:
        """Delete one entry."""
        with self._lock:
            self._entries.pop(name, None)
            if match := NAME.fullmatch(name):
                self._index.get((match[1], match[2]), set()).discard(name)
                with suppress(OSError):
                    (self.folder / name).unlink(missing_ok=True)

    def shrink(self, most_bytes: int, spared: Collection[str] = ()) -> bool:
        """Delete the entries that were not used for longest, but for these, until the others fit;
        return whether they do."""
        with self._lock:
            sizes = self._sizes()
            excess = sum(size for _, size, _ in sizes) - most_bytes
            for _, size, path in sizes:
                if excess > 0 and path.name not in spared:
                    self.delete(path.name)
                    excess -= size
            return excess <= 0

    def _make_room(self, num_bytes: int, spared: Collection[str]) -> bool:
        if self.most_bytes is None:
            return True
        return self.shrink(self.most_bytes - num_bytes, spared)


@contextmanager
def _private(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that its owner alone can read."""
    path.unlink(missing_ok=True)  # what a killed process left
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file


def _entry(path: Path) -> Entry:
    """Return what a file says of itself. Raise OSError, ValueError."""
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + LENGTHS.size)
        if not start.startswith(MAGIC) or len(start) < len(MAGIC) + LENGTHS.size:
            raise ValueError("it does not begin as it should")
        size, checksum = LENGTHS.unpack(start[len(MAGIC) :])
        header = file.read(size) if size <= MOST_HEADER_BYTES else b""
        total = os.fstat(file.fileno()).st_size
    if len(header) != size or zlib.crc32(header) != checksum:
        raise ValueError("its header is damaged")
    said = parsed(header)
    try:
        tokens = tuple(int(token) for token in said["tokens"])
        entry = Entry(
            tokens,
            dict(said["details"]),
            int(said["bytes"]),
            int(said["checksum"]),
            len(start) + size,
        )
    except (KeyError, TypeError) as error:
        raise ValueError("its header lacks something") from error
    if entry.num_bytes < 0 or total != entry.start + entry.num_bytes:
        raise ValueError(f"it has {total} bytes, which its header does not fit")
    return entry


def _names(path: Path) -> list[str]:
    """Return the names in the list of a chat; what is none is left out."""
    with suppress(OSError, UnicodeDecodeError):
        return [line for line in path.read_text("utf-8").splitlines() if NAME.fullmatch(line)]
    return []


def _words(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return str(error)
