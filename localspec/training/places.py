"""The folders a training writes to: asked for before hours of work, and held against a second one.

Contract: `require_writable` asks the system for every place before anything is begun. `alone_in`
holds a folder while its block runs; the system lets go of it when the process dies, however it
dies, so that a killed training stands in nobody's way. `resumable` says after Ctrl-C what is kept.

Not here: whose folder it is (heads.run), what is written (answers, checkpoint, made).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localspec.errors import ConfigError, StoreError
from localspec.files import why_not_writable

LOCK = ".training.lock"
WAIT_SECONDS = 0.5  # for one that is just ending


def require_writable(place: Path, file: Path, flag: str) -> None:
    """file: what is written first for this place. flag: names another. Raises StoreError."""
    if why := why_not_writable(file):
        raise StoreError(
            f"{place} cannot be written ({why}), so nothing was begun. Make it writable, or name "
            f"another place with {flag}."
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and hold it. Raises ConfigError where another training does, StoreError."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = WeakFileLock(folder / LOCK, timeout=WAIT_SECONDS)
        lock.__enter__()
    except TimeoutError as error:
        raise ConfigError(
            f"Another training is running in {folder}, and two would write over each other. Wait "
            "until it has ended, or name another --work."
        ) from error
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be written ({error.strerror or error}). Name another --work."
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


@contextmanager
def resumable(folder: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Say on Ctrl-C that nothing is lost but the last minutes."""
    try:
        yield
    except KeyboardInterrupt:
        report(f"Stopped. What was done is kept in {folder}: the same command goes on from there.")
        raise
