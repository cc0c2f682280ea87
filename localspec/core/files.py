"""Write a file whole or not at all, lock one, and read JSON that others wrote.

Contract: `replacing` gives a file beside the wanted one to be written; after the block it replaces
the old one in one step. Where the block raises, or the process is killed, the old file stays. A
link is followed; a device or a pipe is refused. `try_lock` holds a file against other processes
until it is closed or its process dies. `parsed` and `read_json` raise OSError and ValueError alone.

Not here: messages about what could not be written (the caller knows what it was).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# Bytes of the largest JSON file that is read: a tokenizer of a million tokens has some 50 MiB.
JSON_BYTES = 256 * 2**20
# Lists and objects inside each other in an answer of a server. Those in use have fewer than ten.
MOST_DEPTH = 64
STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
HELD = (errno.EACCES, errno.EAGAIN)  # how Windows and POSIX say that another process has the lock


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The file to write in the place of `path`, whose folder is made. Raises OSError."""
    path = place_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with part.open("rb+") as written:
            os.fsync(written.fileno())  # or a power cut could leave the new name with no content
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_private(path: Path, text: str) -> None:
    """Write a file in one step that its owner alone can read from the first moment. Raise OSError.
    On Windows modes have no effect."""
    with replacing(path) as part:
        part.unlink(missing_ok=True)  # what a killed process left
        part.touch(mode=0o600, exist_ok=False)
        part.write_text(text, encoding="utf-8")


def place_of(path: Path) -> Path:
    """The path with links followed. Raises OSError where something else than a file is there."""
    place = path.resolve()
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
    return place


def why_not_writable(path: Path) -> str | None:
    """Why this file cannot be written, or its folder not made, in the system's words; None where
    it can. For asking before minutes of work; leaves nothing behind."""
    try:
        path = place_of(path)
        folder = next(parent for parent in path.parents if parent.exists())
        probe = folder / f".{path.name}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def free_disk(path: Path) -> int | None:
    """Bytes free on the disk of a file or folder that need not be there yet; None where the system
    does not say."""
    place = next((each for each in (path, *path.parents) if each.exists()), path)
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def try_lock(file: IO[bytes]) -> bool:
    """Whether this process now has the file's lock. Where the file system knows no locks, it is
    taken as had."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in HELD
    return True


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_deep(content: bytes | bytearray) -> bool:
    """True if lists and objects lie more than MOST_DEPTH deep inside each other. Valid JSON or
    not, no text takes long."""
    if content.count(b"[") + content.count(b"{") <= MOST_DEPTH:
        return False
    depth = 0
    for mark in STRING_OR_BRACKET.finditer(content):
        depth += (mark[0] in (b"[", b"{")) - (mark[0] in (b"]", b"}"))
        if depth > MOST_DEPTH:
            return True
    return False


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a file. Raises OSError, also for a device or a pipe; ValueError, also for
    a file of more than `most_bytes`."""
    with place_of(path).open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content.decode("utf-8")


def read_json(path: Path, most_bytes: int = JSON_BYTES) -> Any:
    """The value of a JSON file. Raises OSError, also for a device or a pipe; ValueError."""
    return parsed(read_text(path, most_bytes))
