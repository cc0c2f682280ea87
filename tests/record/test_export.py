"""Exports hold what the log holds, no more than was asked for, and whole or not at all."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from localspec.core.errors import StoreError
from localspec.record.connection import Tables
from localspec.record.export import CSV_COLUMNS, Format, Scope, csv_cell, export
from localspec.record.store import Store
from tests.kit.samples import (
    INFO,
    LENIENT_SETTINGS,
    LENIENT_STATS,
    SETTINGS,
    STATS,
    begin,
    finish,
    open_store,
)

FORMATS: tuple[Format, ...] = get_args(Format)
SURROGATE = "a\ud83d b\0"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sessions, two conversations; the second session goes on in the first conversation."""
    folder = tmp_path_factory.mktemp("written")
    with closing(open_store(folder)) as store:
        finish(store, begin(store, "alpha-question"), "alpha-answer")
        finish(store, begin(store, "beta-question"), "beta-answer")
        tip = store.conversations()[0].tip_message_id
        asked = store.add_message(1, tip, "user", "gamma-question")
        finish(store, store.begin_turn(2, 1, asked, SETTINGS), "gamma-answer")
    return folder


@pytest.fixture
def filled_store(written: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of that log, open."""
    with closing(open_store(shutil.copytree(written, tmp_path / "home"))) as opened:
        yield opened


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def json_records(path: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["type"] == kind]


def test_csv_has_each_turn_with_its_numbers_machine_and_texts(
    filled_store: Store, tmp_path: Path
) -> None:
    export(filled_store, Scope(), "csv", tmp_path / "out.csv")
    rows = csv_rows(tmp_path / "out.csv")
    assert [row["reply"] for row in rows] == ["alpha-answer", "beta-answer", "gamma-answer"]
    first = rows[0]
    for name, value in filled_store.turn_rows()[0].items():
        if isinstance(value, dict):
            assert json.loads(first[name]) == value
        elif isinstance(value, str):
            assert first[name] == value
        else:
            assert first[name] == "" if value is None else float(first[name]) == float(value)
    assert float(first["acceptance_rate"]) == STATS.acceptance_rate
    assert (first["prompt"], first["conversation_title"]) == ("alpha-question", "alpha-question")
    assert (first["torch"], first["gpu"], first["error"]) == ("2.13.0", "", "")


def test_csv_columns_cover_every_number_of_a_turn(filled_store: Store) -> None:
    assert set(filled_store.turn_rows()[0]) <= set(CSV_COLUMNS)
    assert {*asdict(INFO)} <= set(CSV_COLUMNS)
    assert len(set(CSV_COLUMNS)) == len(CSV_COLUMNS)


def test_every_export_tells_a_lenient_turn(filled_store: Store, tmp_path: Path) -> None:
    finish(
        filled_store, begin(filled_store, "loosely", LENIENT_SETTINGS), "reply", stats=LENIENT_STATS
    )
    for format in ("csv", "jsonl", "markdown"):
        export(filled_store, Scope(), format, tmp_path / format)
    *exact, lenient = csv_rows(tmp_path / "csv")
    assert {(row["exact"], row["num_lenient_tokens"], row["leniency"]) for row in exact} == {
        ("1", "0", "")
    }
    assert (lenient["exact"], lenient["num_lenient_tokens"]) == ("0", "2")
    assert json.loads(lenient["leniency"]) == {"rule": "factor", "factor": 2.0}
    turn = json_records(tmp_path / "jsonl", "turn")[-1]
    assert (turn["exact"], turn["num_lenient_tokens"], turn["workload"]) == (False, 2, "code")
    assert "2 of 8 tokens would have been refused" in (tmp_path / "markdown").read_text()


def test_empty_log_exports_in_every_format(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "home")) as store:
        for format in FORMATS:
            export(store, Scope(), format, tmp_path / format)
    assert (tmp_path / "csv").read_bytes() == ",".join(CSV_COLUMNS).encode() + b"\r\n"
    assert (tmp_path / "jsonl").read_text().count("\n") == 1  # the version of the format
    assert (tmp_path / "markdown").read_text() == "# localspec export\n\n"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠"])
def test_csv_text_never_starts_a_formula(filled_store: Store, tmp_path: Path, start: str) -> None:
    evil = f"{start}cmd|' /C calc'!A0"
    finish(
        filled_store,
        begin(filled_store, evil, replace(SETTINGS, model=evil, system_prompt=evil)),
        evil,
    )
    export(filled_store, Scope(), "csv", tmp_path / "out.csv")
    row = csv_rows(tmp_path / "out.csv")[-1]
    for name in ("prompt", "reply", "conversation_title", "model", "system_prompt"):
        assert row[name] == f"'{evil}", name


def test_csv_numbers_stay_numbers_and_other_text_stays_itself() -> None:
    assert [csv_cell(value) for value in (-1, -0.5, 0, None, True)] == [-1, -0.5, 0, None, 1]
    assert csv_cell(" =1+1") == " =1+1"
    assert csv_cell("a=b") == "a=b"
    assert csv_cell("") == ""
    assert csv_cell("\ud800") == "\ufffd"


def test_jsonl_is_the_log_exactly(filled_store: Store, tmp_path: Path) -> None:
    finish(filled_store, begin(filled_store, SURROGATE), SURROGATE)
    out = tmp_path / "out.jsonl"
    export(filled_store, Scope(), "jsonl", out)
    messages = [
        {"type": "message", **asdict(message)}
        for conversation in filled_store.conversations()
        for message in filled_store.messages(conversation.id)
    ]
    assert json_records(out, "message") == messages
    assert messages[-1]["text"] == SURROGATE
    assert [{**row, "type": "session"} for row in filled_store.session_rows()] == json_records(
        out, "session"
    )
    turns = json_records(out, "turn")
    for turn, row in zip(turns, filled_store.turn_rows(), strict=True):
        read = {name: json.loads(row[name]) for name in ("drafted_by", "reading_by")}
        assert {**row, **read}.items() <= turn.items()
        assert (turn["token_ids"], turn["provenance"]) == filled_store.reply_tokens(
            row["message_id"]
        )
    assert [step["signal"] for step in turns[0]["steps"]] == [3, ["len", 2], None]
    assert [step["is_probe"] for step in turns[0]["steps"]] == [False, True, False]


def test_markdown_says_with_what_and_on_what(filled_store: Store, tmp_path: Path) -> None:
    export(filled_store, Scope(), "markdown", tmp_path / "out.md")
    text = (tmp_path / "out.md").read_text(encoding="utf-8")
    for word in (
        "demo-target",
        "demo-draft",
        "| 7 |",
        "| torch | 2.13.0 |",
        "| memory | 16.0 GiB |",
    ):
        assert word in text, word
    assert "| 266.6667 | 1.5357 | 2 | – | – | 0.7143 | 0.625 | 3.5 | 3.5 |" in text
    places = [text.index(f"> {name}-answer") for name in ("alpha", "gamma", "beta")]
    assert places == sorted(places)


SCOPES = [
    (Scope(), {"alpha", "beta", "gamma"}, 3),
    (Scope(session_id=1), {"alpha", "gamma"}, 1),
    (Scope(session_id=2), {"alpha", "beta", "gamma"}, 2),
    (Scope(conversation_id=1), {"alpha", "gamma"}, 2),
    (Scope(conversation_id=2), {"beta"}, 1),
    (Scope(session_id=1, conversation_id=2), set(), 0),
    (Scope(session_id=99), set(), 0),
]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["jsonl", "markdown", "sqlite"])
@pytest.mark.parametrize(("scope", "words", "num_turns"), SCOPES)
def test_scope_holds_what_was_asked_for_and_no_byte_more(
    filled_store: Store,
    tmp_path: Path,
    format: Format,
    scope: Scope,
    words: set[str],
    num_turns: int,
) -> None:
    out = tmp_path / "out"
    export(filled_store, scope, format, out)
    data = out.read_bytes()
    assert {
        name for name in ("alpha", "beta", "gamma") if f"{name}-answer".encode() in data
    } == words
    if format == "jsonl":
        assert len(json_records(out, "turn")) == num_turns


@pytest.mark.parametrize("format", ["csv", "jsonl", "markdown", "sqlite"])
@pytest.mark.parametrize("name", ["50 % of it?#1&mode=ro", "字", "not UTF-8: \udcff", "file:it"])
def test_any_name_of_a_file_will_do(
    filled_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: Format, name: str
) -> None:
    if sys.platform in ("win32", "darwin") and name[0] != "字":
        pytest.skip("no such names here")
    monkeypatch.chdir(tmp_path)
    export(filled_store, Scope(), format, Path(name))
    assert Path(name).stat().st_size > 100


@pytest.mark.parametrize(("scope", "words", "num_turns"), SCOPES)
def test_csv_scope_is_its_turns(
    filled_store: Store, tmp_path: Path, scope: Scope, words: set[str], num_turns: int
) -> None:
    export(filled_store, scope, "csv", tmp_path / "out.csv")
    rows = csv_rows(tmp_path / "out.csv")
    expected = filled_store.turn_rows(scope.session_id, scope.conversation_id)
    assert [int(row["turn_id"]) for row in rows] == [row["turn_id"] for row in expected]
    assert len(rows) == num_turns


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "words", "num_turns"), SCOPES)
def test_database_copy_is_sound_and_opens_as_a_log(
    filled_store: Store, tmp_path: Path, scope: Scope, words: set[str], num_turns: int
) -> None:
    out = tmp_path / "copy.db"
    export(filled_store, scope, "sqlite", out)
    with closing(sqlite3.connect(out)) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert conn.execute("PRAGMA foreign_key_check").fetchall() == []
        assert conn.execute("PRAGMA journal_mode").fetchone() != ("wal",)
    with closing(Store.open(out)) as copy:
        assert copy.notices == ()
        assert copy.turn_rows() == filled_store.turn_rows(scope.session_id, scope.conversation_id)
        assert len(copy.turn_rows()) == num_turns


@pytest.mark.parametrize("format", ["csv", "jsonl", "sqlite"])
def test_days_are_a_scope_too(filled_store: Store, tmp_path: Path, format: Format) -> None:
    """Of the conversation 1, its first turn was long ago; of 2, the only one."""
    with closing(sqlite3.connect(str(filled_store.path))) as conn:
        conn.execute("UPDATE turn SET started_at_utc = '2020-01-01T00:00:00Z' WHERE id <> 3")
        conn.commit()
    out = tmp_path / "out"
    export(filled_store, Scope(since="2020-01-02"), format, out)
    assert [row["turn_id"] for row in filled_store.turn_rows(since="2020-01-02")] == [3]
    if format == "csv":
        assert [row["turn_id"] for row in csv_rows(out)] == ["3"]
    else:
        assert b"beta-answer" not in out.read_bytes() and b"gamma-answer" in out.read_bytes()


def test_copy_is_made_while_a_reply_is_under_way(filled_store: Store, tmp_path: Path) -> None:
    turn = begin(filled_store, "delta-question")
    filled_store.checkpoint_reply(turn.message_id, "delta-ans")
    for format in FORMATS:
        export(filled_store, Scope(), format, tmp_path / format)
        assert b"delta-ans" in (tmp_path / format).read_bytes()
    finish(filled_store, turn)
    assert filled_store.turn_rows()[-1]["state"] == "complete"


def test_log_in_memory_can_be_exported(tmp_path: Path) -> None:
    (tmp_path / "localspec.db").mkdir()
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store, "only in memory"))
        for format in FORMATS:
            export(store, Scope(), format, tmp_path / format)
            assert b"only in memory" in (tmp_path / format).read_bytes()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_there", [True, False])
def test_failing_export_leaves_no_half_file(
    filled_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: Format,
    is_there: bool,
) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    if is_there:
        (folder / "out").write_text("the last good one")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)  # the file is written by then, but not in place
    with pytest.raises(StoreError, match="cannot be written: the disk is full"):
        export(filled_store, Scope(), format, folder / "out")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    export(filled_store, Scope(), format, folder / "out")
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_a_copy_without_room_is_not_called_a_fault_of_the_log(
    filled_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def fail(self: Tables, sql: str, *values: object) -> int:
        raise full

    monkeypatch.setattr(Tables, "execute", fail)
    with pytest.raises(StoreError, match=r"The export .* cannot be written: the disk is full"):
        export(filled_store, Scope(), "sqlite", tmp_path / "copy.db")


@pytest.mark.parametrize("format", FORMATS)
def test_place_that_cannot_be_written_is_said(
    filled_store: Store, tmp_path: Path, format: Format
) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        export(filled_store, Scope(), format, tmp_path / "missing" / "out")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        export(filled_store, Scope(), format, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "home"]


@pytest.mark.parametrize("format", FORMATS)
def test_the_log_itself_is_never_overwritten(filled_store: Store, format: Format) -> None:
    assert filled_store.path is not None
    for end in (".db", ".db-wal", ".db-shm", ".db-journal", ".lock"):
        with pytest.raises(StoreError, match="is the log itself"):
            export(filled_store, Scope(), format, filled_store.path.with_suffix(end))
    assert len(filled_store.turn_rows()) == 3


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_columns_are_left_out(filled_store: Store, tmp_path: Path, format: Format) -> None:
    with filled_store._db.writing() as tables:
        tables.execute("UPDATE step SET signal = '{'")
        tables.execute("UPDATE turn SET token_ids = '[1', provenance = '[['")
        tables.execute("UPDATE message SET text_exact = '\"'")
    export(filled_store, Scope(), format, tmp_path / "out")
    assert b"alpha-answer" in (tmp_path / "out").read_bytes()


@pytest.mark.parametrize("format", FORMATS)
def test_a_byte_that_is_no_text_costs_itself_alone(
    filled_store: Store, tmp_path: Path, format: Format
) -> None:
    with filled_store._db.writing() as tables:
        tables.execute("UPDATE step SET signal = CAST(x'7bff' AS TEXT)")
        tables.execute("UPDATE turn SET reason = CAST(x'61ff62' AS TEXT)")
        tables.execute("UPDATE conversation SET title = CAST(x'ff' || title AS TEXT)")
    assert all(one.title.startswith("\ufffd") for one in filled_store.conversations())
    assert {row["reason"] for row in filled_store.turn_rows()} == {"a\ufffdb"}
    export(filled_store, Scope(), format, tmp_path / "out")
    assert b"alpha-answer" in (tmp_path / "out").read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="file modes are POSIX")
@pytest.mark.parametrize("format", FORMATS)
def test_exports_are_private(filled_store: Store, tmp_path: Path, format: Format) -> None:
    export(filled_store, Scope(), format, tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600


def test_scoped_copy_gives_back_the_pages_of_what_it_left_out(
    filled_store: Store, tmp_path: Path
) -> None:
    finish(filled_store, begin(filled_store, "y" * 200_000))
    out = tmp_path / "copy.db"
    export(filled_store, Scope(conversation_id=2), "sqlite", out)
    with closing(sqlite3.connect(out)) as conn:
        assert conn.execute("PRAGMA freelist_count").fetchone() == (0,)
    assert out.stat().st_size < 150_000
