"""Which downloads are unfinished, kept on disk, so that the next start can go on with them.

Contract: `load` never raises: a ledger that cannot be read is an empty one, since the parts
themselves lie in the hub's cache and a new click goes on from them. `save` writes beside and
renames. How much is here is read from the cache itself, never remembered.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.files import replacing
from localspec.machine.downloads.listing import Survey, survey_from

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unfinished:
    """survey: None when the hub was never reached."""

    model_id: str
    survey: Survey | None


def load(path: Path) -> list[Unfinished]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [
            Unfinished(
                str(each["model_id"]), survey_from(each["survey"]) if each["survey"] else None
            )
            for each in entries
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        log.warning("the list of unfinished downloads in %s cannot be read", path)
        return []


def save(path: Path, unfinished: Sequence[Unfinished]) -> None:
    """Raises OSError."""
    data = [
        {"model_id": each.model_id, "survey": each.survey.as_dict() if each.survey else None}
        for each in unfinished
    ]
    with replacing(path) as part:
        part.write_text(json.dumps(data), encoding="utf-8")
