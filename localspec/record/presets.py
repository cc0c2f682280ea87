"""Presets: named sets of sampling settings with a system prompt.

Contract: a name is a line of at most 80 characters; saving under an existing name replaces the
preset. Values out of range are refused before they are stored. Raises RequestError, StoreError.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from localspec.core import SamplingParams
from localspec.errors import RequestError
from localspec.record.connection import SharedConnection
from localspec.record.rows import clean

MAX_NAME_LENGTH = 80
DELETE = "DELETE FROM preset WHERE name = ?"


@dataclass(frozen=True)
class Preset:
    """Raises RequestError for a value out of range."""

    name: str
    system_prompt: str = ""
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name) > MAX_NAME_LENGTH:
            raise RequestError(
                f"A preset's name needs 1 to {MAX_NAME_LENGTH} characters, but this has "
                f"{len(self.name.strip())}. Choose another name."
            )
        if self.max_tokens < 1:
            raise RequestError(f"max tokens is {self.max_tokens}, but a reply needs at least 1.")
        # The ranges are checked there.
        SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )


class Presets:
    """The presets of a log."""

    def __init__(self, db: SharedConnection) -> None:
        self._db = db

    def all(self) -> list[Preset]:
        """By name."""
        with self._db.reading() as tables:
            return [Preset(**row) for row in tables.rows("SELECT * FROM preset ORDER BY name")]

    def save(self, preset: Preset) -> None:
        name = _name(preset.name)
        with self._db.writing() as tables:
            tables.execute(DELETE, name)
            tables.insert("preset", {**asdict(preset), "name": name})

    def delete(self, name: str) -> None:
        """No effect where there is none of that name."""
        with self._db.writing() as tables:
            tables.execute(DELETE, _name(name))


def _name(typed: str) -> str:
    return clean(" ".join(typed.split()))
