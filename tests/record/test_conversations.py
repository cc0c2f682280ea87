"""The list of conversations: order, deletion, imports, earlier texts, and no half-done change."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from localspec.core.errors import RequestError, StoreError
from localspec.record import rows
from localspec.record.conversations import Imported
from localspec.record.export import Scope, export
from localspec.record.log_file import read_replies
from localspec.record.rows import Conversation, StoredMessage
from localspec.record.store import ContinuedReply, Store
from tests.kit.samples import SETTINGS, begin, finish, open_store

TIME = "2026-11-22T12:00:00.000+00:00"
IMPORTED = Imported(
    Conversation(0, "imported", TIME, 8),
    (
        StoredMessage(7, 0, None, "user", "q", "complete", TIME),
        StoredMessage(8, 0, 7, "assistant", "a", "complete", TIME),
        StoredMessage(9, 0, 7, "assistant", "b", "stopped", TIME),
    ),
)


def talk(store: Store, text: str) -> int:
    """A finished conversation of one turn; its id."""
    finish(store, begin(store, text))
    return store.conversations()[-1].id


def deleted(store: Store) -> list[tuple[int]]:
    """The ids of those that can be restored, as they are in the file."""
    assert store.path is not None
    with closing(sqlite3.connect(store.path)) as conn:
        sql = "SELECT id FROM conversation WHERE deleted_at_utc IS NOT NULL"
        return conn.execute(sql).fetchall()


def titles(store: Store, typed: str = "") -> list[str]:
    return [row.title for row in store.conversation_list.rows(typed)]


def everything(store: Store) -> object:
    ids = [one.id for one in store.conversations()]
    messages = [store.messages(one) for one in ids]
    return messages, store.conversations(), store.turn_rows(), store.prompts.all()


def test_pinned_come_first_then_the_newest(store: Store) -> None:
    first, second = talk(store, "first"), talk(store, "second")
    talk(store, "third")
    store.conversation_list.change(first, is_pinned=1)
    assert titles(store) == ["first", "third", "second"]
    store.conversation_list.change(first, is_pinned=0)
    store.add_message(second, None, "user", "again")
    assert titles(store) == ["second", "third", "first"]


def test_each_change_of_the_list_counts(store: Store) -> None:
    """Pages look at the number for news."""
    listed, folders, made = store.conversation_list, store.folders, talk(store, "hello")
    for change in (
        lambda: talk(store, "another"),
        lambda: store.add_message(made, None, "user", "more"),
        lambda: store.message_tree.delete(2),
        lambda: store.message_tree.restore(made, 2),
        lambda: listed.rename(made, "Hello"),
        lambda: listed.entitle(talk(store, "third"), "A third"),
        lambda: listed.change(made, is_pinned=1),
        lambda: listed.change(made, folder_id=folders.add("Work")),
        lambda: folders.rename(1, "Home"),
        lambda: folders.delete(1),
        lambda: listed.delete(made),
        lambda: listed.restore(made),
    ):
        before, seen = (listed.rows(), folders.all()), listed.num_changes
        change()
        assert (listed.rows(), folders.all()) != before and listed.num_changes > seen


def test_a_clock_set_back_does_not_change_the_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(store, "before")
    monkeypatch.setattr("localspec.record.store.now", lambda: "1999-01-01T00:00:00.000+00:00")
    talk(store, "after")
    assert titles(store) == ["after", "before"]
    newest, oldest = store.conversation_list.rows()
    assert newest.updated_at_utc < oldest.updated_at_utc


def test_a_conversation_without_a_message_is_not_listed(store: Store) -> None:
    store.create_conversation("a crash came before its first message")
    assert titles(store) == []


def test_titles_are_kept_as_they_are_and_survive_reopening(tmp_path: Path) -> None:
    title = "<b>שלום</b> 👩‍👩‍👧 'q'; -- %_\""
    with closing(open_store(tmp_path)) as store:
        store.conversation_list.rename(talk(store, "hi"), title)
    with closing(open_store(tmp_path)) as again:
        assert titles(again) == [title]


def test_what_is_deleted_is_nowhere_and_comes_back_whole(store: Store, tmp_path: Path) -> None:
    gone = talk(store, "a secret")
    talk(store, "open")
    before = everything(store)
    store.conversation_list.delete(gone)
    store.conversation_list.delete(gone)
    assert titles(store) == titles(store, "o") == ["open"]
    assert titles(store, "secret") == []
    assert deleted(store) == [(gone,)]
    assert [row["conversation_id"] for row in store.turn_rows()] != [gone]
    assert len(store.turn_rows()) == 1
    assert "a secret" not in store.conversation_list.earlier_texts()
    assert store.path is not None
    assert [one.conversation_id for one in read_replies(store.path)] != [gone]
    for form in ("csv", "jsonl", "markdown", "sqlite"):
        export(store, Scope(), form, tmp_path / form)
        assert b"secret" not in (tmp_path / form).read_bytes()
    store.conversation_list.restore(gone)
    assert everything(store) == before
    assert titles(store, "secret") == ["a secret"]


def test_a_purge_takes_text_numbers_and_index_off_the_disk(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        # Some builds of SQLite have it on by themselves, so the bytes alone prove too little.
        assert store._db._writer.rows("PRAGMA secure_delete") == [{"secure_delete": 1}]
        gone = talk(store, "zanzibar")
        talk(store, "stays")
        store.conversation_list.delete(gone)
        assert store.conversation_list.purge()
        assert not store.conversation_list.purge()
        for path in tmp_path.iterdir():
            assert b"zanzibar" not in path.read_bytes(), path.name
        with pytest.raises(StoreError, match="no conversation"):
            store.conversation_list.restore(gone)
        assert store.conversation(gone) is None and len(store.turn_rows()) == 1
    with closing(sqlite3.connect(tmp_path / "localspec.db")) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert conn.execute("PRAGMA foreign_key_check").fetchall() == []
        assert conn.execute("SELECT count(*) FROM message").fetchone() == (2,)
        assert conn.execute("SELECT count(*) FROM step").fetchone() == (3,)


def test_opening_alone_purges_nothing(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        gone = talk(store, "hi")
        store.conversation_list.delete(gone)
    with closing(open_store(tmp_path)) as other:  # an export, say, while the page could still undo
        other.conversation_list.restore(gone)
        assert titles(other) == ["hi"]


@pytest.mark.parametrize(
    "use",
    [
        lambda store, gone: store.conversation_list.rename(gone, "x"),
        lambda store, gone: store.conversation_list.change(gone, is_pinned=1),
        lambda store, gone: store.conversation_list.rename(99, "x"),
        lambda store, gone: store.conversation_list.delete(99),
        lambda store, gone: store.conversation_list.restore(99),
    ],
)
def test_what_is_gone_cannot_be_changed(store: Store, use: Callable[[Store, int], None]) -> None:
    gone = talk(store, "hi")
    store.conversation_list.delete(gone)
    with pytest.raises(StoreError, match="no conversation"):
        use(store, gone)


def test_an_import_is_a_conversation_like_any_other(store: Store) -> None:
    (made,) = store.conversation_list.add_imported([IMPORTED])
    asked, first, second = store.messages(made)
    assert (first.parent_id, second.parent_id, second.state) == (asked.id, asked.id, "stopped")
    assert store.conversation(made) is not None
    assert [one.text for one in store.branch(first.id)] == ["q", "a"]
    assert store.conversations()[-1].tip_message_id == first.id
    assert store.message_tree.sibling_groups(made)[asked.id] == (first.id, second.id)
    assert titles(store, "b") == ["imported"]


# Faults at every single statement


class FailingConnection:
    """Raises before its n-th statement, and at none after that."""

    def __init__(self, conn: sqlite3.Connection, n: int) -> None:
        self._conn, self._left = conn, n

    @property
    def has_failed(self) -> bool:
        return self._left <= 0

    @property
    def in_transaction(self) -> bool:
        return self._conn.in_transaction

    def execute(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        self._left -= 1
        if self._left == 0:
            raise sqlite3.OperationalError("database or disk is full")
        return self._conn.execute(sql, values)


@contextmanager
def failing_at(store: Store, n: int) -> Iterator[FailingConnection]:
    writer = store._db._writer
    whole = writer.conn
    writer.conn = failing = FailingConnection(whole, n)  # type: ignore[assignment]
    try:
        yield failing
    finally:
        writer.conn = whole


def continued(store: Store) -> None:
    asked = store.messages(1)[0]
    turn = store.begin_turn(1, 1, asked.id, SETTINGS, ContinuedReply(asked.id + 1, "hello"))
    finish(store, turn, "hello again")


def test_kept_settings_go_by_kind_and_name_and_names_are_one_line(store: Store) -> None:
    for number in ("1", "2"):
        store.prompts.save("my  own\n", {"max_tokens": number})
    store.defaults.save("my own", {"seed": "3"})
    assert store.prompts.all() == {"my own": {"max_tokens": "2"}}
    store.prompts.save("other", {"seed": "4"})
    store.prompts.rename("other", " my own")
    store.prompts.rename("nobody", "my own")
    assert store.prompts.all() == {"my own": {"seed": "4"}}
    store.prompts.delete(" my own")
    assert (store.prompts.all(), store.defaults.all()) == ({}, {"my own": {"seed": "3"}})
    with pytest.raises(RequestError, match="needs 1 to"):
        store.prompts.save(" ", {})


def test_a_text_that_is_written_after_all_replaces_the_one_in_memory(store: Store) -> None:
    store.logs_text = False
    turn = begin(store, "hidden")
    number = store.conversations()[0].id
    store.conversation_list.rename(number, "hidden too")
    store.logs_text = True
    finish(store, turn, "written")
    store.conversation_list.rename(number, "a title")
    assert store.branch(turn.message_id)[-1].text == "written"
    assert titles(store) == ["a title"]


WRITES: dict[str, Callable[[Store], object]] = {
    "rename": lambda store: store.conversation_list.rename(1, "new"),
    "pin": lambda store: store.conversation_list.change(1, is_pinned=1),
    "delete": lambda store: store.conversation_list.delete(1),
    "restore": lambda store: store.conversation_list.restore(2),
    "purge": lambda store: store.conversation_list.purge(),
    "import": lambda store: store.conversation_list.add_imported([IMPORTED, IMPORTED]),
    "rewrite": lambda store: store.add_message(1, 1, "assistant", "rewritten"),
    "prompt": lambda store: store.prompts.save("mine", {}),
    "no prompt": lambda store: store.prompts.delete("old"),
    "called otherwise": lambda store: store.prompts.rename("old", "other"),
    "settings": lambda store: store.conversation_list.keep_settings(1, {"seed": "1"}),
    "privacy": lambda store: store.keep_text(True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_fails_at_any_statement_leaves_all_as_it_was(store: Store, name: str) -> None:
    talk(store, "one")
    store.conversation_list.delete(talk(store, "two"))
    store.prompts.save("old", {})
    store.prompts.save("other", {"seed": "2"})
    for n in range(1, 200):
        before = everything(store), deleted(store)
        with failing_at(store, n):
            try:
                WRITES[name](store)
                break
            except StoreError as error:
                assert "disk is full" in str(error)
        assert (everything(store), deleted(store)) == before, f"at statement {n}"
    assert n > 3  # BEGIN, at least one statement, COMMIT
    with store._db.writing() as tables:
        assert tables.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]
        assert tables.rows("PRAGMA foreign_key_check") == []


def test_going_on_that_fails_at_any_statement_keeps_the_old_reply(store: Store) -> None:
    talk(store, "one")
    for n in range(1, 200):
        with failing_at(store, n) as conn, suppress(StoreError):
            continued(store)
        reply = store.messages(1)[1]
        assert (reply.text, reply.state) == ("hello", "complete")
        begun = [one for one in store.messages(1)[2:] if one.state == "draft"]
        assert all(one.text == "hello" for one in begun)
        if not conn.has_failed:
            break
    assert n > 15 and store.messages(1)[-1].text == "hello again"


def test_importing_while_texts_are_not_written_is_refused(store: Store) -> None:
    store.logs_text = False
    with pytest.raises(RequestError, match="switched off"):
        store.conversation_list.add_imported([IMPORTED])
    assert titles(store) == []


def test_times_are_utc() -> None:
    assert rows.now().endswith("+00:00")


def store_with(path: Path, *conversations: tuple[str, ...]) -> Store:
    store = Store.open(path / "localspec.db")
    for number, texts in enumerate(conversations):
        conversation = store.create_conversation(f"chat {number}")
        parent = None
        for text in texts:
            parent = store.add_message(conversation, parent, "user", text)
    return store


def test_texts_come_oldest_first(tmp_path: Path) -> None:
    store = store_with(tmp_path, ("one", "two"), ("three",))
    assert store.conversation_list.earlier_texts() == ("one", "two", "three")
    store.close()


def test_the_newest_are_kept_whole_where_not_all_fit(tmp_path: Path) -> None:
    store = store_with(tmp_path, ("oldest" * 10, "middle"), ("newest",))
    assert store.conversation_list.earlier_texts(max_characters=12) == ("middle", "newest")
    assert store.conversation_list.earlier_texts(max_characters=11) == ("newest",)
    store.close()


def test_an_empty_log_has_no_texts(tmp_path: Path) -> None:
    store = store_with(tmp_path)
    assert store.conversation_list.earlier_texts() == ()
    store.close()


# -- replies whose tokens are counted ----------------------------------------------------------


def replied(store: Store, *replies: str) -> list[int]:
    """A conversation for each reply; their ids."""
    for number, reply in enumerate(replies):
        finish(store, begin(store, f"question {number}"), reply)
    return [each.id for each in store.conversations()]


def test_earlier_replies_are_those_of_models_oldest_first(store: Store) -> None:
    replied(store, "one", "two")
    store.conversation_list.add_imported([IMPORTED])
    listed = store.conversation_list
    assert listed.earlier_replies() == ("one", "two")
    assert listed.earlier_replies(max_characters=5) == ("two",)
    assert listed.earlier_replies(max_characters=2) == ()


def test_a_deleted_reply_counts_no_more_and_a_restored_one_does(store: Store) -> None:
    first, _, third = replied(store, "one", "two", "three")
    store.conversation_list.delete(first)
    store.message_tree.delete(store.messages(third)[-1].id)
    assert store.conversation_list.earlier_replies() == ("two",)
    store.conversation_list.restore(first)
    assert store.conversation_list.earlier_replies() == ("one", "two")


def test_a_reply_that_is_not_logged_is_never_counted(store: Store) -> None:
    replied(store, "open")
    store.logs_text = False
    replied(store, "private")
    assert store.conversation_list.earlier_replies() == ("open",)
    assert "private" in store.conversation_list.earlier_texts()


def test_a_copied_or_continued_reply_counts_once(store: Store) -> None:
    (first,) = replied(store, "begun")
    asked, reply = store.messages(first)
    store.message_tree.copy(first, "copy")
    turn = store.begin_turn(1, first, asked.id, SETTINGS, ContinuedReply(reply.id, "begun"))
    finish(store, turn, "begun and ended")
    assert store.conversation_list.earlier_replies() == ("begun and ended",)
    store.message_tree.delete(store.messages(first)[-1].id)
    assert store.conversation_list.earlier_replies() == ()
