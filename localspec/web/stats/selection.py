"""Which turns the Stats tab and the report are about.

Contract: a scope (this session, one conversation, the last seven days, everything), then filters by
who asked (the person, unless said otherwise), by model and by date. Dates are days in UTC, as the
log has them, both ends included. Raises StoreError for a day that is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from localspec.chat.service import ChatService
from localspec.core.errors import StoreError
from localspec.record.rows import API, PAGE
from localspec.web.words import number_of

ALL_MODELS = ""
ANYONE = "anyone"
WEEK = "week"
MAX_TURNS_WITH_ROUNDS = 300  # the newest; the rounds of more would take seconds to read

SCOPES = {
    "session": "this session",
    "conversation": "this conversation",
    WEEK: "the last 7 days",
    "all": "everything",
}

WHOSE = {PAGE: "your replies", API: "the replies to other programs", ANYONE: "all replies"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """scope: of SCOPES. conversation: its stored id. since, until: days.
    source: who asked, PAGE for the person."""

    scope: str = "session"
    conversation: int | None = None
    model: str = ALL_MODELS
    since: date | None = None
    until: date | None = None
    source: str = PAGE

    @property
    def query(self) -> str:
        """As a part of an address."""
        unsaid = (None, "", PAGE)
        named = {name: value for name, value in asdict(self).items() if value not in unsaid}
        return urlencode(named)

    @property
    def words(self) -> str:
        """As the end of a sentence about these turns."""
        if self.model != ALL_MODELS or self.since is not None or self.until is not None:
            return "in this selection"
        return "so far" if self.scope == "all" else f"in {SCOPES[self.scope]}"

    def rows(self, service: ChatService) -> list[Row]:
        """The turns, oldest first."""
        return self.asked(self.of_anyone(service))

    def of_anyone(self, service: ChatService) -> list[Row]:
        """Those of all who asked."""
        begins = [self.since, week_begin() if self.scope == WEEK else None]
        first = max((str(day) for day in begins if day is not None), default="")
        last = "9999" if self.until is None else str(self.until)
        return [
            row
            for row in self._scope(service)
            if self.model in (ALL_MODELS, row["model"])
            and first <= str(row["started_at_utc"])[:10] <= last
        ]

    def asked(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if self.source in (ANYONE, row["source"])]

    def _scope(self, service: ChatService) -> list[Row]:
        if self.scope in ("all", WEEK):
            return service.turn_rows()
        if self.scope == "conversation":
            return [] if self.conversation is None else service.turn_rows(self.conversation)
        session_id = service.session_id
        return [] if session_id is None else service.turn_rows(session_id=session_id)


def week_begin() -> date:
    """The first of the last seven days, today included."""
    return datetime.now(UTC).date() - timedelta(days=6)


def rounds_of(service: ChatService, rows: Sequence[Row]) -> list[Row]:
    """The rounds of the newest of these turns, oldest first."""
    return service.rounds(list(rows)[-MAX_TURNS_WITH_ROUNDS:])


def selection_of(query: Mapping[str, str]) -> Selection:
    """The selection that an address asks for."""
    scope = query.get("scope", "session")
    return Selection(
        scope if scope in SCOPES else "session",
        number_of(query.get("conversation")),
        query.get("model", ALL_MODELS),
        day_of(query.get("since")),
        day_of(query.get("until")),
        query.get("source", PAGE),
    )


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
