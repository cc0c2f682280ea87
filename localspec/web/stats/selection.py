"""Which turns the Stats tab and the report are about.

Contract: a scope (this session, one conversation, everything), then filters by model and by date.
Dates are days in UTC, as the log has them, both ends included. Raises StoreError for a day that is
none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any
from urllib.parse import urlencode

from localspec.chat.service import ChatService
from localspec.errors import StoreError

ALL_MODELS = ""
MAX_TURNS_WITH_ROUNDS = 300  # the newest; the rounds of more would take seconds to read

Row = dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """scope: session, conversation or all. conversation: its stored id. since, until: days."""

    scope: str = "session"
    conversation: int | None = None
    model: str = ALL_MODELS
    since: date | None = None
    until: date | None = None

    @property
    def query(self) -> str:
        """As a part of an address."""
        named = asdict(self)
        return urlencode({name: value for name, value in named.items() if value not in (None, "")})

    def rows(self, service: ChatService) -> list[Row]:
        """The turns, oldest first."""
        return [row for row in self._scope(service) if self._includes(row)]

    def _scope(self, service: ChatService) -> list[Row]:
        if self.scope == "all":
            return service.turn_rows()
        if self.scope == "conversation":
            return [] if self.conversation is None else service.turn_rows(self.conversation)
        session_id = service.session_id
        return [] if session_id is None else service.turn_rows(session_id=session_id)

    def _includes(self, row: Row) -> bool:
        if self.model != ALL_MODELS and row["model"] != self.model:
            return False
        day = str(row["started_at_utc"])[:10]
        after = self.since is None or day >= self.since.isoformat()
        return after and (self.until is None or day <= self.until.isoformat())


def rounds_of(service: ChatService, rows: Sequence[Row]) -> list[Row]:
    """The rounds of the newest of these turns, oldest first."""
    return service.rounds(list(rows)[-MAX_TURNS_WITH_ROUNDS:])


def models_of(service: ChatService) -> list[str]:
    """Every model that the log has turns of."""
    rows = service.turn_rows()
    return sorted({row["model"] for row in rows if row["model"]})


def selection_of(query: Mapping[str, str]) -> Selection:
    """The selection that an address asks for."""
    return Selection(
        query.get("scope", "session"),
        number_of(query.get("conversation")),
        query.get("model", ALL_MODELS),
        day_of(query.get("since")),
        day_of(query.get("until")),
    )


def number_of(text: str | None) -> int | None:
    """A number out of an address; None for anything else."""
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < 19):
        return None
    return int(text)


def day_of(text: str | None) -> date | None:
    """A day as people write it in a form; None for an empty field. Raises StoreError."""
    if text is None or not text.strip():
        return None
    try:
        return date.fromisoformat(text.strip())
    except ValueError:
        raise StoreError(
            f"“{text.strip()}” is no day. Write it as year-month-day, for example 2026-03-31."
        ) from None
