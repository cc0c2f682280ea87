"""Values of a JSON file that somebody else wrote, read without trusting their types.

`Table` is strict: it raises RequestError with its place in the file, for our own format. The
functions are lenient: they return an empty value for anything of another type, for formats that
other programs change as they like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localspec.core.errors import RequestError
from localspec.record.rows import now, time_from

READ = (
    "localspec reads its own JSONL, the exports of ChatGPT, Claude, Open WebUI and LM Studio (also "
    "as a zip), and JSON with messages or ShareGPT's conversations."
)
NOT_AN_EXPORT = f"This is not a chat export. Nothing was imported. {READ}"
REMEDY = "Choose a file that localspec exported as JSONL."


@dataclass(frozen=True)
class Table:
    """A JSON object of the file. where: its place, for messages."""

    where: str
    values: dict[str, Any]

    def number(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(f'no number under "{name}"')
        return value

    def number_or_none(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.number(name)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.wrong(f'no text under "{name}"')
        return value

    def text_or_none(self, name: str) -> str | None:
        value = self.values.get(name)
        return value if isinstance(value, str) else None

    def choice(self, name: str, known: Sequence[str]) -> Any:
        value = self.values.get(name)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(f'none of {", ".join(known)} under "{name}"')
        return value

    def time(self) -> str:
        """Return when the object was made; the present time if the file does not say."""
        value = self.values.get("created_at_utc")
        if value is None:
            return now()
        try:
            return time_from(value)
        except ValueError:
            raise self.wrong('no time under "created_at_utc"') from None

    def wrong(self, what: str) -> RequestError:
        return RequestError(
            f"{self.where} of the import has {what}, so nothing was imported. {REMEDY}"
        )


def text_at(value: object, *path: str) -> str:
    """Return the text at the end of a path of names; "" if there is none."""
    for name in path:
        value = fields_at(value).get(name)
    return value if isinstance(value, str) else ""


def fields_at(value: object, *path: str) -> dict[str, Any]:
    """Return the object at the end of a path of names; an empty one if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def items_at(value: object, *path: str) -> list[Any]:
    """Return the list at the end of a path of names; an empty one if there is none."""
    found = fields_at(value, *path[:-1]).get(path[-1]) if path else value
    return found if isinstance(found, list) else []


def time_at(value: object, name: str, default: str) -> str:
    """Return the time under a name, in the log's form; `default` if there is none."""
    try:
        return time_from(fields_at(value).get(name))
    except ValueError:
        return default
