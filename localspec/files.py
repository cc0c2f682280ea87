"""Write a file whole or not at all.

Contract: `replacing` gives a file beside the wanted one to be written; when the block has ended
the new file takes the old one's place at once. Where the block raises, or the process is killed,
what was there stays.

Not here: sentences for people about what could not be written (who knows what it was does that).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The file to write in the place of `path`, whose folder is made. Raises OSError."""
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


def why_not_writable(path: Path) -> str | None:
    """What stands against writing this file, as the system says it; None where nothing does. To
    ask before work of minutes: leaves nothing behind but the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return f"{path} is a folder" if path.is_dir() else None
