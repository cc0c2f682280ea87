"""The journal keeps the list of conversations, and texts off the disk where that is asked for."""

from __future__ import annotations

import gc
import sqlite3
import weakref
from contextlib import closing
from pathlib import Path

import pytest

from localspec.chat import journal as journal_module
from localspec.chat.service import ChatService, ReplySettings
from localspec.chat.titles import title_line
from localspec.core.errors import RequestError, StoreError
from localspec.record.export import Scope, export
from localspec.record.store import Store
from tests.kit.fakes import BreakableStore, Script
from tests.kit.services import FAST, ask, close, ended, open_service, texts, until

SETTINGS = ReplySettings(system_prompt="Speak like a pirate.")
SECRETS = ("mellon", "pirate", "Three rings")
SECRET = Script(reply="Three rings for the kings under the sky.", round_s=0.001)


def on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ChatService, BreakableStore]:
    """Nothing is stored before the store's fault is taken away."""
    monkeypatch.setattr(journal_module, "RETRY_S", 0.02)
    service, _ = open_service(tmp_path)
    store = service.store
    assert isinstance(store, BreakableStore)
    store.fault = "The disk is full. Free disk space and try again."
    return service, store


def titles(service: ChatService, search: str = "") -> list[str]:
    return [row.title for row in service.conversations(search)]


def test_a_title_is_the_first_line_until_it_is_renamed(service: ChatService) -> None:
    handle = ask(service, "  What is\n\na <b>title</b>?  " + "x" * 100).handle
    assert titles(service)[0].startswith("What is a <b>title</b>? xxx")
    assert len(titles(service)[0]) == 48
    service.rename(handle, " New\x00 \x1b[31mname\n ")
    assert titles(service) == ["New [31mname"]
    with pytest.raises(RequestError, match="a visible character"):
        service.rename(handle, " \n\0")
    with pytest.raises(RequestError, match="a visible character"):
        service.rename(handle, "\u200b\u2060")
    assert titles(service) == ["New [31mname"]


def test_a_title_of_any_length_and_kind_is_one_line_of_text() -> None:
    assert title_line("a\ud800b\u2028c\u0085d") == "a?b c d"
    assert title_line("👩‍👩‍👧 שלום") == "👩‍👩‍👧 שלום"
    assert len(title_line("x" * 1000)) == 200


def test_a_deleted_conversation_takes_no_message_and_comes_back(service: ChatService) -> None:
    handle = ask(service, "one").handle
    service.delete(handle)
    assert titles(service) == []
    with pytest.raises(RequestError, match="was deleted"):
        service.submit(handle, "two", ReplySettings())
    with pytest.raises(RequestError, match="was deleted"):
        service.regenerate(handle, ReplySettings())
    service.restore(handle)
    ask(service, "two", handle)
    assert titles(service) == ["one"] and len(texts(service, handle)) == 4


def test_deleted_is_gone_for_good_at_the_next_start(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path)
    handle = ask(service, "mellon").handle
    ask(service, "stays")
    service.delete(handle)
    close(service)
    again, _ = open_service(tmp_path)
    assert again.journal.flush()
    with pytest.raises(StoreError, match="no conversation"):
        again.restore(handle)
    assert titles(again) == ["stays"]
    close(again)
    assert all(b"mellon" not in path.read_bytes() for path in tmp_path.iterdir())


def test_a_conversation_not_yet_stored_is_changed_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, store = on_a_full_disk(tmp_path, monkeypatch)
    kept, gone = ask(service, "kept").handle, ask(service, "gone").handle
    service.rename(kept, "renamed")
    service.pin(kept, True)
    service.delete(gone)
    assert titles(service) == ["renamed"]
    assert service.system_prompt(kept) == ""
    store.fault = None
    until(lambda: service.journal.notice is None)
    (row,) = service.conversations()
    assert (row.title, row.is_pinned) == ("renamed", True)
    service.restore(gone)
    assert titles(service) == ["renamed", "gone"]
    close(service)


@pytest.mark.slow
def test_a_stored_turn_is_let_go_though_the_next_message_came_before_it_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, store = on_a_full_disk(tmp_path, monkeypatch)
    reply = ask(service, "0")
    first, handle = weakref.ref(reply.pending), reply.handle
    del reply
    newest = [ask(service, str(number), handle) for number in range(1, 5)][-1]
    store.fault = None
    until(lambda: service.journal.notice is None)
    assert service.journal.flush() and newest.pending.is_stored
    gc.collect()
    assert first() is None
    close(service)


