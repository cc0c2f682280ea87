"""The list of conversations and its folders: searched, renamed, deleted, restored, imported.

Contract: the newest message decides the order, by its number and not by its time, so that a changed
clock does not reorder the list. A deleted conversation is out of every list, export and statistic
at once and can be restored until `purge`, which takes it off the disk, texts, numbers and index
alike; the program calls it when it starts. An import is stored whole or not at all, without
statistics: those belong to the machine that measured them. Raises StoreError; each call is one
transaction.

Not here: the messages themselves (store), the search syntax (search), reading a file to import
(chat.importing).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from localspec.core.errors import RequestError, StoreError
from localspec.record import queries, search
from localspec.record.connection import SharedConnection, Tables, missing
from localspec.record.kept_settings import Settings, written
from localspec.record.rows import (
    Conversation,
    StoredMessage,
    clean,
    message_from,
    now,
    text_columns,
    text_of,
    visible_line,
)
from localspec.record.unlogged import UnloggedTexts

MAX_SNIPPETS = 500
PROMPT = "system_prompt"
TEXTS = (PROMPT, "stop")  # the fields of the settings that are texts of the person's
MAX_EARLIER_CHARACTERS = 400_000  # about 100,000 tokens
# Of replies whose tokens are counted: about 500,000 tokens. To encode them took a busy core 3 s.
MAX_REPLY_CHARACTERS = 2_000_000
MOST_REPLIES = 20_000  # that are looked through for them, the newest


@dataclass(frozen=True)
class ConversationRow:
    """A conversation in the list. updated_at_utc: of its newest message. messages: the newest
    one's id and how many there are, on all branches. snippet, message_id: where a search found its
    words; "" and None where only the title has them or there was no search. All texts are plain
    text."""

    id: int
    title: str
    is_pinned: bool
    updated_at_utc: str
    snippet: str = ""
    message_id: int | None = None
    folder_id: int | None = None
    messages: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Imported:
    """A conversation of a file, with the numbers that it has there. messages: parents before their
    children."""

    conversation: Conversation
    messages: tuple[StoredMessage, ...]


@dataclass(frozen=True)
class Folder:
    """is_collapsed: its conversations are not shown in the list."""

    id: int
    name: str
    is_collapsed: bool = False


class ConversationList:
    def __init__(self, db: SharedConnection, unlogged: UnloggedTexts) -> None:
        self._db = db
        self._unlogged = unlogged

    @property
    def num_changes(self) -> int:
        """How often this program wrote what the list may show, or a chat in it."""
        return sum(self._db.changes[table] for table in ("conversation", "folder", "message"))

    def rows(self, typed: str = "") -> list[ConversationRow]:
        """Pinned ones first, then the newest. With a search: those that contain all its words."""
        wanted = search.parsed(typed)
        words = wanted.texts
        with self._db.reading() as tables:
            found = [self._row(row) for row in tables.rows(queries.HISTORY) if self._is_shown(row)]
            if not words:
                return found
            hits = search.find(tables, wanted, self._db.is_indexed) | self._in_memory(tables, words)
            texts = self._texts(tables, list(hits.values())[:MAX_SNIPPETS])
        return [
            replace(
                row,
                snippet=search.snippet_of(texts.get(message_id or 0, ""), words),
                message_id=message_id,
            )
            for row in found
            if (message_id := hits.get(row.id)) is not None or _has_all(row.title, words)
        ]

    def earlier_texts(self, max_characters: int = MAX_EARLIER_CHARACTERS) -> tuple[str, ...]:
        """The texts of all messages, oldest first; only the newest where they are longer than
        `max_characters`. For drafters that look texts up."""
        found, left = list[str](), max_characters
        with self._db.reading() as tables:
            for conversation in tables.rows(queries.NEWEST_CONVERSATIONS):
                for row in tables.rows(queries.NEWEST_MESSAGES, conversation["id"]):
                    text = self._unlogged.filled(message_from(row)).text
                    left -= len(text)
                    if left < 0:
                        return tuple(reversed(found))
                    found.append(text)
        return tuple(reversed(found))

    def earlier_replies(self, max_characters: int = MAX_REPLY_CHARACTERS) -> tuple[str, ...]:
        """Return the replies of models that are written in the log, each after its thought, oldest
        first; only the newest where they are longer than `max_characters`. An imported reply has no
        turn, and a copied or continued one would count twice."""
        ids, left = list[int](), max_characters
        with self._db.reading() as tables:
            for row in tables.rows(queries.NEWEST_REPLIES, MOST_REPLIES):
                left -= row["num_characters"]
                if left < 0:
                    break
                ids.append(row["id"])
            rows = _by_id(tables, "id, text, text_exact, thinking", ids)
        rows.sort(key=lambda row: int(row["id"]))
        return tuple(f"{row['thinking'] or ''}{text_of(row)}" for row in rows)

    # changes

    def rename(self, conversation_id: int, title: str) -> None:
        columns = {} if self._unlogged.is_on else {"title": title}
        self.change(conversation_id, title_by="person", **columns)
        self._unlogged.keep_title(conversation_id, title)

    def entitle(self, conversation_id: int, title: str) -> bool:
        """A title by the model, in the place of the first words; whether it was taken."""
        kept = None if self._unlogged.is_on else title
        with self._db.writing() as tables:
            is_taken = tables.execute(queries.ENTITLE, kept, conversation_id) == 1
            tables.changes["conversation"] += is_taken
        if is_taken:
            self._unlogged.keep_title(conversation_id, title)
        return is_taken

    def change(self, conversation_id: int, **columns: str | int | None) -> None:
        """Of one that is not deleted: is_pinned, folder_id (None: in none), when_full (ask, roll or
        stop)."""
        with self._db.writing() as tables:
            _check_exists(tables, conversation_id)
            tables.update("conversation", conversation_id, columns)

    def keep_settings(self, conversation_id: int, settings: Settings) -> None:
        """What the page's fields hold; without the person's texts while those are not written."""
        if self._unlogged.is_on:
            settings = {name: value for name, value in settings.items() if name not in TEXTS}
        self._db.update("conversation", conversation_id, {"settings": written(settings)})

    def delete(self, conversation_id: int) -> None:
        """Remove it from every list. A second call changes nothing."""
        self._db.update("conversation", conversation_id, {"deleted_at_utc": now()})

    def restore(self, conversation_id: int) -> None:
        self._db.update("conversation", conversation_id, {"deleted_at_utc": None})

    def purge(self) -> bool:
        """Delete for good what was deleted, messages too; whether there was any."""
        with self._db.writing() as tables:
            num_purged = sum(tables.execute(statement) for statement in queries.PURGE)
            if num_purged and self._db.is_indexed:
                tables.execute(search.OPTIMIZE)  # else the index keeps its words for a while
        if num_purged:
            with suppress(StoreError):  # it is deleted; its old pages may stay in the -wal for now
                self._db.fold_log()
        return num_purged > 0

    def add_imported(self, imported: Sequence[Imported]) -> list[int]:
        """The new ids. Raises RequestError while texts are not to be written."""
        if self._unlogged.is_on:
            raise RequestError(
                "An import writes texts to the log, but that is switched off. Switch it on, then "
                "import again."
            )
        with self._db.writing() as tables:
            return [_insert(tables, one) for one in imported]

    # rows of the list

    def _row(self, row: dict[str, Any]) -> ConversationRow:
        title = self._unlogged.titles.get(row["id"], row["title"])
        return ConversationRow(
            row["id"],
            title,
            bool(row["is_pinned"]),
            row["updated_at_utc"],
            folder_id=row["folder_id"],
            messages=(row["newest_id"], row["num_messages"]),
        )

    def _is_shown(self, row: dict[str, Any]) -> bool:
        """Whether it has a text to read: one of a session that logged no texts has none."""
        return bool(row["has_text"]) or row["id"] in self._unlogged.titles

    def _in_memory(self, tables: Tables, words: Sequence[str]) -> dict[int, int]:
        """Matches among the texts that are not in the log, as `search.find` returns them."""
        texts = sorted(self._unlogged.texts.items())
        hits = [message_id for message_id, (text, _) in texts if _has_all(text, words)]
        rows = _by_id(tables, "id, conversation_id, deleted_at_utc", hits)
        return {row["conversation_id"]: row["id"] for row in rows if not row["deleted_at_utc"]}

    def _texts(self, tables: Tables, message_ids: Sequence[int]) -> dict[int, str]:
        texts = {row["id"]: row["text"] for row in _by_id(tables, "id, text", message_ids)}
        return {one: self._unlogged.texts.get(one, (text, ""))[0] for one, text in texts.items()}


class Folders:
    """Of the list. One that is deleted gives its conversations back to the top of it."""

    def __init__(self, db: SharedConnection) -> None:
        self._db = db

    def all(self) -> list[Folder]:
        """By name."""
        rows = self._db.rows("SELECT * FROM folder ORDER BY name COLLATE NOCASE, id")
        return [Folder(row["id"], row["name"], bool(row["is_collapsed"])) for row in rows]

    def add(self, name: str) -> int:
        """The new id. Raises RequestError for an empty name."""
        return self._db.insert("folder", {"name": visible_line(name, "name")})

    def rename(self, folder_id: int, name: str) -> None:
        """Raises RequestError for an empty name."""
        self._db.update("folder", folder_id, {"name": visible_line(name, "name")})

    def fold(self, folder_id: int, is_collapsed: bool) -> None:
        self._db.update("folder", folder_id, {"is_collapsed": int(is_collapsed)})

    def delete(self, folder_id: int) -> None:
        with self._db.writing() as tables:
            tables.execute(
                "UPDATE conversation SET folder_id = NULL WHERE folder_id = ?", folder_id
            )
            tables.delete("folder", folder_id)


def _by_id(tables: Tables, columns: str, ids: Sequence[int]) -> list[dict[str, Any]]:
    # Written out: SQLite takes a limited number of parameters.
    listed = ", ".join(str(number) for number in ids)
    return tables.rows(f"SELECT {columns} FROM message WHERE id IN ({listed})")


def _has_all(text: str, words: Sequence[str]) -> bool:
    folded = text.casefold()
    return all(word.casefold() in folded for word in words)


def _check_exists(tables: Tables, conversation_id: int) -> None:
    sql = "SELECT 1 FROM conversation WHERE id = ? AND deleted_at_utc IS NULL"
    if not tables.rows(sql, conversation_id):
        raise missing("conversation", conversation_id)


def _insert(tables: Tables, imported: Imported) -> int:
    """Under a number of its own."""
    conversation = imported.conversation
    row = {
        "title": conversation.title,
        "created_at_utc": conversation.created_at_utc,
        "system_prompt": conversation.system_prompt,
        "is_pinned": int(conversation.is_pinned),
    }
    made = tables.insert("conversation", row)
    ids: dict[int | None, int | None] = {None: None}
    for message in imported.messages:
        columns = {
            "conversation_id": made,
            "parent_id": ids[message.parent_id],
            "role": message.role,
            **text_columns(message.text),
            "state": message.state,
            "created_at_utc": message.created_at_utc,
            "model": message.model,
            "is_edited": int(message.is_edited),
            "thinking": clean(message.thinking) or None,
        }
        ids[message.id] = tables.insert("message", columns)
    tip = {"tip_message_id": ids[conversation.tip_message_id]}
    tables.update("conversation", made, tip)
    return made
