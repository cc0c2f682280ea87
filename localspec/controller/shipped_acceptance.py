"""The file of acceptance that was measured for some models on another machine.

Contract: `read_accepted` gives the acceptance of a file, a snapshot of controller.acceptance;
`write_accepted` writes one whole or not at all. What is accepted depends on the models and the
text, not on the machine; costs are not in the file. The file names the weights that it was measured
with, and is not used for others. Without it a first chat only starts slower, so the reader returns
the reason as a sentence and raises nothing.

Not here: measuring it (training.accepted), using it (controller.acceptance).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localspec.core.arithmetic import rounded
from localspec.core.errors import StoreError
from localspec.core.files import read_json, replacing

VERSION = 2
INVALID = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
DIGITS = 2  # Counts of rounds are kept with so many digits: finer would be noise.


@dataclass(frozen=True)
class Origin:
    """What the figures are of. marks: of the weights of each part (loading.drafters.marks_of)."""

    target: str
    draft: str | None
    precision: str
    num_prompts: int
    temperatures: tuple[float, ...]
    max_tokens: int
    marks: Mapping[str, str]


def read_accepted(
    path: Path | None, marks: Mapping[str, str]
) -> tuple[Mapping[str, Any] | None, str | None]:
    """The acceptance, and a sentence where there should be one and is not. marks: of what is
    loaded; a part that only one side has is no contradiction."""
    from localspec.controller.acceptance import Acceptance

    if path is None:
        return None, None
    try:
        data = read_json(path)
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}")
        Acceptance.restored(data["acceptance"])
        others = [part for part, mark in data["marks"].items() if marks.get(part, mark) != mark]
    except (OSError, *INVALID) as error:
        reason = f"{type(error).__name__}: {error}"
        return None, (
            f"{path} says which drafts of this model another machine accepted, but cannot be used "
            f"({reason}). First replies learn it anew; fetch the file again to spare them that, or "
            "measure it with `python -m localspec train accepted`."
        )
    if others:
        return None, (
            f"{path} says what was accepted with another {' and '.join(others)} than is loaded, so "
            "it is not used. First replies learn it anew; `python -m localspec train accepted` "
            "measures it for what is loaded."
        )
    found: Mapping[str, Any] = data["acceptance"]
    return found, None


def write_accepted(path: Path, origin: Origin, acceptance: Mapping[str, Any]) -> None:
    """Raises StoreError; what was there stays."""
    kept = rounded(acceptance, lambda number: round(number, DIGITS))
    data = {"version": VERSION, **asdict(origin), "acceptance": kept}
    try:
        with replacing(path) as part:
            part.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(refusal(path, error.strerror or str(error))) from error


def refusal(path: Path, why: str) -> str:
    """Why `write_accepted` could not, in a sentence."""
    return f"{path} cannot be written ({why}). Free disk space there, or name another --out."
