"""Search in the texts of conversations: the index, and the syntax of a search.

Contract: `ensure_index` makes the index complete where this SQLite has FTS5; where it has not,
`drop_triggers` removes its triggers, and a later start with FTS5 builds it again. A reply is
indexed when it has ended. All words must be in one message; the last one may be a prefix. Text
between double quotes is a phrase, a star at the end of a word makes it a prefix; all else is text,
never syntax. Signs, emoji and scripts without spaces, which are no words to FTS5's tokenizer, and
every search without FTS5 use LIKE, which reads all texts and ignores case for A to Z only. So does
a word that the index does not have because it touches such a script.

Not here: the list of conversations (conversations). Source: sqlite.org/fts5.html, 4.4.3 and 7.
"""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

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

# Ranges of scripts that are written without spaces, or as Korean with particles at the word. FTS5
# takes a whole clause of them for one word, with the Latin words inside it.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u11ff\u1780-\u17ff\u3040-\u318f\u31f0-\u31ff\u3400-\u9fff"
    "\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
PLAIN_WORD = re.compile(rf"(?:(?![{UNSPACED}_])\w)+")
# Ranges of letters and digits, for GLOB: the words of scripts with spaces are made of them.
SPACED = "0-9A-Za-z\u00c0-\u0dff\u1e00-\u1fff"
# A phrase between quotes, of which the second may still be missing, or a word.
TYPED = re.compile(r'"(?P<phrase>[^"]*[^"\s][^"]*)(?:"(?!\S)|$)|(?P<word>\S+)')
MAX_WORDS = 12
# Characters of a search that are looked at. SQLite takes patterns of at most 50,000 bytes, and
# matching takes as long as text and pattern multiplied.
MAX_TYPED = 1000
LATIN = frozenset({*range(0xC0, 0x250), *range(0x1E00, 0x1F00)})  # letters with accents
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
    typed = clean(typed)[:MAX_TYPED]
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
    for word in indexed:
        patterns = unspaced_patterns(word, word in wanted.prefixes)
        globs = " OR ".join(["message.text GLOB ?"] * len(patterns))
        clauses.append(
            "(message.id IN (SELECT rowid FROM message_search WHERE message_search MATCH ?)"
            f" OR (message.text LIKE ? ESCAPE '\\' AND ({globs})))"
        )
        values += [match_of([word], wanted.prefixes), like_of(word), *patterns]
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


def unspaced_patterns(word: str, is_prefix: bool) -> list[str]:
    """Return GLOB patterns of a word or phrase that touches a script without spaces, which the
    index has as a part of a longer word. The cheaper LIKE has to hold as well."""
    letters = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in word)
    before = [f"{letters}[{UNSPACED}]*", f"*[^{SPACED}]{letters}[{UNSPACED}]*"]
    if is_prefix:
        return [f"*[{UNSPACED}]{letters}*", *before]
    return [f"*[{UNSPACED}]{letters}", f"*[{UNSPACED}]{letters}[^{SPACED}]*", *before]


def like_of(word: str) -> str:
    return "%" + re.sub(r"([\\%_])", r"\\\1", word) + "%"


def snippet_of(text: str, words: Sequence[str]) -> str:
    """Return a line of the text around the first of the words that is in it, as plain text."""
    starts = [start for word in words if (start := _place_of(word, text)) is not None]
    begin = max(0, min(starts, default=0) - SNIPPET_BEFORE)
    piece = " ".join(text[begin : begin + SNIPPET_LENGTH].split())
    before = "…" if begin else ""
    after = "…" if begin + SNIPPET_LENGTH < len(text) else ""
    return f"{before}{piece}{after}"


def _place_of(word: str, text: str) -> int | None:
    """Return where a word or phrase stands in a text: as a whole word, at the beginning of a word,
    or anywhere. Accents, case and the signs between words do not count, as in the index."""
    seen = unicodedata.normalize("NFC", word[:SNIPPET_LENGTH])  # more would not be in the snippet
    letters = f"(?i:{''.join(map(_letter_pattern, seen))})"
    plain = rf"(?:(?![{UNSPACED}_])\w)"
    begin, end = rf"(?<!{plain})", rf"(?!{plain})"
    for pattern in (f"{begin}{letters}{end}", f"{begin}{letters}", letters):
        if match := re.search(pattern, text):
            return match.start()
    return None


def _letter_pattern(letter: str) -> str:
    if unicodedata.combining(letter):
        return ""
    if letter.isspace():
        return r"[\W_]+"
    variants = _variants().get(_base(letter))
    return rf"[{variants}][\u0300-\u036f]*" if variants else re.escape(letter)


@cache
def _variants() -> dict[str, str]:
    """Return the Latin letters and those that are made of them with an accent, by the letter."""
    variants = defaultdict[str, str](str)
    for code in (*LATIN, *range(ord("a"), ord("z") + 1)):
        variants[_base(chr(code))] += chr(code)
    return dict(variants)


def _base(letter: str) -> str:
    """Return the letter without case and, if it is Latin, without its accents."""
    is_latin = ord(letter) in LATIN
    return (unicodedata.normalize("NFD", letter)[0] if is_latin else letter).lower()
