"""Rounds, replies and learnt states are read from a log file as they were written, and reading
changes nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from localspec.core.backend import Message
from localspec.core.config import settings_for
from localspec.core.errors import StoreError
from localspec.record.log_file import learnt_states, read_replies, read_states
from localspec.record.store import (
    STATE_KEY,
    ContinuedReply,
    SessionInfo,
    Store,
    TurnSettings,
)
from tests.kit.older_logs import write_log
from tests.kit.samples import begin, finish, open_store


def test_learnt_states_are_read(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "log.db")
    assert read_states(tmp_path / "log.db") == {}
    store.save_state(STATE_KEY, {"big | small | fp32": {"version": 1}})
    store.close()
    assert read_states(tmp_path / "log.db") == {"big | small | fp32": {"version": 1}}


def test_what_is_no_log_is_said_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no log at"):
        read_replies(tmp_path / "absent.db")
    assert list(tmp_path.iterdir()) == []
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (a)").connection.close()
    with pytest.raises(StoreError, match="holds no log of turns and steps"):
        read_replies(tmp_path / "other.db")
    (tmp_path / "text.db").write_text("not a database at all, but long enough to be read" * 20)
    with pytest.raises(StoreError, match="cannot be read"):
        read_replies(tmp_path / "text.db")


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


def test_a_deleted_reply_is_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for text in ("kept", "deleted"):
        turn = begin(store, text)
        finish(store, turn, text)
    store.message_tree.delete(turn.message_id)
    assert [reply.text for reply in read_replies(tmp_path / "localspec.db")] == ["kept"]
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


def test_a_log_of_version_19_is_read_as_it_is(tmp_path: Path) -> None:
    old = write_log(tmp_path / "old.db", 19)
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
