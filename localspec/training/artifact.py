"""Keeps the result of a training in HOME, in a folder that is named by its content.

A result is written beside its place and appears there whole or not at all. The same content has the
same name, so a training that is repeated adds nothing, and no result is ever written over.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from localspec.core.errors import ConfigError, StoreError
from localspec.core.files import replacing
from localspec.formats.fingerprint import NOTE
from localspec.machine.trained import MAKER, Artifact, shelf_of

DIGITS = 12  # hex digits of the content's hash in a folder's name


def keep(home: Path, work: Path, note: Artifact, save: Callable[[Path], None]) -> Path:
    """Save a result and return its folder. work: the folder that this training holds alone.
    Raises StoreError."""
    shelf = shelf_of(home, note.mark)
    part = shelf / f".{hashlib.sha256(str(work).encode()).hexdigest()[:DIGITS]}.part"
    try:
        shutil.rmtree(part, ignore_errors=True)  # what a killed training left
        part.mkdir(parents=True)
        save(part)
        name = f"{slug(note.target)}-{note.kind}{'-personal' * note.is_personal}"
        folder = shelf / f"{name}-{content_hash(part)}"
        _write_note(folder if folder.exists() else part, note)
        if folder.exists():
            shutil.rmtree(part)
        else:
            part.rename(folder)
    except OSError as error:
        raise StoreError(
            f"{shelf} cannot be written ({error.strerror or error}). Free disk space there and "
            "run the command again: the training itself is kept and is not repeated."
        ) from error
    return folder


def _write_note(folder: Path, note: Artifact) -> None:
    with replacing(folder / NOTE) as part:
        text = json.dumps({"made_by": MAKER, **asdict(note)}, indent=2)
        part.write_text(text + "\n", encoding="utf-8")


def content_hash(folder: Path) -> str:
    """Return a short hash of a result's files and their names, without its note."""
    digest = hashlib.sha256()
    for place in sorted({*folder.rglob("*")} - {folder / NOTE}):
        digest.update(f"{place.relative_to(folder).as_posix()}\0".encode())
        if place.is_file():
            with place.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:DIGITS]


def slug(name: str) -> str:
    """Return a name that is fit for a folder on every system."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def require_free(out: Path, home: Path, mark: str) -> None:
    """Raise ConfigError unless a copy may be written to `out`: it is absent, empty, or a copy of a
    result that HOME holds. mark: the target's fingerprint."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file. Name a folder with --out.")
    if not out.exists() or not any(out.iterdir()):
        return
    if not any(shelf_of(home, mark).glob(f"*-{content_hash(out)}")):
        raise ConfigError(f"{out} holds other files, which would be lost. Name another --out.")


def copy_to(out: Path, folder: Path) -> None:
    """Put a copy of a result into the place of `out`. Raises StoreError."""
    part = out.parent / f".{out.name}.part"
    try:
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part)
        shutil.rmtree(out, ignore_errors=True)
        part.rename(out)
    except (OSError, shutil.Error) as error:
        raise StoreError(
            f"{out} cannot be written ({error}). The result is in {folder}; copy it from there."
        ) from error
