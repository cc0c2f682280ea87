"""The two SQLite connections of the log, shared by threads: transactions, errors as sentences.

Contract: `writing` is one immediate transaction, committed whole or rolled back; `reading` is for
single statements; `snapshot` makes several see one moment, and `apart` serves a long one, each on
a connection of its own. One thread at a time writes, one reads; readers do not wait for a writer
that waits for another program. SQLite's errors become StoreErrors; `diagnose` takes every error, of
the file system too, and an unknown one keeps its own message.

Source: sqlite.org/rescode.html. By message and not by code, so that file errors and SQLite's share
one table.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from localspec.core.errors import StoreError
from localspec.record.rows import bind

BUSY_TIMEOUT_MS = 5000


def connect(name: str, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> Database:
    """A plain connection to a file, a `file:` URI or ":memory:", usable from any thread."""
    # isolation_level None: transactions begin where we say, never implicitly. No plugins: only
    # our own code works on the log.
    conn = sqlite3.connect(
        name,
        timeout=busy_timeout_ms / 1000,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )
    # One damaged byte would else make a whole list or export unreadable.
    conn.text_factory = partial(str, encoding="utf-8", errors="replace")
    return Database(conn, execute_plugins=False)


def read_only(path: Path) -> str:
    return f"{path.as_uri()}?mode=ro"


def is_figure(column: str) -> str:
    """Return the SQL condition that the column holds a figure: 1e15 ms are 30,000 years."""
    return f"abs({column}) < 1e15"


class Tables:
    """Rows in and out of one connection, as plain dicts. changes: how often `insert`, `update` and
    `delete` wrote each table; what `execute` runs is not counted."""

    def __init__(self, conn: sqlite3.Connection) -> None:
        self.conn = conn
        self.lock = threading.RLock()
        self.changes = Counter[str]()

    def execute(self, sql: str, *values: object) -> int:
        """Run a statement; the number of rows it changed."""
        return self.conn.execute(sql, values).rowcount

    def rows(self, sql: str, *values: object) -> list[dict[str, Any]]:
        cursor = self.conn.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=False)) for row in cursor]  # SQLite says they match

    def columns(self, table: str, without: Sequence[str]) -> str:
        """Return all other columns of the table, as SQL lists them. A figure that no reply can
        have, as an infinite one of a damaged log, is unknown."""
        found = ((row["name"], row["type"]) for row in self.rows(f"PRAGMA table_info({table})"))
        return ", ".join(
            f"CASE WHEN {is_figure(f'{table}.{name}')} THEN {table}.{name} END AS {name}"
            if kind == "REAL"
            else f"{table}.{name}"
            for name, kind in found
            if name not in without
        )

    def insert(self, table: str, row: Mapping[str, Any]) -> int:
        """The id of the new row."""
        self.changes[table] += 1
        columns, marks = ", ".join(row), ", ".join("?" * len(row))
        sql = f"INSERT INTO {table} ({columns}) VALUES ({marks})"
        return int(self.conn.execute(sql, bind(row)).lastrowid or 0)

    def update(self, table: str, row_id: int, row: Mapping[str, Any]) -> None:
        self.changes[table] += 1
        columns = ", ".join(f"{name} = ?" for name in row)
        if self.execute(f"UPDATE {table} SET {columns} WHERE id = ?", *bind(row), row_id) != 1:
            raise missing(table, row_id)

    def delete(self, table: str, row_id: int) -> None:
        self.changes[table] += 1
        self.execute(f"DELETE FROM {table} WHERE id = ?", row_id)

    def roll_back(self) -> None:
        if self.conn.in_transaction:  # SQLite may have ended it already when the disk was full
            self.conn.execute("ROLLBACK")

    @contextmanager
    def waiting(self, wait_ms: int | None) -> Iterator[None]:
        """Wait at most this long for another program's lock; None: the usual time."""
        if wait_ms is None:
            yield
            return
        usual_ms = self.conn.execute("PRAGMA busy_timeout").fetchone()[0]
        self.conn.execute(f"PRAGMA busy_timeout = {min(wait_ms, usual_ms)}")
        try:
            yield
        finally:
            self.conn.execute(f"PRAGMA busy_timeout = {usual_ms}")


