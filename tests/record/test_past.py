"""Texts of earlier conversations: all of them, or the newest that fit."""

from __future__ import annotations

from pathlib import Path

from localspec.record.store import Store


def store_with(path: Path, *conversations: tuple[str, ...]) -> Store:
    store = Store.open(path / "localspec.db")
    for number, texts in enumerate(conversations):
        conversation = store.create_conversation(f"chat {number}")
        parent = None
        for text in texts:
            parent = store.add_user_message(conversation, parent, text)
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
