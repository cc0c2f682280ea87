"""Every older schema becomes today's, with its rows; a newer one is left alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database, Migrations

from localspec.record.export import Scope, export
from localspec.record.schema import MIGRATIONS
from localspec.record.store import Store
from tests.kit.samples import LENIENT_SETTINGS, LENIENT_STATS, begin, finish
from tests.record.old_logs import VERSION_2, VERSION_3

# The tables as the first version shipped them, written out: they may never change again.
VERSION_1 = """
CREATE TABLE session (
    id INTEGER PRIMARY KEY, started_at_utc TEXT NOT NULL, app_version TEXT, device TEXT, gpu TEXT,
    driver TEXT, vram_total_bytes INTEGER, ram_total_bytes INTEGER, torch TEXT, transformers TEXT,
    bitsandbytes TEXT, python TEXT, platform TEXT
) STRICT;
CREATE TABLE conversation (
    id INTEGER PRIMARY KEY, title TEXT NOT NULL, created_at_utc TEXT NOT NULL,
    tip_message_id INTEGER REFERENCES message(id)
) STRICT;
CREATE TABLE message (
    id INTEGER PRIMARY KEY, conversation_id INTEGER NOT NULL REFERENCES conversation(id),
    parent_id INTEGER REFERENCES message(id),
    role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
    text TEXT NOT NULL, text_exact TEXT,
    state TEXT NOT NULL CHECK (state IN ('draft', 'complete', 'stopped', 'error', 'interrupted')),
    created_at_utc TEXT NOT NULL
) STRICT;
CREATE TABLE turn (
    id INTEGER PRIMARY KEY, session_id INTEGER NOT NULL REFERENCES session(id),
    conversation_id INTEGER NOT NULL REFERENCES conversation(id),
    message_id INTEGER NOT NULL UNIQUE REFERENCES message(id), started_at_utc TEXT NOT NULL,
    finished_at_utc TEXT, model TEXT, draft TEXT, device TEXT, dtype TEXT, context_length INTEGER,
    drafter_requested TEXT, num_draft_tokens_requested INTEGER, temperature REAL, top_k INTEGER,
    top_p REAL, min_p REAL, repetition_penalty REAL, seed INTEGER, max_tokens INTEGER,
    system_prompt TEXT, finish_reason TEXT, error TEXT, drafter TEXT, reason TEXT,
    exact INTEGER CHECK (exact IN (0, 1)), num_prompt_tokens INTEGER, num_reused_tokens INTEGER,
    num_output_tokens INTEGER, num_steps INTEGER, num_drafts INTEGER, num_draft_tokens INTEGER,
    num_accepted_tokens INTEGER, acceptance_rate REAL, draft_share REAL,
    mean_accepted_length REAL, mean_num_draft_tokens REAL, tokens_per_second REAL, speedup REAL,
    ttft_ms REAL, prefill_ms REAL, decode_ms REAL, plain_decode_ms REAL, drafted_by TEXT,
    token_ids TEXT, provenance TEXT
) STRICT;
CREATE TABLE step (
    turn_id INTEGER NOT NULL REFERENCES turn(id), n INTEGER NOT NULL, drafter TEXT NOT NULL,
    num_draft_tokens INTEGER NOT NULL, num_accepted_tokens INTEGER NOT NULL,
    num_output_tokens INTEGER NOT NULL, draft_ms REAL, verify_ms REAL, context_length INTEGER,
    is_probe INTEGER NOT NULL CHECK (is_probe IN (0, 1)), signal TEXT, PRIMARY KEY (turn_id, n)
) STRICT;
CREATE TABLE calibration (
    key TEXT PRIMARY KEY, state TEXT NOT NULL, updated_at_utc TEXT NOT NULL
) STRICT;
CREATE TABLE _sqlite_migrations (
    id INTEGER PRIMARY KEY, migration_set TEXT, name TEXT, applied_at TEXT
);
CREATE UNIQUE INDEX idx__sqlite_migrations_migration_set_name
    ON _sqlite_migrations (migration_set, name);
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('localspec', 'm001_tables', '2026-11-20 14:00:00+00:00');
INSERT INTO session (started_at_utc, app_version) VALUES ('2026-11-20T14:00:00.000+00:00', '0.1');
INSERT INTO conversation (title, created_at_utc) VALUES ('old', '2026-11-20T14:00:00.000+00:00');
INSERT INTO message (conversation_id, role, text, state, created_at_utc)
    VALUES (1, 'user', 'from before', 'complete', '2026-11-20T14:00:01.000+00:00');
INSERT INTO message (conversation_id, parent_id, role, text, state, created_at_utc)
    VALUES (1, 1, 'assistant', 'half', 'draft', '2026-11-20T14:00:02.000+00:00');