class SharedConnection:
    """writer and reader are the same connection for a log in memory, whose path is None. notices:
    sentences for the person about the opening. is_indexed: False: this SQLite cannot index texts
    (search)."""

    def __init__(
        self,
        writer: sqlite3.Connection,
        reader: sqlite3.Connection,
        path: Path | None,
        notices: tuple[str, ...],
        is_indexed: bool,
    ) -> None:
        self.path, self.notices, self.is_indexed = path, notices, is_indexed
        self._writer = Tables(writer)
        self._reader = self._writer if reader is writer else Tables(reader)
        self._is_closed = False
        self._file = None if path is None else path.stat()
        self._snapshots = threading.local()  # tables: of the snapshot that this thread is in

    @property
    def changes(self) -> Counter[str]:
        """Of each table by this program."""
        return self._writer.changes

    def close(self) -> None:
        # The writer last: it writes the -wal into the file, which a reader cannot.
        with self._writer.lock, self._reader.lock:
            self._is_closed = True
            self._reader.conn.close()
            self._writer.conn.close()

    def fold_log(self) -> None:
        """Write the -wal into the file and empty it, so that it holds no deleted text. Another
        process that reads may delay this until the log is closed."""
        with self._writer.lock, self.explained():
            self._writer.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    # One statement, in a transaction of its own: as the methods of Tables.

    def rows(self, sql: str, *values: object) -> list[dict[str, Any]]:
        with self.reading() as tables:
            return tables.rows(sql, *values)

    def execute(self, sql: str, *values: object) -> int:
        with self.writing() as tables:
            return tables.execute(sql, *values)

    def insert(self, table: str, row: Mapping[str, Any]) -> int:
        with self.writing() as tables:
            return tables.insert(table, row)

    def update(self, table: str, row_id: int, row: Mapping[str, Any]) -> None:
        with self.writing() as tables:
            tables.update(table, row_id, row)

    @contextmanager
    def reading(self) -> Iterator[Tables]:
        tables: Tables = getattr(self._snapshots, "tables", self._reader)
        with tables.lock, self.explained():
            yield tables

    @contextmanager
    def apart(self) -> Iterator[Tables]:
        """A connection of its own, for what takes long: nobody waits for it. A log in memory has
        one connection only."""
        if self.path is None:
            with self._reader.lock, self.explained():
                yield self._reader
            return
        with self.explained(), closing(connect(read_only(self.path))) as db:
            yield Tables(db.conn)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        with self.apart() as tables:
            tables.execute("BEGIN")
            self._snapshots.tables = tables
            try:
                yield
            finally:
                del self._snapshots.tables
                tables.roll_back()

    @contextmanager
    def writing(self, wait_ms: int | None = None) -> Iterator[Tables]:
        with self._writer.lock, self.explained(), self._writer.waiting(wait_ms):
            self._writer.roll_back()  # what is left of one that could not be rolled back itself
            self._require_file()
            # Immediate: a transaction that reads first and then wants to write would fail at
            # once, without waiting, when another process wrote in between.
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                self._writer.roll_back()
                raise

    def _require_file(self) -> None:
        """Raise StoreError where the path does not name the open file any more: SQLite would go on
        to write to it, and all that would end with this program."""
        if self.path is None or self._file is None:
            return
        with suppress(OSError):
            if os.path.samestat(self.path.stat(), self._file):
                return
        raise StoreError(
            f"The log {self.path} was moved, deleted or replaced while localspec ran. Put it back; "
            "or copy what you need from the page, then start localspec again."
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        if self._is_closed:
            raise StoreError("The log is closed. Start localspec again.")
        try:
            yield
        except sqlite3.Error as error:
            fault = diagnose(error)
            where = "" if self.path is None else f" {self.path}"
            raise StoreError(
                f"The log{where} could not be used: {fault.fact}. {fault.remedy}"
            ) from error


def missing(noun: str, row_id: int) -> StoreError:
    return StoreError(
        f"The log has no {noun} {row_id}: the log is newer than the page. "
        "Reload the page and start a new chat."
    )


@dataclass(frozen=True)
class LogFault:
    """fact: completes "The log cannot be used: …". remedy: a sentence. words: of the messages that
    mean it."""

    fact: str
    remedy: str
    words: tuple[str, ...] = ()


DAMAGE = LogFault(
    "the file is damaged",
    "Start localspec again: it sets the damaged file aside and starts a new one.",
    ("not a database", "malformed", "disk image"),
)
KNOWN = (
    LogFault(
        "another program keeps it locked",
        "Close that program and try again.",
        ("locked", "busy"),
    ),
    LogFault("the disk is full", "Free disk space and try again.", ("is full", "No space left")),
    LogFault(
        "the file or its folder is read-only or out of reach",
        "Allow writing there, or start with another --home.",
        ("readonly", "Read-only", "Permission denied", "not permitted", "unable to open"),
    ),
    DAMAGE,
    LogFault(
        "it has no row of that number, for it is newer than the page",
        "Reload the page and start a new chat.",
        ("FOREIGN KEY",),
    ),
    LogFault(
        "another file or another program's table is in its place",
        "Start with another --home, or write to another file.",
        ("already exists",),
    ),
)


def diagnose(error: Exception) -> LogFault:
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    unknown = LogFault(text, "Check the disk it lies on, or start with another --home.")
    return next((fault for fault in KNOWN if any(w in text for w in fault.words)), unknown)
