"""The results of trainings in HOME: drafts and heads, found by the fingerprint of their target.

HOME/trained/MARK/NAME is one result. MARK is the beginning of its target's fingerprint, NAME ends
with a hash of its files, so a result never changes and never takes another's place. Its note,
`made.json`, says what it reached on held-out answers, and whether it is offered: loaded unasked
with its target. Deleting the folder withdraws it. Training writes these folders
(training.artifact).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localspec.core.errors import ModelError
from localspec.core.files import read_json
from localspec.formats.fingerprint import NOTE, fingerprint
from localspec.machine.model import Model

MAKER = "python -m localspec train"
DRAFT = "draft"  # the kind of a result that is a draft model; the others are heads
MARK_LENGTH = 16  # hex digits of a fingerprint in the name of a folder
VISIBLE = "[!.]*"  # names of results; a hidden folder is one that is being written


@dataclass(frozen=True)
class Artifact:
    """The note of a result. target: its name. mark: its fingerprint. acceptance: held out, by draft
    position. before: the same of what it started from, None for a fresh result. made_at_utc: "" of
    earlier versions. refusal: why it is not offered, "" where it is."""

    kind: str
    target: str
    mark: str
    acceptance: tuple[float, ...]
    before: tuple[float, ...] | None
    num_tokens: int
    num_steps: int
    minutes: float
    is_personal: bool = False
    made_at_utc: str = ""
    refusal: str = ""


def read_artifact(folder: Path) -> Artifact:
    """Return the note of a result. Raises ModelError."""
    try:
        row = read_json(folder / NOTE)
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
            str(row.get("made_at_utc", "")),
            str(row.get("refusal", "")),
        )
    except FileNotFoundError as error:
        raise ModelError(f"{folder} was not made by `{MAKER}`: it has no {NOTE}.") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder / NOTE} is damaged. Train it again.") from error


def shelf_of(home: Path, mark: str) -> Path:
    """Return the folder of all results for one target. mark: its fingerprint."""
    return home / "trained" / mark[:MARK_LENGTH]


def offered_results(home: Path, target: Path) -> dict[str, Path]:
    """Return the folders of the results to load with a target, by their kind: the newest that was
    better on held-out answers than what drafted before it. Without results no weights are read."""
    notes = dict[Path, Artifact]()
    if not any((home / "trained").glob(f"*/{VISIBLE}/{NOTE}")):
        return {}
    with suppress(ModelError, OSError):  # of a target that cannot be read; loading says why
        mark = fingerprint(target)
        for file in shelf_of(home, mark).glob(f"{VISIBLE}/{NOTE}"):
            with suppress(ModelError):  # of a damaged note
                note = read_artifact(file.parent)
                if note.mark == mark and not note.refusal:
                    notes[file.parent] = note
    oldest_first = sorted(notes, key=lambda folder: (notes[folder].made_at_utc, folder.name))
    return {notes[folder].kind: folder for folder in oldest_first}


def trained_drafts(home: Path, target: Path | None) -> tuple[Model, ...]:
    """Return the draft that is offered for a target, without its shape; empty without one, and for
    a target that is not on this machine."""
    results = {} if target is None else offered_results(home, target)
    folder = results.get(DRAFT)
    return () if folder is None else (Model(str(folder), folder.name, folder),)
