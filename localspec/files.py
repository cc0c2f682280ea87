"""Write a file whole or not at all.

Contract: `replacing` gives a file beside the wanted one to be written; when the block has ended
the new file takes the old one's place at once. Where the block raises, or the process is killed,
what was there stays. A link is followed; a device or a pipe is no place for a file and is refused.

Not here: sentences for people about what could not be written (who knows what it was does that).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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


def place_of(path: Path) -> Path:
    """Where the file itself is, or would be. Raises OSError for what is there and is no file."""
    place = path.resolve()
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file", str(path))
    return place


def why_not_writable(path: Path) -> str | None:
    """What stands against writing this file, or making its folder, as the system says it; None
    where nothing does. To ask before work of minutes: leaves nothing behind."""
    try:
        path = place_of(path)
        folder = next(parent for parent in path.parents if parent.exists())
        probe = folder / f".{path.name}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None
