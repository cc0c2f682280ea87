"""Editing, answering again and going on make branches; nothing that was said is ever lost."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localspec.chat import journal as journal_module
from localspec.chat.branches import follow_up, messages_of, regenerated
from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.service import ChatService, Reply, ReplySettings
from localspec.core.backend import Message, Request, Role
from localspec.core.errors import ContextOverflow, RequestError, StoreError
from localspec.record.conversations import Imported
from localspec.record.export import Scope, export
from localspec.record.rows import Conversation, StoredMessage
from localspec.record.store import SessionInfo, Store
from tests.kit.fakes import BreakableStore, FakeBackend, Script, WatchedStore
from tests.kit.samples import SETTINGS as TURN_SETTINGS
from tests.kit.services import FAST, WAIT_S, ask, close, ended, open_service, texts, until

SETTINGS = ReplySettings()
ROLES: tuple[Role, Role] = ("user", "assistant")
WHOLE = str(FAST.reply)


def id_at(service: ChatService, handle: int, place: int) -> int:
    found = service.messages(handle)[place].message_id
    assert found is not None
    return found


class StoredMeanwhile(OpenConversation):
    """Its tip is stored, and so taken away, right after it was read for the first time."""

    @property
    def tip(self) -> PendingTurn | None:
        found, self.held = self.held, None
        return found

    @tip.setter
    def tip(self, turn: PendingTurn | None) -> None:
        self.held = turn


def test_a_message_sent_while_the_reply_before_it_is_being_stored_follows_it(
    service: ChatService,
) -> None:
    conversation = StoredMeanwhile(-1, "t")
    before = conversation.tip = PendingTurn(conversation, "first")
    turn = follow_up(service.store, conversation, "second")
    assert turn.after is before or turn.parent_id is not None


# Editing and branches


def test_an_edited_message_is_a_sibling_and_answered_with_what_stood_before_it(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    service, backend = service_and_fake
    handle = ask(service, "one").handle
    ask(service, "two", handle)
    ask(service, "three", handle)
    old = id_at(service, handle, 2)
    ended(service, service.edit(handle, old, "two, better", SETTINGS))
    assert texts(service, handle) == ["one", WHOLE, "two, better", WHOLE]
    assert [one.content for one in backend.requests[-1].messages] == ["one", WHOLE, "two, better"]
    shown = service.messages(handle)
    assert shown[2].siblings == (old, shown[2].message_id)
    assert shown[0].siblings == (shown[0].message_id,)
    service.show_branch(handle, old)
    assert texts(service, handle) == ["one", WHOLE, "two", WHOLE, "three", WHOLE]
    service.show_branch(handle, shown[2].message_id or 0)
    assert texts(service, handle) == ["one", WHOLE, "two, better", WHOLE]


def test_the_first_message_can_be_edited_too(service: ChatService) -> None:
    handle = ask(service, "one").handle
    ended(service, service.edit(handle, id_at(service, handle, 0), "uno", SETTINGS))
    assert texts(service, handle) == ["uno", WHOLE]
    assert len(service.messages(handle)[0].siblings) == 2


def test_a_rewritten_reply_is_stored_and_what_follows_builds_on_it(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    service, backend = service_and_fake
    handle = ask(service, "one").handle
    assert service.edit(handle, id_at(service, handle, 1), "Eleven.", SETTINGS) is None
    assert texts(service, handle) == ["one", "Eleven."]
    assert len(service.messages(handle)[1].siblings) == 2
    ask(service, "and?", handle)
    assert backend.requests[-1].messages[1] == Message("assistant", "Eleven.")
    assert len(service.store.turn_rows()) == 2  # nobody generated the rewritten one


def test_arrows_of_replies_lead_to_each_of_them(service: ChatService) -> None:
    handle = ask(service, "one").handle
    ended(service, service.regenerate(handle, SETTINGS))
    ended(service, service.regenerate(handle, SETTINGS))
    siblings = service.messages(handle)[1].siblings
    assert len(siblings) == 3 and service.messages(handle)[1].message_id == siblings[2]
    for one in siblings:
        service.show_branch(handle, one)
        assert service.messages(handle)[1].message_id == one
        assert service.messages(handle)[1].siblings == siblings


def test_a_reply_in_the_middle_is_written_again_on_a_branch_of_its_own(
    service: ChatService,
) -> None:
    handle = ask(service, "one").handle
    ask(service, "two", handle)
    old = texts(service, handle)
    middle = id_at(service, handle, 1)
    ended(service, service.regenerate(handle, SETTINGS, middle))
    assert len(texts(service, handle)) == 2 and len(service.messages(handle)[1].siblings) == 2
    service.show_branch(handle, middle)
    assert texts(service, handle) == old
    other = ask(service, "elsewhere").handle
    with pytest.raises(RequestError):
        service.regenerate(other, SETTINGS, middle)


@pytest.mark.parametrize("text", ["", " \n", "\t"])
def test_an_empty_edit_does_nothing(service: ChatService, text: str) -> None:
    handle = ask(service, "one").handle
    assert service.edit(handle, id_at(service, handle, 0), text, SETTINGS) is None
    assert len(service.store.messages(handle)) == 2


def test_a_message_of_another_conversation_is_refused(service: ChatService) -> None:
    first, second = ask(service, "one").handle, ask(service, "two").handle
    foreign = id_at(service, second, 0)
    with pytest.raises(RequestError, match="older than the log"):
        service.edit(first, foreign, "x", SETTINGS)
    with pytest.raises(RequestError, match="older than the log"):
        service.show_branch(first, foreign)
    with pytest.raises(RequestError, match="older than the log"):
        service.edit(first, 999, "x", SETTINGS)
    assert texts(service, first) == ["one", WHOLE]


def test_an_edit_that_does_not_fit_is_refused_with_nothing_stored(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path, Script(reply="ok", round_s=0.001, context_length=600))
    handle = ask(service, "one").handle
    with pytest.raises(ContextOverflow):
        service.edit(handle, id_at(service, handle, 0), "word " * 900, SETTINGS)
    assert len(service.store.messages(handle)) == 2
    close(service)


def test_while_a_reply_is_written_its_conversation_stays_as_it_is(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path, Script(round_s=0.05))
    reply = service.submit(None, "one", SETTINGS)
    assert reply is not None
    until(lambda: reply.view.text != "")
    handle = reply.handle
    asked = id_at(service, handle, 0)
    assert service.edit(handle, asked, "uno", SETTINGS) is None
    assert service.regenerate(handle, SETTINGS) is None
    assert service.proceed(handle, SETTINGS) is None
    with pytest.raises(RequestError, match="still being written"):
        service.show_branch(handle, asked)
    service.stop(reply)
    ended(service, reply)
    close(service)


@pytest.mark.slow
def test_a_double_click_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, _ = open_service(tmp_path, Script(reply=WHOLE, round_s=0.05))
    handle = ask(service, "one").handle

    def slowly(*asked: Any, **more: Any) -> PendingTurn | None:
        time.sleep(0.05)
        return regenerated(*asked, **more)

    monkeypatch.setattr("localspec.chat.branches.regenerated", slowly)
    found: list[Reply | None] = []
    clicks = [
        threading.Thread(target=lambda: found.append(service.regenerate(handle, SETTINGS)))
        for _ in range(4)
    ]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    (reply,) = [one for one in found if one is not None]
    ended(service, reply)
    assert len(service.messages(handle)[1].siblings) == 2
    close(service)


# Going on


def cut(service: ChatService, num_tokens: int = 4) -> int:
    """A conversation whose reply was cut by its length; its handle."""
    reply = ask(service, "Count.", max_tokens=num_tokens)
    assert reply.view.finish_reason == "length"
    return reply.handle


def test_going_on_makes_one_text_with_the_numbers_of_both_turns_apart(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    service, backend = service_and_fake
    handle = cut(service)
    first = id_at(service, handle, 1)
    reply = service.proceed(handle, SETTINGS)
    assert reply is not None and reply.view.text == service.store.branch(first)[-1].text
    ended(service, reply)
    assert texts(service, handle) == ["Count.", WHOLE] and reply.view.text == WHOLE
    assert service.messages(handle)[1].siblings == (reply.pending.turn.message_id,)  # type: ignore[union-attr]
    before, after = service.store.turn_rows()
    tokens = [service.store.reply_tokens(row["message_id"]) for row in (before, after)]
    assert [len(one[0]) for one in tokens if one] == [
        before["num_output_tokens"],
        after["num_output_tokens"],
    ]
    assert (before["num_output_tokens"], before["continues_message_id"]) == (4, None)
    assert after["continues_message_id"] == first and after["continued_from"] == "tokens"
    request = backend.requests[-1]
    record = service.reply_record(id_at(service, handle, 1)).record
    assert record is not None and record.start == len(service.store.branch(first)[-1].text)
    assert request.continues and request.messages[-1].role == "assistant"
    assert list(request.begun_tokens) == tokens[0][0]  # type: ignore[index]


def test_going_on_again_hands_over_every_token_so_far(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    service, backend = service_and_fake
    handle = cut(service)
    for _ in range(2):
        ended(service, service.proceed(handle, ReplySettings(max_tokens=3)))
    ended(service, service.proceed(handle, SETTINGS))
    assert texts(service, handle) == ["Count.", WHOLE]
    assert [len(one.begun_tokens) for one in backend.requests] == [0, 4, 7, 10]
    assert len(service.messages(handle)[1].siblings) == 1
    assert sum(row["num_output_tokens"] for row in service.store.turn_rows()) == len(
        [
            token
            for part in service.store.message_tree.continued(id_at(service, handle, 1))
            for token in (service.store.reply_tokens(part) or ((),))[0]
        ]
    )


@pytest.mark.slow
def test_a_stopped_reply_can_be_gone_on_with(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path, Script(round_s=0.01))
    reply = service.submit(None, "Explain.", SETTINGS)
    assert reply is not None
    until(lambda: len(reply.view.text) > 20)
    service.stop(reply)
    stopped = ended(service, reply).view.text
    again = ended(service, service.proceed(reply.handle, SETTINGS))
    assert again.view.text.startswith(stopped) and again.view.text == Script().reply
    close(service)


def test_an_interrupted_reply_goes_on_from_its_text(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "localspec.db")) as store:
        made = store.create_conversation("chat")
        asked = store.add_message(made, None, "user", "Count.")
        session = store.start_session(SessionInfo())
        turn = store.begin_turn(session, made, asked, TURN_SETTINGS)
        store.checkpoint_reply(turn.message_id, "One two thr\ufffd")
    service, backend = open_service(tmp_path)
    assert service.messages(made)[1].state == "interrupted"
    ended(service, service.proceed(made, SETTINGS))
    # Half a character at the end is written anew.
    assert backend.requests[-1].messages[-1] == Message("assistant", "One two thr")
    assert backend.requests[-1].begun_tokens == ()
    assert texts(service, made) == ["Count.", WHOLE]
    assert service.store.turn_rows()[-1]["continued_from"] == "text"
    close(service)


def test_without_a_word_so_far_the_message_is_answered_from_the_start(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    service, backend = service_and_fake
    made = service.store.create_conversation("a crash came before the reply")
    service.store.add_message(made, None, "user", "Count.")
    ended(service, service.proceed(made, SETTINGS))
    assert texts(service, made) == ["Count.", WHOLE]
    assert not backend.requests[-1].continues
    empty = service.store.create_conversation("nothing at all")
    assert service.proceed(empty, SETTINGS) is None


def test_going_on_that_fails_at_once_keeps_the_text(tmp_path: Path) -> None:
    script = Script(reply=WHOLE, round_s=0.001)
    service, backend = open_service(tmp_path, script)
    handle = cut(service)
    begun = texts(service, handle)[1]
    script.fault, script.fail_at_round = ZeroDivisionError("broken"), backend.num_rounds
    failed = ended(service, service.proceed(handle, SETTINGS))
    assert failed.view.finish_reason == "error" and failed.view.text == begun
    assert texts(service, handle) == ["Count.", begun]
    script.fault = None
    ended(service, service.proceed(handle, SETTINGS))
    assert texts(service, handle) == ["Count.", WHOLE]
    close(service)


def test_a_reply_gone_on_with_from_another_branch_leaves_that_branch_its_place(
    service: ChatService,
) -> None:
    handle = cut(service)
    first = id_at(service, handle, 1)
    ended(service, service.regenerate(handle, SETTINGS))
    second = id_at(service, handle, 1)
    service.show_branch(handle, first)
    ended(service, service.proceed(handle, SETTINGS))
    whole = id_at(service, handle, 1)
    assert service.messages(handle)[1].siblings == (second, whole)


def test_the_export_holds_both_turns_and_the_whole_text(
    service: ChatService, tmp_path: Path
) -> None:
    handle = cut(service)
    ended(service, service.proceed(handle, SETTINGS))
    export(service.store, Scope(conversation_id=handle), "csv", tmp_path / "out.csv")
    lines = (tmp_path / "out.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3 and WHOLE in lines[2] and "continues_message_id" in lines[0]


# A log that fails


@pytest.mark.slow
def test_editing_and_going_on_work_while_the_log_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 0.05)
    service, backend = open_service(tmp_path)
    handle = ask(service, "one").handle
    asked = id_at(service, handle, 0)
    store = service.store
    assert isinstance(store, BreakableStore)
    store.fault = "The disk is full. Free disk space and try again."
    ended(service, service.edit(handle, asked, "uno", ReplySettings(max_tokens=4)))
    assert texts(service, handle)[0] == "uno"
    ended(service, service.proceed(handle, ReplySettings(max_tokens=3)))
    ended(service, service.proceed(handle, SETTINGS))
    assert texts(service, handle) == ["uno", WHOLE]
    assert [len(one.begun_tokens) for one in backend.requests] == [0, 0, 4, 7]
    with pytest.raises(RequestError, match="recorded"):
        service.show_branch(handle, asked)
    ask(service, "two", handle)
    assert texts(service, handle) == ["uno", WHOLE, "two", WHOLE]
    ended(service, service.regenerate(handle, SETTINGS))
    ask(service, "three", handle)
    whole_chat = ["uno", WHOLE, "two", WHOLE, "three", WHOLE]
    assert texts(service, handle) == whole_chat
    store.fault = None
    assert until(service.journal.flush)
    assert texts(service, handle) == whole_chat
    rows = store.turn_rows()
    assert [row["continued_from"] for row in rows[:5]] == [None, None, "tokens", "tokens", None]
    continued = [row["continues_message_id"] for row in rows[2:4]]
    assert continued == [row["message_id"] for row in rows[1:3]]
    service.show_branch(handle, asked)
    assert texts(service, handle) == ["one", WHOLE]
    close(service)


class DyingStore(WatchedStore):
    """A store whose process dies after n writes: none after that reaches the disk."""

    num_left = 10**9

    def before_write(self) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise StoreError("The process is gone.")


def live(service: ChatService) -> None:
    """Every kind of turn, one after the other; each as far as the log still goes."""
    handle = ask(service, "one", max_tokens=4).handle
    ended(service, service.proceed(handle, SETTINGS))
    ended(service, service.regenerate(handle, ReplySettings(max_tokens=4)))
    ended(service, service.proceed(handle, SETTINGS))
    message_id = service.messages(handle)[0].message_id
    if message_id is not None:
        ended(service, service.edit(handle, message_id, "uno", SETTINGS))


@pytest.mark.slow
@pytest.mark.parametrize("num_writes", range(15))
def test_a_crash_after_any_write_leaves_a_tree_that_goes_on(
    tmp_path: Path, num_writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "RETRY_S", 60.0)
    dying = DyingStore.open(tmp_path / "localspec.db")
    assert isinstance(dying, DyingStore)
    service, _ = open_service(tmp_path, FAST, dying)
    dying.num_left = num_writes
    live(service)
    assert (dying.num_left < 0) == (num_writes < 14)
    close(service)
    with closing(sqlite3.connect(tmp_path / "localspec.db")) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert conn.execute("PRAGMA foreign_key_check").fetchall() == []
    again, _ = open_service(tmp_path)
    for row in again.conversations():
        shown = again.messages(row.id)
        assert shown[0].role == "user" and shown[0].text in ("one", "uno")
        assert all(one.state != "draft" and WHOLE.startswith(one.text) for one in shown[1:])
        ended(again, again.proceed(row.id, SETTINGS))
        assert texts(again, row.id)[-1] == WHOLE
        ask(again, "and then?", row.id)
    close(again)


# Depth


@pytest.mark.slow
def test_five_thousand_messages_are_shown_and_gone_on_with_at_once(tmp_path: Path) -> None:
    script = Script(reply="ok", round_s=0.001, context_length=10**6)
    service, _ = open_service(tmp_path, script)
    store = service.store
    messages = [
        StoredMessage(n, 0, n - 1 if n else None, ROLES[n % 2], f"message {n}", "complete", "")
        for n in range(5000)
    ]
    deep = Imported(Conversation(0, "deep", "", 4999), (*messages,))
    (made,) = store.conversation_list.add_imported([deep])
    started_s = time.process_time()
    assert len(service.messages(made)) == 5000
    ended(service, service.edit(made, 5, "edited", SETTINGS))
    assert len(service.messages(made)) == 6
    service.show_branch(made, 5)
    assert len(service.messages(made)) == 5000
    ended(service, service.proceed(made, SETTINGS))
    service.delete(made)
    assert store.conversation_list.purge()
    assert time.process_time() - started_s < 60  # 4 s; a walk for each message takes minutes
    close(service)


def test_a_long_chain_of_unstored_turns_is_walked_not_climbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = open_service(tmp_path)
    talk = OpenConversation(-1, "deep")
    for n in range(3000):
        talk.tip = follow_up(service.store, talk, f"message {n}")
    for _ in range(3000):
        talk.tip = regenerated(service.store, talk)
    assert talk.tip is not None and talk.tip.base_id is None
    assert len(messages_of(service.store, talk)) == 6000
    close(service)


# The context gauge


def test_the_gauge_counts_conversation_and_draft(service: ChatService) -> None:
    settings = ReplySettings(max_tokens=100, system_prompt="Be brief.")
    empty = service.context_usage(None, "", settings)
    typed = service.context_usage(None, "some more words", settings)
    assert empty is not None and typed is not None
    assert empty.num_tokens < typed.num_tokens
    assert (typed.num_reply_tokens, typed.context_length) == (100, 4096)
    handle = ask(service, "one").handle
    talked = service.context_usage(handle, "some more words", settings)
    assert talked is not None and talked.num_tokens > typed.num_tokens
    flooded = service.context_usage(handle, "word " * 5000, settings)
    assert talked.num_tokens + 100 < 4096 < flooded.num_tokens + 100  # type: ignore[union-attr]


def test_the_gauge_is_unknown_while_nothing_is_loaded(tmp_path: Path) -> None:
    gate = threading.Event()
    store = Store.open(tmp_path / "localspec.db")

    def open_backend(report: object) -> FakeBackend:
        gate.wait(WAIT_S)
        return FakeBackend()

    service = ChatService(store, SessionInfo, open_backend)
    service.start()
    assert service.context_usage(None, "hi", SETTINGS) is None
    gate.set()
    until(lambda: service.context_usage(None, "hi", SETTINGS) is not None)
    close(service)


def test_an_attached_file_is_part_of_what_is_asked(
    service_and_fake: tuple[ChatService, FakeBackend],
) -> None:
    from localspec.chat.attachments import Attachment, with_attachments

    service, backend = service_and_fake
    text = with_attachments("What does it say?", [Attachment("notes.txt", "Buy bread.\n")])
    ask(service, text)
    asked: Request = backend.requests[-1]
    assert "Buy bread." in asked.messages[-1].content and "`notes.txt`" in texts(service, 1)[0]
