"""The versions of the log's tables: a new log, the upgrade of an earlier log, later changes.

`MIGRATIONS` brings a file to the tables of this program in the caller's transaction. A log of
version 19 or later is upgraded where it lies. `python -m localspec upgrade` converts a log of an
earlier version (older_log). A further change of the tables is a new migration at the end; a
migration that has shipped never changes.
"""

from __future__ import annotations

from contextlib import closing
from itertools import chain

from sqlite_utils import Database, Migrations

from localspec.record.hindsight import GOES_WITH_ITS_TURN, TABLE
from localspec.record.tables import TABLES, TURN_BY_TEMPERATURE

MIGRATIONS = Migrations("localspec")

# The newest migration of the oldest log that is upgraded where it lies.
OLDEST_UPGRADED = "m019_formats"
# The migration that `tables` is. An earlier program does not know it and leaves the log alone.
VERSION = "m023_one_script"

# What versions 20 to 22 added, in order. SQLite cannot change the CHECK of a column, so
# `no_speedup` is written anew.
UPGRADES = {
    "m020_checked_tokens": (
        "ALTER TABLE turn ADD COLUMN num_checked_tokens INTEGER",
        "ALTER TABLE step ADD COLUMN num_checked_tokens INTEGER",
    ),
    "m021_turns_of_copies": (
        "ALTER TABLE turn ADD COLUMN is_copy INTEGER NOT NULL DEFAULT 0 CHECK (is_copy IN (0, 1))",
        "DROP VIEW turn_by_temperature",
        TURN_BY_TEMPERATURE,
    ),
    "m022_shared_replies": (
        "ALTER TABLE turn RENAME COLUMN no_speedup TO earlier",
        "ALTER TABLE turn ADD COLUMN no_speedup TEXT"
        " CHECK (no_speedup IN ('load_changed', 'shared', 'too_short'))",
        "UPDATE turn SET no_speedup = earlier",
        "ALTER TABLE turn DROP COLUMN earlier",
    ),
}


class OtherVersion(Exception):
    """The log cannot be upgraded where it lies. The text names its newest migration."""


class NewerLog(OtherVersion):
    """The log has a migration that this program does not have."""


class OlderLog(OtherVersion):
    """The log is of a version before 19."""


@MIGRATIONS(name=VERSION)
def create_or_upgrade(db: Database) -> None:
    """Create the tables in an empty file, or upgrade a log of version 19 to 22."""
    applied = applied_migrations(db)
    statements = (*TABLES.split(";\n"), TURN_BY_TEMPERATURE)
    if applied:
        missing = (UPGRADES[name] for name in UPGRADES if name not in applied)
        statements = tuple(chain.from_iterable(missing))
    for statement in statements:
        db.conn.execute(statement)


@MIGRATIONS(name="m024_hindsight")
def add_hindsight(db: Database) -> None:
    """Add the table of how drafters were judged by finished replies."""
    for statement in (TABLE, GOES_WITH_ITS_TURN):
        db.conn.execute(statement)


@MIGRATIONS(name="m025_tokens_from_disk")
def add_tokens_from_disk(db: Database) -> None:
    """Add the column for tokens of a prompt that came from the disk."""
    db.conn.execute("ALTER TABLE turn ADD COLUMN num_disk_tokens INTEGER")


@MIGRATIONS(name="m026_filled_drafts")
def add_filled_drafts(db: Database) -> None:
    """Add the columns for draft tokens that another drafter appended, and for its name."""
    db.conn.execute("ALTER TABLE step ADD COLUMN num_filled_tokens INTEGER")
    db.conn.execute("ALTER TABLE step ADD COLUMN filler TEXT")


@MIGRATIONS(name="m027_reading_of_drafters")
def add_reading_of_drafters(db: Database) -> None:
    """Add the column for what drafters read before they could guess."""
    db.conn.execute("ALTER TABLE turn ADD COLUMN reading_by TEXT")


def check_version(db: Database) -> None:
    """Raise NewerLog or OlderLog where `MIGRATIONS` cannot bring this file to its tables."""
    applied = applied_migrations(db)
    with closing(Database(memory=True, execute_plugins=False)) as empty:
        known = {migration.name for migration in MIGRATIONS.pending(empty)}
    if newer := [name for name in applied if name not in known and name >= VERSION]:
        raise NewerLog(newer[-1])
    if applied and not known.union((OLDEST_UPGRADED,)).intersection(applied):
        raise OlderLog(applied[-1])


def applied_migrations(db: Database) -> list[str]:
    """Return the names of the migrations that a file has had, oldest first."""
    return [applied.name for applied in MIGRATIONS.applied(db)]
