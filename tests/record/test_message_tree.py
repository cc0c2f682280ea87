"""Deleting a message keeps what followed it and can be undone; a copy stands on its own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from localspec.record.export import Scope, export
from localspec.record.store import ContinuedReply, Store
from tests.kit.samples import INFO, SETTINGS, STEPS, begin, finish


def talk(store: Store) -> tuple[int, list[int]]:
    """A conversation of two exchanges; its id and those of its messages."""
    turn = begin(store, "asked")
    finish(store, turn, "answered")
    again = store.add_message(1, turn.message_id, "user", "and then?")
    second = store.begin_turn(1, 1, again, SETTINGS)
    finish(store, second, "that")
    return 1, [1, turn.message_id, again, second.message_id]


def texts(store: Store, conversation_id: int) -> list[str]:
    found = store.conversation(conversation_id)
    assert found is not None
    tip = found.tip_message_id
    return [] if tip is None else [message.text for message in store.branch(tip)]


@pytest.mark.parametrize("place", range(4))
def test_a_deleted_message_is_nowhere_and_comes_back_where_it_was(
    store: Store, place: int, tmp_path: Path
) -> None:
    conversation_id, ids = talk(store)
    whole = texts(store, conversation_id)
    store.message_tree.delete(ids[place])
    rest = [*whole[:place], *whole[place + 1 :]]
    assert texts(store, conversation_id) == rest
    assert [one.text for one in store.messages(conversation_id)] == rest
    found = store.conversation_list.rows(f'"{whole[place]}"')
    assert all(row.message_id != ids[place] for row in found)
    assert ids[place] not in [row["message_id"] for row in store.turn_rows()]
    export(store, Scope(), "jsonl", tmp_path / "out")
    assert f'"text": "{whole[place]}"' not in (tmp_path / "out").read_text()
    store.message_tree.restore(1, ids[place])
    assert texts(store, conversation_id) == whole


def test_an_undone_deletion_takes_back_only_what_is_still_there(store: Store) -> None:
    _, ids = talk(store)
    store.message_tree.delete(ids[1])
    store.message_tree.delete(ids[0])
    store.message_tree.restore(1, ids[1])
    assert [one.text for one in store.branch(ids[3])] == ["and then?", "that"]
    store.message_tree.restore(1, ids[0])
    assert [one.text for one in store.branch(ids[3])] == ["asked", "and then?", "that"]


def test_the_other_version_is_shown_after_the_newest_was_deleted(store: Store) -> None:
    conversation_id, ids = talk(store)
    other = store.begin_turn(1, conversation_id, ids[2], SETTINGS)
    finish(store, other, "this")
    store.message_tree.delete(other.message_id)
    assert texts(store, conversation_id)[-1] == "that"
    assert store.message_tree.sibling_groups(conversation_id)[ids[2]] == (ids[3],)


def test_a_reply_goes_with_the_beginning_that_it_continued(store: Store) -> None:
    conversation_id, ids = talk(store)
    longer = store.begin_turn(1, conversation_id, ids[2], SETTINGS, ContinuedReply(ids[3], "that"))
    finish(store, longer, "that and more")
    store.message_tree.delete(longer.message_id)
    assert texts(store, conversation_id) == ["asked", "answered", "and then?"]
    store.message_tree.restore(1, longer.message_id)
    assert texts(store, conversation_id)[-1] == "that and more"
    assert store.message_tree.sibling_groups(conversation_id)[ids[2]] == (longer.message_id,)


def test_what_stays_deleted_is_taken_off_the_disk(store: Store, tmp_path: Path) -> None:
    conversation_id, ids = talk(store)
    longer = store.begin_turn(1, conversation_id, ids[2], SETTINGS, ContinuedReply(ids[3], "that"))
    finish(store, longer, "that and more")
    for message_id in (ids[1], longer.message_id):
        store.message_tree.delete(message_id)
    store.tidy()
    with closing(sqlite3.connect(tmp_path / "localspec.db")) as conn:
        assert conn.execute("SELECT text FROM message").fetchall() == [("asked",), ("and then?",)]
        assert conn.execute("SELECT count(*) FROM turn").fetchone() == (0,)
        assert conn.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("logs_text", [True, False])
def test_a_copy_has_the_branches_and_changes_nothing(store: Store, logs_text: bool) -> None:
    store.logs_text = logs_text
    conversation_id, ids = talk(store)
    store.add_message(conversation_id, ids[2], "assistant", "edited", model="m", is_edited=1)
    copy = store.message_tree.copy(conversation_id, "copied")
    assert texts(store, copy) == ["asked", "answered", "and then?", "edited"]
    copied = store.messages(copy)
    assert [one.text for one in copied] == [one.text for one in store.messages(conversation_id)]
    assert (copied[1].model, copied[-1].is_edited) == (SETTINGS.model, True)
    assert [row["conversation_id"] for row in store.turn_rows()] == [conversation_id] * 2
    fork = store.message_tree.copy(conversation_id, "forked", until=ids[1])
    assert texts(store, fork) == ["asked", "answered"]
    titles = [one.title for one in store.conversations()]
    assert titles == ["asked", "copied", "forked"]
    store.start_session(INFO)
    store.tidy()
    assert texts(store, copy)[-1] == "edited"


FIGURES = ("tokens_per_second", "speedup", "num_accepted_tokens", "temperature", "model", "seed")


@pytest.mark.parametrize("logs_text", [True, False])
@pytest.mark.parametrize("is_fork", [False, True], ids=["copy", "fork"])
def test_copied_replies_keep_figures_and_tokens_and_count_once(
    store: Store, is_fork: bool, logs_text: bool, tmp_path: Path
) -> None:
    """Of several answers to one message too, and of a reply that continues another."""
    store.logs_text = logs_text
    conversation_id, ids = talk(store)
    other = store.begin_turn(1, conversation_id, ids[2], SETTINGS)
    finish(store, other, "this")
    longer = store.begin_turn(
        1, conversation_id, ids[2], SETTINGS, ContinuedReply(other.message_id, "this")
    )
    finish(store, longer, "this and more")
    gains, total = store.recent_gains(), store.turn_rows()
    copy = store.message_tree.copy(
        conversation_id, "copied", until=longer.message_id if is_fork else None
    )
    tip = store.conversation(copy).tip_message_id  # type: ignore[union-attr]
    assert tip is not None and texts(store, copy)[-1] == "this and more"
    rows = {row["message_id"]: row for row in store.turn_rows(conversation_id=copy)}
    assert len(rows) == len(total) - is_fork, "the other answer is no part of a fork"
    for figure in FIGURES:
        assert rows[tip][figure] == total[-1][figure], figure
    whole = [store.reply_tokens(part) for part in store.message_tree.continued(tip)]
    old = [store.reply_tokens(part) for part in (other.message_id, longer.message_id)]
    assert whole == old and None not in old, "Continue knows the ids of all of it"
    assert len(store.step_rows(rows[tip]["turn_id"])) == len(STEPS)
    num_answers = 1 if is_fork else 2
    assert len(store.message_tree.sibling_groups(copy)[store.branch(tip)[-2].id]) == num_answers
    assert (store.recent_gains(), store.turn_rows()) == (gains, total)
    with closing(sqlite3.connect(tmp_path / "localspec.db")) as conn:
        seen = conn.execute("SELECT sum(num_turns) FROM turn_by_temperature").fetchone()
        assert seen == (len(total),)
    store.conversation_list.delete(conversation_id)
    store.tidy()
    assert store.turn_of(tip)["speedup"] == total[-1]["speedup"]  # type: ignore[index]
