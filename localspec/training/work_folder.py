"""The folders that a training writes to: checked before hours of work, and locked against a second
training.

Contract: `require_writable` asks the system for a place before anything is begun. `alone_in` holds
a folder while its block runs; the system releases the lock when the process dies, in whatever way.
`resumable` says after Ctrl-C what is kept. A work folder belongs to one target: `require_own`
refuses one that holds another target's training or other files, `claim` writes the owner's note.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localspec.core.errors import ConfigError, StoreError
from localspec.core.files import replacing, try_lock, why_not_writable

LOCK, OWNER = ".training.lock", "target.json"
UNOWNED = (LOCK, f".{OWNER}")  # what may lie in a work folder before it has an owner


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


def require_own(work: Path, mark: str) -> None:
    """Raise ConfigError where the work folder is another target's, or no work folder. mark: the
    target's fingerprint."""
    owner = work / OWNER
    if owner.is_file():
        try:
            found = json.loads(owner.read_text(encoding="utf-8"))
            other, other_name = str(found["mark"]), str(found["name"])
        except (ValueError, KeyError, TypeError):
            other, other_name = "", "an unreadable note"
        if other != mark:
            raise ConfigError(
                f"{work} holds the training for another target ({other_name}), or for earlier "
                "weights of this one. Name another --work, or delete that folder to begin anew."
            )
        return
    if work.exists() and not work.is_dir():
        raise ConfigError(f"{work} is a file. Name a folder as --work.")
    if work.is_dir() and any(not one.name.startswith(UNOWNED) for one in work.iterdir()):
        raise ConfigError(f"{work} holds other files. Name another --work.")


def claim(work: Path, mark: str, name: str) -> None:
    """Make the work folder this target's. Raises ConfigError where it has become another's."""
    require_own(work, mark)
    if (work / OWNER).is_file():
        return
    try:
        with replacing(work / OWNER) as part:
            part.write_text(json.dumps({"mark": mark, "name": name}) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"{work} cannot be written ({error.strerror}). Free disk space there, or name another "
            "--work."
        ) from error
