"""Identifies weights: hashes of a model's or head's files, and the note of what it was trained for.

`fingerprint` tells one target from another of the same shape, `weights_mark` one set of weights
from another whatever its settings are. Of large files pieces spread evenly are read, so that both
cost little beside loading. `require_trained_for` reads the note that a training leaves beside its
result; a head without a note, such as a published one, is accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.core.errors import ModelError
from localspec.formats.folder_files import read_object, weight_files

if TYPE_CHECKING:
    from hashlib import _Hash

NOTE = "made.json"
SAMPLED_PLACES, SAMPLED_BYTES = 64, 65536  # of each weight file
MARK_LENGTH = 12  # hex digits: enough to tell the parts of one computer apart
# Targets whose fingerprint is remembered while their files keep their size and time.
MOST_REMEMBERED = 256

Stamps = tuple[tuple[Path, int, int], ...]  # files, each with its bytes and its time in ns


def fingerprint(folder: Path) -> str:
    """Return a hash over a model's config, tokenizer and weights. Raises ModelError."""
    small = [folder / name for name in ("config.json", "tokenizer.json")]
    return _fingerprint(
        _stamps(file for file in small if file.is_file()), _stamps(weight_files(folder))
    )


@lru_cache(maxsize=MOST_REMEMBERED)
def _fingerprint(small: Stamps, weights: Stamps) -> str:
    digest = hashlib.sha256()
    for file, _, _ in small:
        digest.update(file.read_bytes())
    _add(digest, (file for file, _, _ in weights))
    return digest.hexdigest()


def _stamps(files: Iterable[Path]) -> Stamps:
    stats = ((file, file.stat()) for file in files)
    return tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def weights_mark(files: Iterable[Path]) -> str:
    """Return a short hash over weight files alone."""
    digest = hashlib.sha256()
    _add(digest, files)
    return digest.hexdigest()[:MARK_LENGTH]


def require_trained_for(folder: Path, target: Path) -> None:
    """Raise ModelError where the note in `folder` names other weights than the target's."""
    if not (folder / NOTE).is_file():
        return
    damaged = "Train it again."
    note = read_object(folder / NOTE, f"{folder / NOTE} cannot be read. {damaged}", damaged)
    if note.get("mark") != fingerprint(target):
        raise ModelError(
            f"{folder} was trained for {note.get('target')} with other weights than {target.name} "
            "has now, so its guesses would hardly ever hold. Name that target with --model, or "
            "train it again."
        )


def _add(digest: _Hash, files: Iterable[Path]) -> None:
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        step = max(SAMPLED_BYTES, size // SAMPLED_PLACES)
        with file.open("rb") as stream:
            for place in range(0, size, step):
                stream.seek(place)
                digest.update(stream.read(SAMPLED_BYTES))
