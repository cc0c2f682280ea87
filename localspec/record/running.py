"""Which process serves a home folder, for a second start on it.

The process writes its address beside the log while it serves. What a killed process left there
counts for nothing: the lock of the log says whether one runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from localspec.core.files import read_json, write_private

RUNNING_FILE = "running.json"


@dataclass(frozen=True)
class Running:
    """The process that serves. address: with the token where there is a page."""

    address: str
    has_page: bool
    pid: int

    @property
    def shown_address(self) -> str:
        """The address without its token."""
        return self.address.partition("/?")[0]


@contextmanager
def announced(folder: Path | None, address: str, *, has_page: bool) -> Iterator[None]:
    """Say in the folder that this process serves at the address. Nothing is said where nothing can
    be written, nor without a folder."""
    if folder is None:
        yield
        return
    file = folder / RUNNING_FILE
    with suppress(OSError):
        write_private(file, json.dumps(asdict(Running(address, has_page, os.getpid()))))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def read_running(folder: Path) -> Running | None:
    """Return what was last said in the folder; None where there is nothing to be read."""
    try:
        values = read_json(folder / RUNNING_FILE)
        return Running(str(values["address"]), bool(values["has_page"]), int(values["pid"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
