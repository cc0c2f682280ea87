"""Identifies weights: hashes of a model's or head's files, and the note of what it was trained for.

Contract: `fingerprint` tells one target from another of the same shape, `weights_mark` one set of
weights from another whatever its settings are. Of large files pieces spread evenly are read, so
that both cost little beside loading. `require_trained_for` reads the note that a training leaves
beside its result; a head without one, such as a published one, is accepted.

Not here: the rest of that note (training.artifact), sizes (heads.files).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.core.errors import ModelError
from localspec.formats.folder_files import read_object, weight_files

if TYPE_CHECKING:
    from hashlib import _Hash

NOTE = "made.json"
SAMPLED_PLACES, SAMPLED_BYTES = 64, 65536  # of each weight file
MARK_LENGTH = 12  # hex digits: enough to tell the parts of one computer apart


def fingerprint(folder: Path) -> str:
    """A hash over a model's config, tokenizer and weights. Raises ModelError."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    _add(digest, weight_files(folder))
    return digest.hexdigest()


def weights_mark(files: Iterable[Path]) -> str:
    """A short hash over weight files alone."""
    digest = hashlib.sha256()
    _add(digest, files)
    return digest.hexdigest()[:MARK_LENGTH]


def require_trained_for(folder: Path, target: Path) -> None:
    """Raises ModelError where the note in `folder` names other weights than the target's."""
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
