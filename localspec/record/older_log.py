"""Convert a log of a version before 19, which `schema` does not upgrade where it lies.

A new file takes every row, by the names of tables and columns; what a former version wrote
differently is corrected afterwards. The former file stays, under another name. Nothing is lost if
the conversion ends early: the log is replaced last.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlite_utils import Database

from localspec.core.errors import StoreError
from localspec.core.speculation import MIN_COMPARED_TOKENS
from localspec.record.connection import connect, diagnose, read_only
from localspec.record.opening import SIDE_FILES, open_file, set_aside, sole_use
from localspec.record.schema import NewerLog, OlderLog, check_version

# The former log's table of prompts; each becomes a kept setting.
PRESETS = "SELECT name, system_prompt, temperature, top_p, top_k, min_p, repetition_penalty,\
 max_tokens FROM former.preset"

# Before whole replies had a speedup, `speedup` was that of the rounds alone, and a reply without a
# draft had a speedup that was chance.
SPEEDUPS_OF_ROUNDS = (
    "UPDATE turn SET plain_decode_ms = NULL, speedup = NULL WHERE num_draft_tokens = 0",
    "UPDATE turn SET decode_speedup = speedup, speedup = NULL",
)
MODELS_OF_MESSAGES = (
    "UPDATE message SET model = (SELECT model FROM turn WHERE turn.message_id = message.id)",
)
# Versions 12 and 15 made these two rules. They hold for every later turn, so no version is asked.
RULES = (
    "UPDATE step SET plain_ms = NULL WHERE turn_id IN"
    " (SELECT id FROM turn WHERE plain_decode_ms IS NULL)",
    "UPDATE turn SET speedup = NULL, decode_speedup = NULL, no_speedup = 'too_short'"
    f" WHERE num_output_tokens < {MIN_COMPARED_TOKENS} AND plain_decode_ms IS NOT NULL",
)


@dataclass(frozen=True)
class UpgradedLog:
    """former: the file of the former version, which was kept."""

    former: Path
    num_conversations: int
    num_turns: int


def upgrade_log(path: Path) -> UpgradedLog:
    """Convert the log at `path`. Raise StoreError where it is absent, needs no conversion or cannot
    be read or written, and AlreadyRunning while a program uses it."""
    if not path.is_file():
        raise StoreError(f"There is no log at {path}. Name its folder with --home.")
    path = path.absolute()
    with sole_use(path):
        try:
            _require_older(path)
            return _convert(path)
        except (sqlite3.Error, OSError) as error:
            fault = diagnose(error)
            raise StoreError(
                f"The log {path} was not converted: {fault.fact}. {fault.remedy}"
            ) from error


def _require_older(path: Path) -> None:
    with closing(connect(read_only(path))) as db:
        try:
            check_version(db)
        except OlderLog:
            return
        except NewerLog as version:
            raise StoreError(
                f"The log {path} is of a newer localspec (it has {version}). Update localspec."
            ) from version
    raise StoreError(f"The log {path} needs no conversion: the next start opens it.")


def _convert(path: Path) -> UpgradedLog:
    new = path.with_name(f"{path.name}.new")
    for suffix in ("", *SIDE_FILES):  # An earlier conversion may have ended early.
        Path(f"{new}{suffix}").unlink(missing_ok=True)
    with closing(open_file(new)) as db:
        _copy_rows(db, path)
        (num_conversations,) = db.conn.execute("SELECT count(*) FROM conversation").fetchone()
        (num_turns,) = db.conn.execute("SELECT count(*) FROM turn").fetchone()
        db.conn.execute("PRAGMA journal_mode = DELETE")  # The renamed file has no side files.
    former = set_aside(path, "former")
    new.rename(path)
    return UpgradedLog(former, num_conversations, num_turns)


def _copy_rows(db: Database, path: Path) -> None:
    """Fill the empty log `db` with the rows of the former log at `path`, in one transaction."""
    conn = db.conn
    conn.execute("ATTACH ? AS former", (read_only(path),))
    conn.execute("PRAGMA foreign_keys = OFF")  # A conversation names a message that follows it.
    conn.execute("BEGIN IMMEDIATE")
    for table in _own_tables(conn, "main"):
        shared = ", ".join(_columns(conn, "main", table) & _columns(conn, "former", table))
        if shared:
            conn.execute(f"INSERT INTO main.{table} ({shared}) SELECT {shared} FROM former.{table}")
    _correct(conn)
    if broken := conn.execute("PRAGMA main.foreign_key_check").fetchone():
        raise sqlite3.IntegrityError(f"a row of {broken[0]} refers to a row that is missing")
    conn.execute("COMMIT")
    conn.execute("DETACH former")


def _correct(conn: sqlite3.Connection) -> None:
    """Correct what the former version wrote in another sense."""
    statements = list(RULES)
    if "decode_speedup" not in _columns(conn, "former", "turn"):
        statements = [*SPEEDUPS_OF_ROUNDS, *statements]
    if "model" not in _columns(conn, "former", "message"):
        statements += MODELS_OF_MESSAGES
    for statement in statements:
        conn.execute(statement)
    if _columns(conn, "former", "preset"):
        _take_presets(conn)


def _take_presets(conn: sqlite3.Connection) -> None:
    cursor = conn.execute(PRESETS)
    names = [column[0] for column in cursor.description]
    for row in cursor.fetchall():
        settings = dict(zip(names, row, strict=True))
        name = settings.pop("name")
        texts = {
            key: f"{value:g}" if isinstance(value, float) else str(value)
            for key, value in settings.items()
        }
        conn.execute(
            "INSERT INTO kept_settings (kind, name, settings) VALUES ('prompt', ?, ?)",
            (name, json.dumps(texts)),
        )


def _own_tables(conn: sqlite3.Connection, schema: str) -> list[str]:
    """Return the tables of the log without those of the search index and of the migrations."""
    sql = f"SELECT name FROM {schema}.sqlite_master WHERE type = 'table' ORDER BY rowid"
    names = [name for (name,) in conn.execute(sql)]
    return [name for name in names if not name.startswith(("_", "sqlite_", "message_search"))]


def _columns(conn: sqlite3.Connection, schema: str, table: str) -> set[str]:
    return {row[1] for row in conn.execute(f"PRAGMA {schema}.table_info({table})")}
