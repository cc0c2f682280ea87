"""A log of a version since 19 becomes today's with its rows; a new log has the same tables."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database, Migrations

from localspec.record.export import Scope, export
from localspec.record.schema import MIGRATIONS, UPGRADES
from localspec.record.store import Store
from tests.kit.older_logs import write_log
from tests.kit.samples import LENIENT_SETTINGS, LENIENT_STATS, begin, finish


def shape(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Columns of every table and view, and the indexes, without regard to spacing."""
    with closing(sqlite3.connect(path)) as conn:
        names = conn.execute("SELECT type, name FROM sqlite_master ORDER BY type, name").fetchall()
        return {
            f"{kind} {name}": conn.execute(f"PRAGMA table_info({name})").fetchall()
            for kind, name in names
        }


def blank(path: Path) -> Path:
    Store.open(path).close()
    return path


def test_a_log_of_version_19_is_upgraded_where_it_lies(tmp_path: Path) -> None:
    old = write_log(tmp_path / "old.db", 19)
    with closing(Store.open(old)) as store:
        assert store.path is not None and store.notices == ()
        store.tidy()
        assert [m.text for m in store.branch(4)] == ["asked", "an\0other", "and then?"]
        assert store.branch(5)[-1].state == "interrupted"
        assert [one.id for one in store.conversation_list.rows("answer")] == [1]
        row = store.turn_rows()[0]
        assert (row["speedup"], row["num_checked_tokens"], row["no_speedup"]) == (2.0, None, None)
        finish(store, begin(store, settings=LENIENT_SETTINGS), stats=LENIENT_STATS)
        for form in ("csv", "jsonl", "markdown", "sqlite"):
            export(store, Scope(), form, tmp_path / form)
    assert shape(old) == shape(blank(tmp_path / "new.db"))


def test_the_view_tells_lenient_turns_from_exact_ones(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with closing(Store.open(path)) as store:
        finish(store, begin(store))
        finish(store, begin(store, settings=LENIENT_SETTINGS), stats=LENIENT_STATS)
    with closing(sqlite3.connect(path)) as conn:
        seen = conn.execute("SELECT exact, num_turns FROM turn_by_temperature ORDER BY exact")
        assert seen.fetchall() == [(0, 1), (1, 1)]


@pytest.mark.parametrize("name", UPGRADES)
def test_a_log_of_any_version_since_19_becomes_todays(tmp_path: Path, name: str) -> None:
    old = write_log(tmp_path / "old.db", 19)
    with closing(sqlite3.connect(old)) as conn:
        for version in UPGRADES:
            for statement in UPGRADES[version]:
                conn.execute(statement)
            conn.execute(
                "INSERT INTO _sqlite_migrations (migration_set, name) VALUES ('localspec', ?)",
                (version,),
            )
            if version == name:
                break
        conn.commit()
    blank(old)
    assert shape(old) == shape(blank(tmp_path / "new.db"))


def test_opening_again_changes_nothing(tmp_path: Path) -> None:
    path = blank(tmp_path / "log.db")
    before = shape(path)
    blank(path)
    assert shape(path) == before


def test_failing_migration_leaves_the_old_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = blank(tmp_path / "log.db")
    with closing(Store.open(path)) as store:
        store.create_conversation("in the way of the migration")
    before = shape(path)

    def m999_fails_on_rows(db: Database) -> None:
        db.conn.execute("CREATE TABLE half_made (id INTEGER)")
        db.conn.execute("UPDATE conversation SET title = NULL")

    longer = Migrations("localspec")
    with closing(Database(memory=True)) as empty:
        for step in MIGRATIONS.pending(empty):
            longer(name=step.name)(step.fn)
    longer()(m999_fails_on_rows)
    monkeypatch.setattr("localspec.record.opening.MIGRATIONS", longer)
    with closing(Store.open(path)) as store:
        assert store.path is None
        assert "NOT NULL constraint failed" in store.notices[0]
    assert shape(path) == before


def test_all_own_tables_are_strict_with_foreign_keys(tmp_path: Path) -> None:
    path = blank(tmp_path / "log.db")
    with closing(sqlite3.connect(path)) as conn:
        strict = dict(conn.execute("SELECT name, strict FROM pragma_table_list WHERE type='table'"))
        links = {
            (table, row[3], row[2])
            for table in ("conversation", "message", "turn", "step")
            for row in conn.execute(f"PRAGMA foreign_key_list({table})")
        }
    own = ("session", "conversation", "message", "turn", "step", "calibration", "folder")
    own += ("kept_settings",)
    assert all(strict[name] == 1 for name in own)
    assert links == {
        ("conversation", "tip_message_id", "message"),
        ("conversation", "folder_id", "folder"),
        ("message", "conversation_id", "conversation"),
        ("message", "parent_id", "message"),
        ("turn", "session_id", "session"),
        ("turn", "conversation_id", "conversation"),
        ("turn", "message_id", "message"),
        ("turn", "continues_message_id", "message"),
        ("step", "turn_id", "turn"),
    }
