"""The folders that a training writes to: checked before hours of work, and locked against a second
training.

`require_writable` asks the system for a place before anything is begun. `alone_in` holds a folder
while its block runs; the system releases the lock when the process dies, in whatever way.
`resumable` says after Ctrl-C what is kept. Each target has a work folder of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from localspec.core.errors import ConfigError, StoreError
from localspec.core.files import read_json, try_lock, why_not_writable
from localspec.machine.trained import MARK_LENGTH

LOCK = ".training.lock"
OWNER = "target.json"  # the note in which earlier versions kept the fingerprint of the target


def require_writable(place: Path, file: Path, flag: str) -> None:
    """file: what is written first for this place. flag: names another place. Raises
    StoreError."""
    if why := why_not_writable(file):
        raise StoreError(
            f"{place} cannot be written ({why}), so nothing was begun. Make it writable, or name "
            f"another place with {flag}."
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and hold it. Raises ConfigError where another training does, StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be written ({error.strerror or error}). Name another --work."
        ) from error
    with file:
        if not try_lock(file):
            raise ConfigError(
                f"Another training is running in {folder}, and two would write over each other. "
                "Wait until it has ended, or name another --work."
            )
        yield


@contextmanager
def resumable(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Say on Ctrl-C that only the last minutes are lost."""
    try:
        yield
    except KeyboardInterrupt:
        report(f"Stopped. What was done is kept in {folder}: the same command continues there.")
        raise


def work_folder(base: Path, mark: str) -> Path:
    """Return the folder below `base` in which this target is trained for: named by the target's
    fingerprint, or, of an earlier version, the one whose note names it. mark: the fingerprint."""
    for note in (base / OWNER, *sorted(base.glob(f"*/{OWNER}"))):
        with suppress(OSError, ValueError, LookupError, TypeError):
            if read_json(note)["mark"] == mark:
                return note.parent
    return base / mark[:MARK_LENGTH]