def test_a_page_finds_its_reply_by_the_number_from_before_it_was_stored(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path, Script(round_s=0.05))
    store = service.store
    assert isinstance(store, BreakableStore)
    store.fault = "The disk is full. Free disk space and try again."
    reply = service.submit(None, "hi", ReplySettings())
    assert reply is not None
    handle = reply.handle
    assert handle < 0 and service.running(handle) is reply
    store.fault = None
    assert until(service.flush)
    assert reply.handle > 0 and service.running(handle) is service.running(reply.handle) is reply
    assert service.messages(handle)[0] == service.messages(reply.handle)[0]
    service.stop(reply)
    ended(service, reply)
    close(service)


def test_a_conversation_not_yet_stored_has_no_turns_in_the_log(service: ChatService) -> None:
    """It showed the turns of all conversations."""
    store = service.store
    assert isinstance(store, BreakableStore)
    ask(service, "recorded")
    store.fault = "The disk is full. Free disk space and try again."
    waiting = ask(service, "not recorded").handle
    assert service.turn_rows(waiting) == []
    store.fault = None
    assert until(service.flush)
    assert len(service.turn_rows(waiting)) == 1


def test_a_conversation_remembers_its_system_prompt(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path)
    handle = ended(service, service.submit(None, "one", SETTINGS)).handle
    other = ask(service, "two").handle
    for _ in range(2):
        assert service.system_prompt(handle) == "Speak like a pirate."
        assert service.system_prompt(other) == ""
        close(service)
        service, _ = open_service(tmp_path)
    close(service)


# Settings


def test_settings_of_a_chat_are_kept_from_before_it_is_stored_until_after_a_start(
    tmp_path: Path,
) -> None:
    service, _ = open_service(tmp_path)
    handle = ended(service, service.submit(None, "one", SETTINGS)).handle
    assert service.settings_of(handle) == {"system_prompt": "Speak like a pirate."}
    service.keep_settings(handle, {"system_prompt": "Be brief.", "temperature": "0.2"})
    for _ in range(2):
        kept = service.settings_of(handle)
        assert kept == {"system_prompt": "Be brief.", "temperature": "0.2"}
        close(service)
        service, _ = open_service(tmp_path)
    close(service)


def test_the_prompt_of_a_chat_is_not_written_where_texts_are_not(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path)
    service.store.logs_text = False
    handle = ended(service, service.submit(None, "one", SETTINGS)).handle
    fields = {"system_prompt": "secret", "stop": "secret", "temperature": "0.2"}
    service.keep_settings(handle, fields)
    assert service.settings_of(handle) == fields
    close(service)
    again, _ = open_service(tmp_path)
    assert again.settings_of(handle) == {"system_prompt": "", "temperature": "0.2"}
    close(again)


# Texts that are not written down


