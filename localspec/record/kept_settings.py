"""Settings that are kept by a name: the person's prompts, and the defaults of each model.

Contract: settings are texts by the names of the page's fields; a field that is not named is left as
it is. A name is a line of at most 1,000 characters; saving under an existing name replaces what it
named. What can no longer be read counts as not kept. Raises RequestError, StoreError.

Not here: what a field means (web), the settings of a conversation (conversations).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from localspec.core.errors import RequestError
from localspec.record.connection import SharedConnection
from localspec.record.rows import clean, json_column

MAX_NAME_LENGTH = 1000  # a model may be called by its path
Kind = Literal["prompt", "model"]
Settings = Mapping[str, str]

ALL = "SELECT name, settings FROM kept_settings WHERE kind = ? ORDER BY name"
SAVE = "INSERT OR REPLACE INTO kept_settings (kind, name, settings) VALUES (?, ?, ?)"
RENAME = "UPDATE OR REPLACE kept_settings SET name = ? WHERE kind = ? AND name = ?"
DELETE = "DELETE FROM kept_settings WHERE kind = ? AND name = ?"


class KeptSettings:
    """All of one kind. A log has one for prompts and one for models."""

    def __init__(self, db: SharedConnection, kind: Kind) -> None:
        self._db = db
        self._kind = kind

    def all(self) -> dict[str, dict[str, str]]:
        """Settings by name, in the order of the names."""
        rows = self._db.rows(ALL, self._kind)
        found = {row["name"]: settings_from(row["settings"]) for row in rows}
        return {name: settings for name, settings in found.items() if settings is not None}

    def save(self, name: str, settings: Settings) -> None:
        self._db.execute(SAVE, self._kind, _name(name), written(settings))

    def rename(self, name: str, wanted: str) -> None:
        """No effect where there is none of that name; replaces what was called so."""
        self._db.execute(RENAME, _name(wanted), self._kind, _name(name))

    def delete(self, name: str) -> None:
        """No effect where there is none of that name."""
        self._db.execute(DELETE, self._kind, _name(name))


def written(settings: Settings) -> str:
    """As a column holds them."""
    return json.dumps({name: clean(value) for name, value in settings.items()})


def settings_from(text: str | None) -> dict[str, str] | None:
    """The settings of a column; None for what holds none."""
    found = json_column(text)
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        return None
    return found


def _name(typed: str) -> str:
    name = clean(" ".join(typed.split()))
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise RequestError(
            f"A name needs 1 to {MAX_NAME_LENGTH} characters, but this has {len(name)}. Choose "
            "another name."
        )
    return name