INSERT INTO turn (session_id, conversation_id, message_id, started_at_utc, temperature)
    VALUES (1, 1, 2, '2026-11-20T14:00:02.000+00:00', 0.5);
"""


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


@contextmanager
def upgraded(tmp_path: Path, stop_before: str, rows: str) -> Iterator[Store]:
    """The store over a log of the version before a migration, which these statements filled. It
    opens without a notice, and at the end has the shape of a new one."""
    old = tmp_path / "old.db"
    with closing(Database(old)) as db:
        MIGRATIONS.apply(db, stop_before=stop_before)
        db.conn.executescript(rows)
    with closing(Store.open(old)) as store:
        assert store.path is not None and store.notices == ()
        yield store
    assert shape(old) == shape(blank(tmp_path / "new.db"))


def test_version_1_becomes_todays_with_its_rows(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    with closing(sqlite3.connect(old)) as conn:
        conn.executescript(VERSION_1)
    with closing(Store.open(old)) as store:
        assert store.path is not None and store.notices == ()
        store.tidy()
        assert [(m.text, m.state) for m in store.branch(2)] == [
            ("from before", "complete"),
            ("half", "interrupted"),
        ]
        assert store.turn_rows()[0]["temperature"] == 0.5
        finish(store, begin(store))
    assert shape(old) == shape(blank(tmp_path / "new.db"))


def test_a_log_without_leniency_is_read_exported_and_gone_on_with(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    with closing(Database(old)) as db:
        MIGRATIONS.apply(db, stop_before="m003_leniency")
        db.conn.executescript(VERSION_2)
    with closing(Store.open(old)) as store:
        assert store.path is not None and store.notices == ()
        (row,) = store.turn_rows()
        assert (row["exact"], row["num_accepted_tokens"]) == (True, 3)
        assert (row["workload"], row["leniency"], row["num_lenient_tokens"]) == (None,) * 3
        assert store.step_rows(1)[0]["num_lenient_tokens"] is None
        for form in ("csv", "jsonl", "markdown", "sqlite"):
            export(store, Scope(), form, tmp_path / form)
        finish(store, begin(store, settings=LENIENT_SETTINGS), stats=LENIENT_STATS)
        row = store.turn_rows()[-1]
        assert (row["exact"], row["workload"], row["num_lenient_tokens"]) == (False, "code", 2)
    assert "answered" in (tmp_path / "markdown").read_text()
    assert shape(old) == shape(blank(tmp_path / "new.db"))


def test_a_log_without_history_is_listed_found_and_gone_on_with(tmp_path: Path) -> None:
    with upgraded(tmp_path, "m004_history_and_presets", VERSION_3) as store:
        assert store.logs_text
        (row,) = store.conversation_list.rows()
        assert (row.title, row.is_pinned) == ("old", False)
        assert row.updated_at_utc == "2026-11-20T14:00:04Z"
        assert [m.text for m in store.branch(4)] == ["asked", "an\0other", "and then?"]
        assert store.message_tree.sibling_groups(1) == {None: (1,), 1: (2, 3), 3: (4,)}
        assert [one.id for one in store.conversation_list.rows("answer")] == [1]
        assert store.conversation_list.rows("then")[0].message_id == 4
        assert store.turn_rows()[0]["continues_message_id"] is None
        assert store.prompts.all() == {}
        assert store.conversations()[0].system_prompt is None
        store.conversation_list.change(1, is_pinned=1)
        store.conversation_list.delete(1)
        store.conversation_list.restore(1)
        finish(store, begin(store))


# What the program before speedups of whole replies wrote: those of the rounds alone.
VERSION_5 = (
    VERSION_2.replace("5, 0, NULL", "5, 0, NULL, NULL")
    + """
UPDATE turn SET plain_decode_ms = 18.0, speedup = 2.0, num_output_tokens = 8;
INSERT INTO message (conversation_id, parent_id, role, text, state, created_at_utc)
    VALUES (1, 1, 'assistant', 'busy', 'complete', '2026-11-20T14:00:05Z');
INSERT INTO turn (session_id, conversation_id, message_id, started_at_utc, drafter,
    num_output_tokens, num_draft_tokens, decode_ms, plain_decode_ms, speedup)
    VALUES (1, 1, 3, '2026-11-20T14:00:05Z', 'off', 4, 0, 90.0, 33.3, 0.37);