def assert_unwritten(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith("localspec.db"):
            for secret in SECRETS:
                assert secret.encode() not in path.read_bytes(), f"{secret} in {path.name}"


def quiet_talk(service: ChatService) -> int:
    """Every kind of write that carries text; the conversation's handle."""
    handle = ended(service, service.submit(None, "Speak, mellon", SETTINGS)).handle
    short = ReplySettings(max_tokens=3, system_prompt=SETTINGS.system_prompt)
    ended(service, service.regenerate(handle, short))
    ended(service, service.proceed(handle, SETTINGS))
    asked = service.messages(handle)[0].message_id or 0
    ended(service, service.edit(handle, asked, "Say mellon", SETTINGS))
    service.edit(handle, service.messages(handle)[1].message_id or 0, "Three rings!", SETTINGS)
    service.rename(handle, "mellon")
    return handle


def test_without_logging_no_text_reaches_the_disk_and_the_session_has_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.chat.worker.CHECKPOINT_S", 0.0)
    service, backend = open_service(tmp_path, SECRET)
    service.store.keep_text(False)
    handle = quiet_talk(service)
    assert_unwritten(tmp_path)
    assert texts(service, handle) == ["Say mellon", "Three rings!"]
    assert titles(service) == titles(service, "mello") == titles(service, "RINGS") == ["mellon"]
    assert backend.requests[2].begun_tokens != ()
    assert service.system_prompt(handle) == "Speak like a pirate."
    ask(service, "go on", handle)
    assert [one.content for one in backend.requests[-1].messages] == [
        "Say mellon",
        "Three rings!",
        "go on",
    ]
    export(service.store, Scope(), "jsonl", tmp_path / "asked-for.jsonl")
    assert b"mellon" in (tmp_path / "asked-for.jsonl").read_bytes()
    close(service)
    assert_unwritten(tmp_path)
    with closing(sqlite3.connect(tmp_path / "localspec.db")) as conn:
        assert conn.execute("SELECT count(*) FROM message WHERE text <> ''").fetchone() == (0,)
        assert conn.execute("SELECT sum(num_output_tokens) > 20 FROM turn").fetchone() == (1,)
        hidden = "SELECT count(token_ids), count(drafted), count(system_prompt) FROM turn"
        assert conn.execute(hidden).fetchone() == (0, 0, 0)


def test_without_logging_the_statistics_stay(tmp_path: Path) -> None:
    rows = []
    for is_wanted in (True, False):
        service, _ = open_service(tmp_path / str(is_wanted), SECRET)
        service.store.keep_text(is_wanted)
        ask(service, "mellon")
        (row,) = service.store.turn_rows()
        assert len(service.store.step_rows(row["turn_id"])) == row["num_steps"] > 1
        rows.append({name: row[name] for name in row if name.startswith("num_")})
        close(service)
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_the_switch_is_remembered_and_later_conversations_are_empty_of_text(
    tmp_path: Path,
) -> None:
    service, _ = open_service(tmp_path, SECRET)
    written = ask(service, "written").handle
    service.store.keep_text(False)
    quiet_talk(service)
    ask(service, "Three rings more", written)
    close(service)
    again, _ = open_service(tmp_path, SECRET)
    assert not again.store.logs_text
    assert titles(again) == ["written"]  # of the other one nothing is left to read
    shown = again.messages(written)
    assert [one.text for one in shown] == ["written", SECRET.reply, "", ""]
    again.store.keep_text(True)
    ask(again, "mellon again")
    close(again)
    third = Store.open(tmp_path / "localspec.db")
    assert third.logs_text and len(third.conversation_list.rows("mellon")) == 1
    third.close()


def test_logging_switched_off_in_the_middle_of_a_reply_takes_its_text_along(
    tmp_path: Path,
) -> None:
    service, _ = open_service(tmp_path, Script(reply=SECRET.reply, round_s=0.05))
    reply = service.submit(None, "hi", ReplySettings())
    assert reply is not None
    until(lambda: reply.view.text != "")
    service.store.logs_text = False
    ended(service, reply)
    assert texts(service, reply.handle) == ["hi", SECRET.reply]
    close(service)
    again, _ = open_service(tmp_path, FAST)
    assert texts(again, reply.handle) == ["hi", ""]
    assert again.store.logs_text  # it was for that run only
    close(again)


def test_every_message_that_waits_is_on_disk_at_once_and_in_its_place(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path / "one", Script(round_s=0.02))
    asked = ["first", "second", "third", "fourth"]
    replies, handle = [], None
    for text in asked:
        replies.append(service.submit(handle, text, ReplySettings()))
        handle = replies[-1].handle if replies[-1] is not None else None
    assert handle is not None and not service.store.turn_rows()[1:], "only the first has begun"
    service.store.backup(tmp_path / "killed.db")  # what a kill at this moment leaves
    with closing(Store.open(tmp_path / "killed.db")) as left:
        left.tidy()
        (conversation,) = left.conversations()
        shown = left.branch(conversation.tip_message_id or 0)
        assert [one.text for one in shown if one.role == "user"] == asked
        places = [(one.role, one.state) for one in shown]
        assert places == [("user", "complete"), ("assistant", "interrupted")] * 3 + places[:1]
    third = replies[2]
    assert third is not None and service.take_back(handle, third.number) == "third"
    for reply in service.worker.replies:
        service.stop(reply)
    until(lambda: service.running(handle) is None)
    assert service.flush()
    branch = service.messages(handle)
    assert [one.text for one in branch if one.role == "user"] == ["first", "second", "fourth"]
    assert [one.state for one in branch if one.role == "assistant"] == ["stopped"] * 3
    assert len(service.store.turn_rows()) == 3
    close(service)


@pytest.mark.slow
def test_a_message_that_cannot_be_taken_back_whole_stays_whole_and_is_answered(
    tmp_path: Path,
) -> None:
    service, _ = open_service(tmp_path, Script(round_s=0.02))
    first = service.submit(None, "first", ReplySettings())
    assert first is not None
    second = service.submit(first.handle, "second", ReplySettings())
    third = service.submit(first.handle, "third", ReplySettings())  # gives the second a place
    assert second is not None and third is not None
    refuse = (  # its reply can still be marked, its message cannot
        "CREATE TRIGGER refuse BEFORE UPDATE OF deleted_at_utc ON message WHEN new.role = 'user' "
        "BEGIN SELECT RAISE(ABORT, 'refused'); END"
    )
    with closing(sqlite3.connect(tmp_path / "localspec.db")) as other, other:
        other.execute(refuse)
    with pytest.raises(StoreError):
        service.take_back(first.handle, second.number)
    service.stop(first)
    assert second.done.wait(60) and third.done.wait(60) and service.flush()
    logged = [one.state for one in service.store.messages(first.handle) if one.role == "assistant"]
    assert sorted(logged) == ["complete", "complete", "stopped"]
    close(service)
