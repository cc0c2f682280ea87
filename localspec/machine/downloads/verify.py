"""Whether a file that arrived is the file the hub listed.

Contract: `objection` reads it whole once and gives the reason it is wrong, None when it is right:
size, SHA-256 for a large file, git's SHA-1 for a small one, and for weights that the header fits
the file (safetensors checks that while opening, and opens no tensor).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from localspec.machine.downloads.listing import HubFile

PIECE_BYTES = 4 * 2**20
PAGE_STARTS = (b"<!doctype html", b"<html")


def objection(path: Path, file: HubFile, report: Callable[[int], None]) -> str | None:
    """report: called with the number of bytes read so far."""
    num_bytes = path.stat().st_size
    if num_bytes != file.num_bytes:
        return f"it has {num_bytes} bytes, not {file.num_bytes}"
    if hash_of(path, file.is_large, report) != file.etag:
        return "its checksum differs"
    return _damaged(path) if file.name.endswith(".safetensors") else None


def hash_of(path: Path, is_large: bool, report: Callable[[int], None]) -> str:
    digest = hashlib.sha256() if is_large else hashlib.sha1(usedforsecurity=False)
    if not is_large:  # as git names a blob
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
            report(stream.tell())
    return digest.hexdigest()


def is_web_page(path: Path) -> bool:
    """Whether a page of HTML came in place of a file."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(64).lstrip().lower().startswith(PAGE_STARTS)


def _damaged(path: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy"):
            return None
    except SafetensorError as error:
        return f"its header does not fit ({str(error).split(chr(10))[0]})"
