"""The result of a training: a folder with the weights and a note of how it was trained.

Contract: made.json marks a folder as a result and holds its held-out figures. A result is written
beside its place and swapped in as a whole. A folder that holds anything else, also the result of
another target, is refused before the training begins and never written over.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from localspec.core.errors import ConfigError, ModelError, StoreError
from localspec.forward.fingerprint import NOTE

MAKER = "python -m localspec train"


@dataclass(frozen=True)
class Artifact:
    """The note in made.json. target: its name. mark: its fingerprint. acceptance: held out, by
    draft position. before: the same of what it started from, None for a fresh one."""

    kind: str
    target: str
    mark: str
    acceptance: tuple[float, ...]
    before: tuple[float, ...] | None
    num_tokens: int
    num_steps: int
    minutes: float
    is_personal: bool = False


def require_free(folder: Path, kind: str, mark: str) -> None:
    """Raise ConfigError unless the folder is absent, empty, or an earlier result of this kind for
    this target. mark: the target's fingerprint."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Name a folder with --out.")
    if not any(folder.iterdir()):
        return
    found = read_artifact(folder) if (folder / NOTE).is_file() else None
    if found is None or found.kind != kind:
        what = "other files" if found is None else f"a trained {found.kind}"
        raise ConfigError(f"{folder} holds {what}, which would be lost. Name another --out.")
    if found.mark != mark:
        raise ConfigError(
            f"{folder} holds a {kind} that was trained for another target, or for earlier weights "
            f"of {found.target}, and would be lost. Name another --out, or move that folder away."
        )


def place_beside(folder: Path, artifact: Artifact) -> Path:
    """The first free folder name after `folder`, or the one that holds this very result."""
    for number in count(2):
        place = folder.with_name(f"{folder.name}-{number}")
        if not place.exists() or ((place / NOTE).is_file() and read_artifact(place) == artifact):
            return place
    raise AssertionError("numbers do not end")


def deliver(folder: Path, artifact: Artifact, save: Callable[[Path], None]) -> None:
    """Write a result beside its place and swap it in. Raises StoreError; what was there stays."""
    part, old = (folder.parent / f".{folder.name}.{end}" for end in ("part", "old"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
        save(part)
        note = json.dumps({"made_by": MAKER, **asdict(artifact)}, indent=2)
        (part / NOTE).write_text(note + "\n", encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be written ({error.strerror or error}). Free disk space there and "
            "run the command again: the training itself is kept and is not repeated."
        ) from error


def read_artifact(folder: Path) -> Artifact:
    """The note of a result. Raises ModelError."""
    try:
        row = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        before = row["before"]
        return Artifact(
            str(row["kind"]),
            str(row["target"]),
            str(row["mark"]),
            tuple(map(float, row["acceptance"])),
            None if before is None else tuple(map(float, before)),
            int(row["num_tokens"]),
            int(row["num_steps"]),
            float(row["minutes"]),
            bool(row["is_personal"]),
        )
    except FileNotFoundError as error:
        raise ModelError(f"{folder} was not made by `{MAKER}`: it has no {NOTE}.") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / NOTE} is damaged. Train it again.") from error
