"""Opens a log at a path, whatever the path holds.

Contract: `open_log` always returns a migrated log and never destroys bytes.

    absent or older          created, or migrated in one transaction
    damaged                  set aside with its -wal and -shm, a fresh one started
    read-only, locked        a log in memory that starts as a copy of the file
    from a newer version     a log in memory; the file is not touched
    older than version 19    the same; the notice names the command that converts it
    no folder, no disk       a log in memory

Every case but the first adds a notice: fact, reason, remedy. `sole_use` keeps a second program
that answers away from the same log; commands may read and write it meanwhile.

Source: sqlite.org/wal.html, sqlite.org/pragma.html.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from sqlite_utils import Database

from localspec.core.errors import AlreadyRunning, StoreError
from localspec.core.files import place_of, try_lock
from localspec.record import search
from localspec.record.connection import (
    BUSY_TIMEOUT_MS,
    DAMAGE,
    SharedConnection,
    connect,
    diagnose,
    read_only,
)
from localspec.record.running import read_running
from localspec.record.schema import MIGRATIONS, NewerLog, OtherVersion, check_version

MIN_SQLITE = (3, 37, 0)  # the first with STRICT tables
SIDE_FILES = ("-wal", "-shm", "-journal")


def open_log(path: Path, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> SharedConnection:
    """The log at `path`, or one in memory with the reason why. Raises StoreError only when this
    Python's SQLite is too old for any log."""
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        raise StoreError(
            f"This Python carries SQLite {sqlite3.sqlite_version}, but the log needs 3.37 or "
            "newer. Install a newer Python."
        )
    path = Path(os.path.abspath(path))
    try:
        place_of(path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        notices = _examine(path, busy_timeout_ms)
        writer = open_file(path, busy_timeout_ms)
        reader = connect(read_only(path), busy_timeout_ms)
        return _opened(writer, reader, path, notices)
    except OtherVersion as version:
        db, notice = _in_memory(), _version_notice(path, version)
    except (OSError, sqlite3.Error) as error:
        db, is_copy = _in_memory_copy(path)
        notice = _memory_notice(path, error, is_copy)
    return _opened(db, db, None, (notice,))


def lock_of(path: Path) -> Path:
    return path.resolve().with_suffix(".lock")  # a link to a log is that log


@contextmanager
def sole_use(path: Path) -> Iterator[None]:
    """Hold the lock of a log; the system drops it with this process. Raises AlreadyRunning while
    another program holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = lock_of(path).open("ab")
    # A circle of links, or nothing can be written there: this run keeps its log in memory.
    except (OSError, RuntimeError):
        yield
        return
    with file:
        if not try_lock(file):
            running = read_running(path.parent)
            where = f" at {running.shown_address}" if running is not None else ""
            raise AlreadyRunning(
                f"localspec is already running on {path.parent}{where}. Use its page or end it, or "
                "start this one with another --home."
            )
        yield


def _opened(
    writer: Database, reader: Database, path: Path | None, notices: tuple[str, ...]
) -> SharedConnection:
    is_indexed = search.has_fts5(writer.conn)
    if not is_indexed:
        notices = (*notices, search.NO_INDEX_NOTICE)
    return SharedConnection(writer.conn, reader.conn, path, notices, is_indexed)


def create_private(path: Path) -> None:
    """Make the file, if it is absent, readable by its owner alone from the first moment.

    SQLite gives its -wal and -shm the same mode; existing ones get it here. On Windows modes have
    no effect: the file is private because a person's folder of application data is; a --home
    elsewhere is as open as its folder."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    for suffix in ("", *SIDE_FILES):
        with suppress(OSError):  # not there, a disk without modes, or another owner's file
            Path(f"{path}{suffix}").chmod(0o600)


def _examine(path: Path, busy_timeout_ms: int) -> tuple[str, ...]:
    """Set a damaged file aside and say so; raise OtherVersion for a newer or much older one.

    By a read-only connection: closing it never writes to the file."""
    if not path.exists() or path.stat().st_size == 0:
        return ()
    with closing(connect(read_only(path), busy_timeout_ms)) as db:
        damage = _damage(db)
        if damage is None:
            check_version(db)
            return ()
    kept = set_aside(path, "corrupt")
    return (
        f"The log {path} was damaged ({damage}). It was kept as {kept.name} beside it, and a "
        f"new, empty log was started. `sqlite3 {kept.name} .recover` may bring its text back.",
    )


def _damage(db: Database) -> str | None:
    try:
        found = str(db.conn.execute("PRAGMA quick_check(1)").fetchone()[0])
    except sqlite3.DatabaseError as error:
        if diagnose(error) is DAMAGE:
            return str(error)
        if "no such module" in str(error):  # an index made by an SQLite that can do more
            return None
        raise
    return None if found == "ok" else found.splitlines()[-1]


def set_aside(path: Path, label: str) -> Path:
    """Rename the file and its side files. Side files first: SQLite would read a stale -wal into a
    new file of the same name."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    kept = path.with_name(f"{path.name}.{label}-{stamp}")
    for suffix in (*SIDE_FILES, ""):
        source = Path(f"{path}{suffix}")
        if source.exists():
            source.rename(f"{kept}{suffix}")
    return kept


def open_file(path: Path, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> Database:
    """Create the file if it is absent, bring it to today's tables, and return its connection."""
    create_private(path)
    db = connect(str(path), busy_timeout_ms)
    try:
        db.conn.execute("PRAGMA journal_mode = WAL")
        db.conn.execute("PRAGMA synchronous = NORMAL")
        db.conn.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten
        return _prepare(db)
    except BaseException:
        db.close()
        raise


def _prepare(db: Database) -> Database:
    """Migrate. One immediate transaction, so that two processes that start together wait for each
    other, and a file that cannot be written fails here."""
    conn = db.conn
    conn.execute("BEGIN IMMEDIATE")
    try:
        is_able = search.has_fts5(conn)
        if not is_able:
            search.drop_triggers(conn)
        MIGRATIONS.apply(db)
        if is_able:
            search.ensure_index(conn)
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise
    conn.execute("PRAGMA foreign_keys = ON")
    return db


def _in_memory() -> Database:
    return _prepare(connect(":memory:"))


def _in_memory_copy(path: Path) -> tuple[Database, bool]:
    """A log in memory, and whether it is a copy of the file: it is where the file can be read."""
    # A read-only folder refuses even readers of a WAL database, except as immutable.
    for mode in ("mode=ro", "immutable=1") if path.is_file() else ():
        memory = connect(":memory:")
        try:
            with closing(connect(f"{path.as_uri()}?{mode}", busy_timeout_ms=0)) as db:
                db.conn.execute("BEGIN")
                # Fails where it is locked; a backup would wait for the lock for ever.
                db.conn.execute("SELECT 1 FROM sqlite_schema").fetchone()
                db.conn.backup(memory.conn)
            if _damage(memory) is None:
                check_version(memory)
                return _prepare(memory), True
        except (sqlite3.Error, OtherVersion):
            pass  # the notice says that the log is not the file
        memory.close()
    return _in_memory(), False


def _version_notice(path: Path, version: OtherVersion) -> str:
    is_newer = isinstance(version, NewerLog)
    writer = "a newer localspec" if is_newer else "a localspec from before November 2026"
    remedy = (
        "Update localspec" if is_newer else "End localspec, run `python -m localspec upgrade` once"
    )
    return (
        f"The log {path} was written by {writer} (it has {version}). It was not touched; this "
        f"session is kept in memory only and is lost on closing. {remedy}, or start with another "
        "--home."
    )


def _memory_notice(path: Path, error: Exception, is_copy: bool) -> str:
    fault = diagnose(error)
    seen = "Earlier chats are shown. " if is_copy else ""
    return (
        f"The log {path} cannot be written: {fault.fact}. {seen}This session is kept in memory "
        f"only and is lost on closing; export it to keep it. {fault.remedy}"
    )