"""
)


def test_an_old_speedup_is_of_the_rounds_and_a_turn_without_drafts_has_none(tmp_path: Path) -> None:
    with upgraded(tmp_path, "m006_whole_replies_made_again", VERSION_5) as store:
        drafted, plain = store.turn_rows()
        assert (drafted["decode_speedup"], drafted["speedup"]) == (2.0, None)
        assert (drafted["plain_decode_ms"], drafted["reply_ms"]) == (18.0, None)
        unknown = ("decode_speedup", "speedup", "plain_decode_ms")
        assert [plain[name] for name in unknown] == [None] * 3
        assert store.step_rows(1)[0]["plain_ms"] is None
        for form in ("csv", "jsonl", "markdown", "sqlite"):
            export(store, Scope(), form, tmp_path / form)
        finish(store, begin(store))


# The same after speedups of whole replies, whose turns have one column more.
VERSION_7 = VERSION_5.replace("5, 0, NULL, NULL", "5, 0, NULL, NULL, NULL")


def test_a_log_without_models_of_messages_takes_them_from_its_turns(tmp_path: Path) -> None:
    with upgraded(
        tmp_path,
        "m008_models_edits_and_deleted_messages",
        VERSION_7,
    ) as store:
        assert [(one.model, one.is_edited) for one in store.messages(1)] == [
            (None, False), ("m", False), (None, False)
        ]  # fmt: skip
        store.message_tree.delete(2)
        assert [row["message_id"] for row in store.turn_rows()] == [3]
        store.message_tree.restore(1, 2)
        finish(store, begin(store))


def test_a_log_without_folders_takes_them_and_keeps_its_titles(tmp_path: Path) -> None:
    with upgraded(
        tmp_path,
        "m010_folders_titles_and_full_contexts",
        VERSION_7,
    ) as store:
        assert not store.conversation_list.entitle(1, "by a model"), "a person may have written it"
        store.conversation_list.change(1, folder_id=store.folders.add("old ones"))
        assert store.conversation_list.rows()[0].folder_id == 1
        store.folders.delete(1)
        assert (store.folders.all(), store.conversation_list.rows()[0].folder_id) == ([], None)
        finish(store, begin(store, "new"))
        assert store.conversation_list.entitle(2, "by a model")
        store.conversation_list.rename(2, "mine")
        assert not store.conversation_list.entitle(2, "by a model")


def test_an_old_reply_of_a_few_tokens_keeps_its_times_and_loses_its_speedup(
    tmp_path: Path,
) -> None:
    short = VERSION_7.replace("num_output_tokens = 8", "num_output_tokens = 7")
    busy = "UPDATE turn SET no_speedup = 'load_changed', plain_decode_ms = NULL WHERE id = 2;"
    with upgraded(tmp_path, "m015_short_replies", short + busy) as store:
        few, other = store.turn_rows()
        assert (few["plain_decode_ms"], few["speedup"], few["no_speedup"]) == (
            18.0, None, "too_short",
        )  # fmt: skip
        assert other["no_speedup"] == "load_changed"
        finish(store, begin(store))


VERSION_10 = """
INSERT INTO preset VALUES ('Mine', 'Be "brief".', 0.7, 1.0, 40, 0.05, 1.1, 256);
INSERT INTO conversation (title, created_at_utc, system_prompt) VALUES ('old', 't', 'as was');
"""


def test_an_old_preset_becomes_a_prompt_that_sets_the_other_fields_too(tmp_path: Path) -> None:
    with upgraded(tmp_path, "m011_settings_of_chats_prompts_and_models", VERSION_10) as store:
        assert store.prompts.all() == {
            "Mine": {
                "system_prompt": 'Be "brief".', "temperature": "0.7", "top_p": "1", "top_k": "40",
                "min_p": "0.05", "repetition_penalty": "1.1", "max_tokens": "256",
            }
        }  # fmt: skip
        (conversation,) = store.conversations()
        assert (conversation.settings, conversation.system_prompt) == (None, "as was")


def test_the_view_tells_lenient_turns_from_exact_ones(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with closing(Store.open(path)) as store:
        finish(store, begin(store))
        finish(store, begin(store, settings=LENIENT_SETTINGS), stats=LENIENT_STATS)
    with closing(sqlite3.connect(path)) as conn:
        seen = conn.execute("SELECT exact, num_turns FROM turn_by_temperature ORDER BY exact")
        assert seen.fetchall() == [(0, 1), (1, 1)]


def steps() -> list[Any]:
    """Every migration, as none of them is applied to an empty file."""
    with closing(Database(memory=True)) as empty:
        return list(MIGRATIONS.pending(empty))


@pytest.mark.slow
@pytest.mark.parametrize("name", [step.name for step in steps()])
def test_any_step_of_the_way_becomes_todays(tmp_path: Path, name: str) -> None:
    old = tmp_path / "old.db"
    with closing(Database(old)) as db:
        MIGRATIONS.apply(db, stop_before=name)
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
    for step in steps():
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
