"""Each reader of turns takes any column that may be NULL as unknown."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from localspec.chat.service import ChatService, Scope
from localspec.record.export import Format
from localspec.web.proof.report import report_zip
from localspec.web.stats.selection import Selection
from localspec.web.stats.tab import fill
from localspec.web.talk.messages import chat_messages
from tests.kit import samples
from tests.kit.fakes import FakeBackend, session_info

EXPORTS: tuple[Format, ...] = ("csv", "jsonl", "markdown", "sqlite")


def columns_that_may_be_null(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as db:
        found = db.execute("SELECT name FROM pragma_table_info('turn') WHERE NOT \"notnull\"")
        return [name for (name,) in found if name != "id"]


@pytest.fixture(scope="module")
def service_of_unknowns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatService]:
    """Its log has a lenient turn for each such column without it, and one without all of them, each
    in a conversation of its own."""
    folder = tmp_path_factory.mktemp("home")
    with closing(samples.open_store(folder)) as store:
        columns = columns_that_may_be_null(folder / "localspec.db")
        for unknown in (*([name] for name in columns), columns):
            turn = samples.begin(store, settings=samples.LENIENT_SETTINGS)
            samples.finish(store, turn, stats=samples.LENIENT_STATS)
            with closing(sqlite3.connect(folder / "localspec.db")) as db, db:
                emptied = ", ".join(f"{name} = NULL" for name in unknown)
                db.execute(f"UPDATE turn SET {emptied} WHERE id = ?", (turn.turn_id,))
        made = ChatService(store, session_info, lambda report: FakeBackend())
        yield made
        made.close()


@pytest.mark.slow
def test_the_stats_tab_and_the_report_show_each_of_these_turns(
    service_of_unknowns: ChatService,
) -> None:
    for conversation in service_of_unknowns.conversations():
        assert "1 turn" in "".join(
            fill(service_of_unknowns, Selection("conversation", conversation.id))
        )
    assert report_zip(service_of_unknowns, {"scope": "all"})


def test_who_drafted_is_unknown_where_the_log_does_not_say(
    service_of_unknowns: ChatService,
) -> None:
    assert "<title>unknown (lenient): " in "".join(fill(service_of_unknowns, Selection("all")))


@pytest.mark.slow
def test_every_export_has_each_of_these_turns(
    service_of_unknowns: ChatService, tmp_path: Path
) -> None:
    for format in EXPORTS:
        service_of_unknowns.export(Scope(), format, tmp_path / "out")
        assert (tmp_path / "out").stat().st_size
    for conversation in service_of_unknowns.conversations():
        service_of_unknowns.export(
            Scope(conversation_id=conversation.id), "markdown", tmp_path / "one.md"
        )


def test_each_of_these_replies_has_its_notes(service_of_unknowns: ChatService) -> None:
    for row in service_of_unknowns.turn_rows():
        handle, message_id = row["conversation_id"], row["message_id"]
        assert (
            len(chat_messages(service_of_unknowns.messages(handle), {message_id: row}, False)) == 2
        )


@pytest.mark.parametrize("damage", ["9e999", "-9e999", "1e308"])
def test_a_figure_that_cannot_be_is_unknown(tmp_path: Path, damage: str) -> None:
    """A damaged log may hold an infinite figure, or one that makes a sum infinite."""
    with closing(samples.open_store(tmp_path)) as store:
        for _ in range(3):
            samples.finish(store, samples.begin(store, settings=samples.LENIENT_SETTINGS))
        with closing(sqlite3.connect(tmp_path / "localspec.db")) as db, db:
            for table in ("turn", "step"):
                kinds = f"SELECT name FROM pragma_table_info('{table}') WHERE type = 'REAL'"
                for (name,) in db.execute(kinds).fetchall():
                    db.execute(f"UPDATE {table} SET {name} = {damage}")
            db.execute("UPDATE step SET signal = '{\"x\": 1e999}'")
            db.execute("UPDATE turn SET drafted_by = '{\"x\": 1e999}'")
        service = ChatService(store, session_info, lambda report: FakeBackend())
        (row, *_), rounds = service.turn_rows(), service.rounds(service.turn_rows())
        assert row["reply_ms"] is None and rounds and rounds[0]["verify_ms"] is None
        assert service.recent_gains() == {}
        assert "3 turns" in "".join(fill(service, Selection("all")))
        assert report_zip(service, {"scope": "all"})
        shown = {row["message_id"]: row for row in service.turn_rows()}
        assert len(chat_messages(service.messages(1), shown, False)) == 2
        for format in EXPORTS:
            service.export(Scope(), format, tmp_path / format)
        for line in (tmp_path / "jsonl").read_text().splitlines():
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        service.close()
