"""The conversations as a list that people keep: found, renamed, pinned, deleted, brought back.

Contract: the newest message decides the order, by its number and not by its time, so that a clock
set back changes nothing. A deleted conversation is out of every list, export and statistic at
once and can be brought back until `purge`, which takes it off the disk for good, texts, numbers
and index alike; the program calls it when it starts. Raises StoreError; each call is one
transaction.

Not here: the messages themselves (store), how a search reads what was typed (search).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from localspec.errors import RequestError, StoreError
from localspec.record import queries, search
from localspec.record.connection import SharedConnection, Tables, missing
from localspec.record.imports import ImportedConversation, take_in
from localspec.record.rows import now
from localspec.record.withheld import Withheld

MAX_SNIPPETS = 500
LOOKUP_SIZE = 500  # SQLite takes a limited number of parameters


@dataclass(frozen=True)
class HistoryRow:
    """A conversation in the list. updated_at_utc: of its newest message. snippet, message_id:
    where a search found its words, "" and None where only the title has them or nothing was
    searched for. All of it is plain text."""

    id: int
    title: str
    is_pinned: bool
    updated_at_utc: str
    snippet: str = ""
    message_id: int | None = None


class History:
    """is_indexed: whether this log has its index of texts."""

    def __init__(self, db: SharedConnection, withheld: Withheld, is_indexed: bool) -> None:
        self._db = db
        self._withheld = withheld
        self._is_indexed = is_indexed

    def rows(self, typed: str = "") -> list[HistoryRow]:
        """Pinned ones first, then the newest; those only that have all that was typed."""
        wanted = search.sought(typed)
        words = wanted.texts
        with self._db.reading() as tables:
            found = [self._row(row) for row in tables.rows(queries.HISTORY) if self._is_shown(row)]
            if not words:
                return found
            hits = search.find(tables, wanted, self._is_indexed) | self._unwritten(tables, words)
            texts = self._texts(tables, list(hits.values())[:MAX_SNIPPETS])
        return [
            replace(row, snippet=snippet, message_id=message_id)
            for row in found
            if (message_id := hits.get(row.id)) is not None or _has_all(row.title, words)
            for snippet in [search.snippet_of(texts.get(message_id or 0, ""), words)]
        ]

    def rename(self, conversation_id: int, title: str) -> None:
        is_secret = self._withheld.is_on
        with self._db.writing() as tables:
            _check_alive(tables, conversation_id)
            if not is_secret:
                tables.update("conversation", conversation_id, {"title": title})
        if is_secret:
            self._withheld.titles[conversation_id] = title
        else:
            self._withheld.titles.pop(conversation_id, None)

    def pin(self, conversation_id: int, is_pinned: bool) -> None:
        with self._db.writing() as tables:
            _check_alive(tables, conversation_id)
            tables.update("conversation", conversation_id, {"is_pinned": int(is_pinned)})

    def delete(self, conversation_id: int) -> None:
        """Take it out of sight. A second call changes nothing."""
        with self._db.writing() as tables:
            tables.update("conversation", conversation_id, {"deleted_at_utc": now()})

    def restore(self, conversation_id: int) -> None:
        with self._db.writing() as tables:
            tables.update("conversation", conversation_id, {"deleted_at_utc": None})

    def take_in(self, found: Sequence[ImportedConversation]) -> list[int]:
        """Store conversations from elsewhere, all or none; their ids. Raises RequestError while
        texts are not to be written down."""
        if self._withheld.is_on:
            raise RequestError(
                "An import writes texts to the log, but that is switched off. Switch it on, then "
                "import again."
            )
        return take_in(self._db, found)

    def deleted(self) -> list[HistoryRow]:
        """What can still be brought back, the one deleted last first."""
        with self._db.reading() as tables:
            return [self._row(row) for row in tables.rows(queries.DELETED)]

    def purge(self) -> int:
        """Remove what was deleted for good; the number of conversations."""
        with self._db.writing() as tables:
            for statement in queries.PURGE:
                num_purged = tables.execute(statement)
            if num_purged and self._is_indexed:
                tables.execute(search.OPTIMIZE)  # else the index keeps its words for a while
        if num_purged:
            with suppress(StoreError):  # it is gone; only its old pages lie in the -wal until later
                self._db.fold_log()
        return num_purged

    def _row(self, row: dict[str, Any]) -> HistoryRow:
        title = self._withheld.titles.get(row["id"], row["title"])
        return HistoryRow(row["id"], title, bool(row["is_pinned"]), row["updated_at_utc"])

    def _is_shown(self, row: dict[str, Any]) -> bool:
        """Not one of which nothing is left to read, because its texts were not written down."""
        return bool(row["has_text"]) or row["id"] in self._withheld.titles

    def _unwritten(self, tables: Tables, words: Sequence[str]) -> dict[int, int]:
        texts = sorted(self._withheld.texts.items())
        hits = [message_id for message_id, text in texts if _has_all(text, words)]
        rows = _by_id(tables, "id, conversation_id", hits)
        return {row["conversation_id"]: row["id"] for row in rows}

    def _texts(self, tables: Tables, message_ids: Sequence[int]) -> dict[int, str]:
        texts = {row["id"]: row["text"] for row in _by_id(tables, "id, text", message_ids)}
        kept = self._withheld.texts
        return {one: kept.get(one, text) for one, text in texts.items()}


def _by_id(tables: Tables, columns: str, ids: Sequence[int]) -> Iterable[dict[str, Any]]:
    for start in range(0, len(ids), LOOKUP_SIZE):
        part = ids[start : start + LOOKUP_SIZE]
        marks = ", ".join("?" * len(part))
        yield from tables.rows(f"SELECT {columns} FROM message WHERE id IN ({marks})", *part)


def _has_all(text: str, words: Sequence[str]) -> bool:
    folded = text.casefold()
    return all(word.casefold() in folded for word in words)


def _check_alive(tables: Tables, conversation_id: int) -> None:
    sql = "SELECT 1 FROM conversation WHERE id = ? AND deleted_at_utc IS NULL"
    if not tables.rows(sql, conversation_id):
        raise missing("conversation", conversation_id)
