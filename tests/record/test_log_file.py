"""Rounds, replies and learnt states are read from a log file as they were written, and reading
changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlite_utils import Database

from localspec.backend import Message, TurnStats
from localspec.config import settings_for
from localspec.core import Step
from localspec.errors import StoreError
from localspec.record.log_file import learnt_states, read_replies, read_states, read_turns
from localspec.record.schema import MIGRATIONS
from localspec.record.store import (
    STATE_KEY,
    ContinuedReply,
    SessionInfo,
    Store,
    TurnEnd,
    TurnSettings,
)
from tests.record.samples import begin, finish, open_store
from tests.record.test_schema import VERSION_3

STEPS = (
    Step("draft_model", 4, 2, 3, 1.5, 20.0, 100, signal="model"),
    Step("off", 0, 0, 1, 0.0, 18.0, 103),
    Step("ngram", 2, 2, 3, 0.1, 19.0, 104, is_probe=True, signal=["5-8", 3]),
)


def log_of(path: Path, *turns: tuple[Step, ...]) -> Store:
    """A log with one turn for each tuple of steps."""
    store = Store.open(path)
    session = store.start_session(SessionInfo())
    conversation = store.create_conversation("a chat")
    settings = TurnSettings(
        model="big", draft="small", device="cpu", dtype="fp32", temperature=0.7, workload="code"
    )
    for steps in turns:
        asked = store.add_message(conversation, None, "user", "hello")
        turn = store.begin_turn(session, conversation, asked, settings)
        store.finish_turn(
            turn,
            TurnEnd(
                text="hi",
                token_ids=[1],
                provenance=["target"],
                stats=TurnStats(1),
                steps=steps,
                finish_reason="length",
                error=None,
            ),
        )
    return store


def test_rounds_come_back_in_order_with_what_tells_them_apart(tmp_path: Path) -> None:
    log_of(tmp_path / "log.db", STEPS, (), STEPS[:1]).close()
    first, last = read_turns(tmp_path / "log.db")  # the turn without rounds is none
    assert first.combination == ("big", "small", "cpu", "fp32") and first.temperature == 0.7
    assert [step.drafter for step in first.steps] == ["draft_model", "off", "ngram"]
    found = first.steps[0]
    assert (found.num_draft_tokens, found.num_accepted_tokens, found.num_output_tokens) == (4, 2, 3)
    assert (found.draft_ms, found.verify_ms, found.context_length) == (1.5, 20.0, 100)
    assert len(last.steps) == 1


def test_signals_are_hashable_again(tmp_path: Path) -> None:
    log_of(tmp_path / "log.db", STEPS).close()
    (turn,) = read_turns(tmp_path / "log.db")
    assert [step.signal for step in turn.steps] == ["model", None, '["5-8", 3]']
    assert len({step.signal for step in turn.steps}) == 3


def test_a_log_of_a_version_that_knew_no_kinds_of_text_is_read_too(tmp_path: Path) -> None:
    log_of(tmp_path / "log.db", STEPS).close()
    assert [turn.workload for turn in read_turns(tmp_path / "log.db")] == ["code"]
    with sqlite3.connect(tmp_path / "log.db") as db:
        dependent = db.execute("SELECT name, type FROM sqlite_master WHERE sql LIKE '%workload%'")
        for name, kind in dependent.fetchall():
            if kind != "table":
                db.execute(f"DROP {kind} {name}")
        db.execute("ALTER TABLE turn DROP COLUMN workload")
    db.close()
    assert [turn.workload for turn in read_turns(tmp_path / "log.db")] == [""]


def test_a_log_in_use_is_read_and_not_written(tmp_path: Path) -> None:
    store = log_of(tmp_path / "log.db", STEPS)
    conversation = store.create_conversation("under way")
    asked = store.add_message(conversation, None, "user", "hello")
    turn = store.begin_turn(1, conversation, asked, TurnSettings())
    assert len(read_turns(tmp_path / "log.db")) == 1
    states = {message.id: message.state for message in store.messages(conversation)}
    assert states[turn.message_id] == "draft"  # `Store.open` would have called it interrupted
    store.close()


def test_learnt_states_are_read(tmp_path: Path) -> None:
    store = log_of(tmp_path / "log.db", STEPS)
    assert read_states(tmp_path / "log.db") == {}
    store.save_state(STATE_KEY, {"big | small | fp32": {"version": 1}})
    store.close()
    assert read_states(tmp_path / "log.db") == {"big | small | fp32": {"version": 1}}


def test_what_is_no_log_is_said_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no log at"):
        read_turns(tmp_path / "absent.db")
    assert list(tmp_path.iterdir()) == []
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (a)").connection.close()
    with pytest.raises(StoreError, match="holds no log of turns and steps"):
        read_turns(tmp_path / "other.db")
    (tmp_path / "text.db").write_text("not a database at all, but long enough to be read" * 20)
    with pytest.raises(StoreError, match="cannot be read"):
        read_turns(tmp_path / "text.db")


def test_every_finished_reply_comes_with_its_branch(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    turn = begin(store, "first")
    finish(store, turn, "one")
    conversation = store.conversations()[0].id
    asked = store.add_message(conversation, turn.message_id, "user", "second \ud800")
    session = store.start_session(SessionInfo())
    finish(store, store.begin_turn(session, conversation, asked, TurnSettings()), "two")
    found = read_replies(tmp_path / "localspec.db")
    assert [reply.text for reply in found] == ["one", "two"]
    assert found[0].before == (Message("system", "Be brief."), Message("user", "first"))
    branch = (
        Message("user", "first"),
        Message("assistant", "one"),
        Message("user", "second \ud800"),
    )
    assert found[1].before == branch
    store.close()


def test_replies_that_failed_or_say_nothing_are_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    finish(store, begin(store, "a"), "  ")
    finish(store, begin(store, "b"), "half", finish_reason="error")
    begin(store, "c")  # still a draft
    finish(store, begin(store, "d"), "stopped early", finish_reason="cancelled")
    assert [reply.text for reply in read_replies(tmp_path / "localspec.db")] == ["stopped early"]
    store.close()


def test_deleted_unwritten_and_superseded_replies_are_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    finish(store, begin(store, "deleted"), "gone")
    store.conversation_list.delete(1)
    cut = begin(store, "cut")
    finish(store, cut, "half", finish_reason="length")
    asked = store.branch(cut.message_id)[0]
    begun = ContinuedReply(cut.message_id, "half")
    place = asked.conversation_id, asked.id
    finish(store, store.begin_turn(1, *place, TurnSettings(), begun), "half and whole")
    store.logs_text = False
    finish(store, begin(store, "unwritten"), "unwritten too")
    half_written = begin(store, "unwritten")
    store.logs_text = True
    finish(store, half_written, "an answer to nothing")
    assert [reply.text for reply in read_replies(tmp_path / "localspec.db")] == ["half and whole"]
    store.close()


def test_a_log_of_an_older_program_is_read_as_it_is(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    with closing(Database(old)) as db:
        MIGRATIONS.apply(db, stop_before="m004_history_and_presets")
        db.conn.executescript(VERSION_3)
    assert [reply.text for reply in read_replies(old)] == ["answered", "an\0other"]


def test_a_home_without_a_log_is_said_and_none_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no log"):
        read_replies(tmp_path / "localspec.db")
    assert not list(tmp_path.iterdir())


def test_reading_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    finish(store, begin(store, "a"), "b")
    store.close()
    path = tmp_path / "localspec.db"
    before = path.read_bytes()
    read_replies(path)
    assert path.read_bytes() == before
    Store.open(path).close()


def test_what_was_kept_is_read_back(tmp_path: Path) -> None:
    store = Store.open(settings_for(tmp_path).database)
    store.save_state(STATE_KEY, {"a | b": {"version": 1}})
    store.close()
    assert learnt_states(tmp_path) == {"a | b": {"version": 1}}


def test_asking_a_home_without_a_log_makes_none(tmp_path: Path) -> None:
    assert learnt_states(tmp_path) == {} == learnt_states(None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no database at all" * 100])
def test_a_log_that_cannot_be_read_has_taught_nothing(tmp_path: Path, content: bytes) -> None:
    database = settings_for(tmp_path).database
    database.parent.mkdir(parents=True, exist_ok=True)
    database.write_bytes(content)
    assert learnt_states(tmp_path) == {}
    assert database.read_bytes() == content
