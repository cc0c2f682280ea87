"""A person's own replies come back with what stood before them, and reading changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.backend import Message
from localspec.errors import StoreError
from localspec.record.chats import read_replies
from localspec.record.store import SessionInfo, Store, TurnSettings
from tests.record.samples import begin, finish, open_store


def test_every_finished_reply_comes_with_its_branch(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    turn = begin(store, "first")
    finish(store, turn, "one")
    conversation = store.conversations()[0].id
    asked = store.add_user_message(conversation, turn.message_id, "second \ud800")
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
