"""Search in the texts of conversations: the index, and the syntax of a search.

Contract: `ensure_index` makes the index complete where this SQLite has FTS5; where it has not,
`drop_triggers` removes its triggers, and a later start with FTS5 builds it again. A reply is
indexed when it has ended. All words must be in one message; the last one may be a prefix. Text
between double quotes is a phrase, a star at the end of a word makes it a prefix; all else is text,
never syntax. Signs, emoji and scripts without spaces, which are no words to FTS5's tokenizer, and
every search without FTS5 use LIKE, which reads all texts and ignores case for A to Z only.

Not here: the list of conversations (conversations). Source: sqlite.org/fts5.html, 4.4.3 and 7.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from localspec.record.connection import Tables
from localspec.record.rows import clean

# A view, so that a rebuild excludes growing replies as the triggers do.
INDEX = (
    "CREATE VIEW message_search_source AS SELECT id, text FROM message WHERE state <> 'draft'",
    """
    CREATE VIRTUAL TABLE message_search USING fts5(
        text, content = 'message_search_source', content_rowid = 'id',
        tokenize = 'unicode61 remove_diacritics 2', prefix = '2 3'
    )
    """,
)
TRIGGERS = {
    "message_search_insert": """
    AFTER INSERT ON message WHEN new.state <> 'draft' BEGIN
        INSERT INTO message_search (rowid, text) VALUES (new.id, new.text);
    END
    """,
    "message_search_update": """
    AFTER UPDATE OF text, state ON message BEGIN
        INSERT INTO message_search (message_search, rowid, text)
            SELECT 'delete', old.id, old.text WHERE old.state <> 'draft';
        INSERT INTO message_search (rowid, text)
            SELECT new.id, new.text WHERE new.state <> 'draft';
    END
    """,
    "message_search_delete": """
    AFTER DELETE ON message WHEN old.state <> 'draft' BEGIN
        INSERT INTO message_search (message_search, rowid, text)
            VALUES ('delete', old.id, old.text);
    END
    """,
}
REBUILD = "INSERT INTO message_search (message_search) VALUES ('rebuild')"
OPTIMIZE = "INSERT INTO message_search (message_search) VALUES ('optimize')"

NO_INDEX_NOTICE = (
    "Search reads every text, because this Python's SQLite has no FTS5. It finds the same words, "
    "but more slowly. A Python from python.org has FTS5."
)

# Scripts without spaces: FTS5 takes a whole clause of them for one word.
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
PLAIN_WORD = re.compile(rf"(?:(?![{UNSPACED}_])\w)+")
# A phrase between quotes, of which the second may still be missing, or a word.
TYPED = re.compile(r'"(?P<phrase>[^"]*[^"\s][^"]*)(?:"(?!\S)|$)|(?P<word>\S+)')
MAX_WORDS = 12
SNIPPET_BEFORE = 32
SNIPPET_LENGTH = 120


def has_fts5(conn: sqlite3.Connection) -> bool:
    try:
        conn.execute("CREATE VIRTUAL TABLE temp.fts5_probe USING fts5(text)")
    except sqlite3.OperationalError:
        return False
    conn.execute("DROP TABLE temp.fts5_probe")
    return True


def drop_triggers(conn: sqlite3.Connection) -> None:
    """Without FTS5, whose absence would make every write fail in a trigger."""
    for name in TRIGGERS:
        conn.execute(f"DROP TRIGGER IF EXISTS {name}")


def ensure_index(conn: sqlite3.Connection) -> None:
    """With FTS5: make or complete the index, inside the caller's transaction."""
    found = {name for (name,) in conn.execute("SELECT name FROM sqlite_master")}
    if "message_search" not in found:
        for statement in INDEX:
            conn.execute(statement)
    if not found.issuperset(TRIGGERS):
        drop_triggers(conn)
        for name, event_and_work in TRIGGERS.items():
            conn.execute(f"CREATE TRIGGER {name} {event_and_work}")
        conn.execute(REBUILD)


@dataclass(frozen=True)
class Query:
    """A parsed search. texts: the words and phrases. prefixes: those that may be only the beginning
    of a word."""

    texts: tuple[str, ...]
    prefixes: frozenset[str] = frozenset()


def parsed(typed: str) -> Query:
    """The words and phrases of a search, with their case."""
    typed = clean(typed)
    texts, prefixes = list[str](), set[str]()
    for found in list(TYPED.finditer(typed))[:MAX_WORDS]:
        phrase, word = found["phrase"], found["word"]
        text = " ".join(phrase.split()) if phrase is not None else word
        has_star = text.endswith("*") and PLAIN_WORD.fullmatch(text[:-1]) is not None
        text = text[:-1] if has_star else text
        texts.append(text)
        if has_star or (found.end() == len(typed) and not found.group().endswith('"')):
            prefixes.add(text)
    return Query(tuple(texts), frozenset(prefixes))


def find(tables: Tables, wanted: Query, is_indexed: bool) -> dict[int, int]:
    """The newest message with all words and phrases, by conversation id."""
    indexed = [text for text in wanted.texts if is_indexed and _is_plain(text)]
    others = [word for word in wanted.texts if word not in indexed]
    clauses, values = ["message.state <> 'draft'", "message.deleted_at_utc IS NULL"], list[str]()
    if indexed:
        clauses.append(
            "message.id IN (SELECT rowid FROM message_search WHERE message_search MATCH ?)"
        )
        values.append(match_of(indexed, wanted.prefixes))
    for word in others:
        clauses.append("message.text LIKE ? ESCAPE '\\'")
        values.append(like_of(word))
    rows = tables.rows(
        "SELECT conversation_id, max(message.id) AS message_id FROM message "
        f"WHERE {' AND '.join(clauses)} GROUP BY conversation_id",
        *values,
    )
    return {row["conversation_id"]: row["message_id"] for row in rows}


def _is_plain(text: str) -> bool:
    return all(PLAIN_WORD.fullmatch(word) for word in text.split())


def match_of(words: Sequence[str], prefixes: Collection[str]) -> str:
    """The FTS5 expression for these words and phrases, whatever they contain."""
    quoted = ['"' + word.replace('"', '""') + '"' + "*" * (word in prefixes) for word in words]
    return " ".join(quoted)


def like_of(word: str) -> str:
    return "%" + re.sub(r"([\\%_])", r"\\\1", word) + "%"


def snippet_of(text: str, words: Sequence[str]) -> str:
    """A line of the text around the first of the words that is in it, as plain text."""
    folded = text.lower()
    starts = [start for word in words if (start := folded.find(word.lower())) >= 0]
    begin = max(0, min(starts, default=0) - SNIPPET_BEFORE)
    piece = " ".join(text[begin : begin + SNIPPET_LENGTH].split())
    before = "…" if begin else ""
    after = "…" if begin + SNIPPET_LENGTH < len(text) else ""
    return f"{before}{piece}{after}"
