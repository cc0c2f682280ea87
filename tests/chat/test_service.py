"""The service answers one turn at a time, stores every ending, and survives its parts failing."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.chat import journal
from localspec.chat.service import (
    ChatService,
    ReplySettings,
    ShownMessage,
)
from localspec.chat.turn import prompt_messages
from localspec.core.backend import Message, Request
from localspec.core.errors import ContextOverflow, MemoryShortage, RequestError, SetupError
from localspec.record.store import Store
from tests.kit.fakes import BreakableStore, FakeBackend, Script, session_info
from tests.kit.samples import siblings
from tests.kit.services import ask
from tests.kit.waiting import WAIT_S, until

FAST = Script(reply="One two three four five six seven eight nine ten.", round_s=0.002)

Start = Callable[..., ChatService]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Make and start a service on a script; closed at the end of the test."""
    started: list[ChatService] = []

    def make(script: Script = FAST, before_load: Callable[[], None] = lambda: None) -> ChatService:
        store = BreakableStore.open(tmp_path / "localspec.db", busy_timeout_ms=200)

        def open_backend(report: Callable[[str], None]) -> FakeBackend:
            report("Loading the target")
            before_load()
            return FakeBackend(script)

        service = ChatService(store, session_info, open_backend)
        service.start()
        started.append(service)
        return service

    yield make
    for service in started:
        service.close()
        service.store.close()


def ready(service: ChatService) -> FakeBackend:
    until(lambda: service.status().phase == "ready")
    backend = service.lifecycle.backend
    assert isinstance(backend, FakeBackend)
    return backend


def states(service: ChatService, handle: int) -> list[tuple[str, str]]:
    return [(message.role, message.state) for message in service.messages(handle)]


def test_a_reply_arrives_whole_and_is_stored_with_its_figures(start: Start) -> None:
    service = start()
    reply = ask(service, "Count.")
    row = service.store.turn_rows()[0]
    stats = reply.view.stats
    assert stats is not None
    assert reply.view.text == FAST.reply
    assert [message.text for message in service.messages(reply.handle)] == ["Count.", FAST.reply]
    assert row["finish_reason"] == "eos"
    assert row["num_accepted_tokens"] == stats.num_accepted_tokens > 0
    assert row["speedup"] == pytest.approx(stats.speedup)
    assert len(service.store.step_rows(row["turn_id"])) == stats.num_steps


def test_the_message_is_committed_before_generation_starts(start: Start, tmp_path: Path) -> None:
    seen: list[list[tuple[str, str]]] = []

    def reply(request: Request) -> str:
        with sqlite3.connect(tmp_path / "localspec.db") as other:
            seen.append(other.execute("SELECT role, text FROM message").fetchall()[:1])
        other.close()
        return "Yes."

    service = start(Script(reply=reply, round_s=0.001))
    ask(service, "Are you there?")
    assert seen == [[("user", "Are you there?")]]


def test_a_message_sent_while_loading_waits_and_is_answered(start: Start) -> None:
    gate = threading.Event()
    service = start(before_load=lambda: (gate.wait(WAIT_S), None)[1])
    reply = service.submit(None, "hi", ReplySettings())
    assert reply is not None
    assert reply.view.phase == "loading"
    assert states(service, reply.handle)[0] == ("user", "complete")
    gate.set()
    assert reply.done.wait(WAIT_S)
    assert reply.view.finish_reason == "eos"


def test_stop_ends_a_reply_within_a_round_and_stores_what_there_is(start: Start) -> None:
    service = start(Script(round_s=0.02))
    backend = ready(service)
    reply = service.submit(None, "hi", ReplySettings())
    assert reply is not None
    text = until(lambda: reply.view.text)
    service.stop(reply)
    assert reply.done.wait(WAIT_S)
    assert service.latest is reply and service.current is None
    assert reply.view.finish_reason == "cancelled" and reply.view.text.startswith(text)
    ask(service, "And now?", reply.handle)
    turns = service.store.turn_rows()
    assert [turn["state"] for turn in turns] == ["stopped", "complete"]
    num_logged = sum(len(service.store.step_rows(turn["turn_id"])) for turn in turns)
    assert backend.num_rounds == num_logged, "no round was run for a reply that had ended"


def test_stop_takes_a_waiting_reply_out_of_the_queue(start: Start) -> None:
    service = start(Script(round_s=0.02))
    ready(service)
    first = service.submit(None, "one", ReplySettings())
    second = service.submit(None, "two", ReplySettings())
    assert first is not None and second is not None
    until(lambda: first.view.text != "")
    assert (second.view.phase, second.view.position) == ("queued", 1)
    service.stop(second)
    assert second.done.is_set() and not first.done.is_set()
    service.stop(first)
    assert first.done.wait(WAIT_S)
    assert service.journal.flush()
    assert [row["state"] for row in service.store.turn_rows()] == ["stopped", "stopped"]


def test_two_sends_are_answered_in_order_with_their_own_text(start: Start) -> None:
    service = start(Script(reply=lambda request: request.messages[-1].content * 9, round_s=0.002))
    ready(service)
    replies = [service.submit(None, name, ReplySettings()) for name in ("left ", "right ")]
    for reply, name in zip(replies, ("left ", "right "), strict=True):
        assert reply is not None and reply.done.wait(WAIT_S)
        assert reply.view.text == name * 9


def test_a_queued_message_of_the_same_conversation_sees_the_reply_before_it(start: Start) -> None:
    gate = threading.Event()
    script = Script(reply="Because.", round_s=0.001)
    service = start(script, before_load=lambda: (gate.wait(WAIT_S), None)[1])
    first = service.submit(None, "Why?", ReplySettings())
    assert first is not None
    second = service.submit(first.handle, "And then?", ReplySettings())
    gate.set()
    assert second is not None and second.done.wait(WAIT_S)
    backend = ready(service)
    asked = [message.content for message in backend.requests[-1].messages]
    assert asked == ["Why?", "Because.", "And then?"]
    assert service.journal.flush()
    assert [m.text for m in service.messages(first.handle)] == [*asked, "Because."]


@pytest.mark.slow
def test_of_two_messages_sent_at_once_one_follows_the_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were two branches, and only one of them was to be seen."""
    service = start()
    backend = ready(service)
    first = ask(service, "Why?")
    both = threading.Barrier(2)
    count = backend.count_tokens

    def count_slowly(messages: tuple[Message, ...], tools: object = ()) -> int:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return count(messages)

    monkeypatch.setattr(backend, "count_tokens", count_slowly)
    senders = [
        threading.Thread(target=service.submit, args=(first.handle, text, ReplySettings()))
        for text in ("left", "right")
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(WAIT_S)
    until(lambda: service.running(first.handle) is None)
    shown = [m.text for m in service.messages(first.handle) if m.role == "user"]
    assert sorted(shown) == ["Why?", "left", "right"] and shown[0] == "Why?"


def test_an_empty_message_does_nothing(start: Start) -> None:
    service = start()
    ready(service)
    assert service.submit(None, " \n\t", ReplySettings()) is None
    assert service.conversations() == []


def test_overflow_is_refused_with_the_counts_and_nothing_is_stored(start: Start) -> None:
    service = start(Script(context_length=600))
    ready(service)
    with pytest.raises(ContextOverflow, match=r"\d+ tokens.*512.*600"):
        service.submit(None, "word " * 200, ReplySettings())
    assert service.conversations() == []


def test_an_overflow_by_the_system_prompt_names_it_and_not_the_message(start: Start) -> None:
    service = start(Script(context_length=1500))
    ready(service)
    with pytest.raises(ContextOverflow, match="Shorten the system prompt") as found:
        service.submit(None, "hi", ReplySettings(system_prompt="word " * 1200))
    assert "most of them the system prompt" in str(found.value)
    assert "1,500" in str(found.value) and "the message" not in str(found.value)


def test_an_unavailable_drafter_is_refused_with_its_reason(start: Start) -> None:
    service = start()
    ready(service)
    with pytest.raises(RequestError, match="The compressed copy cannot draft here: a 4-bit copy"):
        service.submit(None, "hi", ReplySettings(drafter="self_quant"))


@pytest.mark.slow
@pytest.mark.parametrize("num_words", [1, 900])
def test_a_message_is_on_disk_before_the_engine_is_asked_whether_it_fits(
    start: Start, monkeypatch: pytest.MonkeyPatch, num_words: int
) -> None:
    """An engine that stands still holds up the check; a kill at that moment loses nothing."""
    service, short = start(Script(reply="ok", context_length=1200)), ReplySettings(max_tokens=60)
    backend = ready(service)
    handle = ask(service, "one").handle
    asked = service.messages(handle)[0].message_id or 0
    edited = service.edit(handle, asked, "uno", short)
    assert edited is not None and edited.done.wait(WAIT_S) and service.flush()
    service.show_branch(handle, asked)
    before = service.messages(handle)
    on_disk = list[list[str]]()

    def count_tokens(messages: tuple[Message, ...], tools: object = ()) -> int:
        on_disk.append([one.text for one in service.store.messages(handle)])
        return FakeBackend.count_tokens(backend, messages)

    monkeypatch.setattr(backend, "count_tokens", count_tokens)
    text = "word " * num_words
    if num_words == 1:
        assert service.edit(handle, asked, text, short) is not None
        assert on_disk[0].count(text) == 1
        return
    with pytest.raises(ContextOverflow):
        service.edit(handle, asked, text * 2, short)
    assert on_disk[0].count(text * 2) == 1
    assert service.messages(handle) == before, "the branch that was in use"
    with pytest.raises(ContextOverflow):
        service.regenerate(handle, ReplySettings(max_tokens=1200))
    assert service.messages(handle) == before, "an earlier message is not taken back"


@pytest.mark.slow
@pytest.mark.parametrize("failing_round", [0, 1, 5])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (MemoryShortage("The cache needs 1 GiB more. Shorten the context."), "needs 1 GiB more"),
        (ZeroDivisionError("division by zero"), "unexpected fault (ZeroDivisionError"),
    ],
)
def test_a_fault_keeps_the_partial_reply_and_the_next_turn_works(
    start: Start, fault: Exception, sentence: str, failing_round: int
) -> None:
    service = start(
        Script(round_s=0.001, fail_at_round=failing_round, fault=fault, reply=FAST.reply * 5)
    )
    ready(service)
    failed = ask(service, "hi")
    assert failed.view.error is not None and sentence in failed.view.error
    row = service.store.turn_rows()[0]
    assert (row["state"], row["error"]) == ("error", failed.view.error)
    assert (failed.view.text == "") == (failing_round == 0)
    assert service.messages(failed.handle)[1].text == failed.view.text
    again = ask(service, "again", failed.handle)
    assert again.view.finish_reason == "eos"


def test_a_failed_load_is_said_and_every_message_is_answered_with_it(start: Start) -> None:
    def fail() -> None:
        raise SetupError("The folder models/demo is missing. Give --model another one.")

    service = start(before_load=fail)
    until(lambda: service.status().phase == "failed")
    assert "models/demo is missing" in service.status().phrase
    reply = ask(service, "hi")
    assert reply.view.error == "The folder models/demo is missing. Give --model another one."
    assert states(service, reply.handle) == [("user", "complete"), ("assistant", "error")]


def test_a_failing_log_never_stops_the_chat_and_catches_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "RETRY_S", 0.05)
    service = start()
    ready(service)
    store = service.store
    assert isinstance(store, BreakableStore)
    first = ask(service, "first")
    store.fault = "The disk is full. Free disk space and try again."
    second = service.submit(first.handle, "second", ReplySettings())
    assert second is not None and second.done.wait(WAIT_S)
    assert service.running(first.handle) is None
    third = service.submit(None, "elsewhere", ReplySettings())
    assert third is not None and third.done.wait(WAIT_S)
    assert third.handle < 0
    other = service.regenerate(first.handle, ReplySettings())
    assert other is not None and other.done.wait(WAIT_S)
    assert any("The disk is full" in notice for notice in service.status().notices)
    assert [m.role for m in service.messages(first.handle)] == ["user", "assistant"] * 2
    store.fault = None
    until(lambda: service.journal.notice is None)
    assert [m.text for m in service.messages(first.handle)][2] == "second"
    assert [row["state"] for row in store.turn_rows()] == ["complete"] * 4
    assert third.handle > 0
    assert len(siblings(store, service.messages(first.handle)[3].message_id or 0)) == 2


@pytest.mark.slow
def test_a_log_locked_by_another_program_is_waited_for(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "RETRY_S", 0.05)
    service = start()
    ready(service)
    other = sqlite3.connect(tmp_path / "localspec.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    reply = service.submit(None, "hi", ReplySettings())
    assert reply is not None and reply.done.wait(WAIT_S)
    assert reply.view.text == FAST.reply
    until(lambda: any("locked" in notice for notice in service.status().notices))
    other.execute("ROLLBACK")
    other.close()
    until(lambda: service.journal.notice is None)
    assert [m.text for m in service.messages(reply.handle)] == ["hi", FAST.reply]


@pytest.mark.parametrize("every_s", [0.02, 60.0])
def test_the_growing_reply_is_checkpointed_from_its_first_words_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    monkeypatch.setattr("localspec.chat.worker.CHECKPOINT_S", every_s)
    service = start(Script(round_s=0.02))
    ready(service)
    reply = service.submit(None, "hi", ReplySettings())
    assert reply is not None

    def is_kept() -> bool:
        turn = reply.pending.turn
        return turn is not None and service.store.branch(turn.message_id)[-1].text != ""

    until(is_kept)
    assert not reply.done.is_set()
    assert reply.pending.turn is not None
    kept = service.store.branch(reply.pending.turn.message_id)[-1]
    assert kept.state == "draft" and reply.view.text.startswith(kept.text)
    service.stop(reply)


def test_regenerate_keeps_both_replies_under_the_same_message(start: Start) -> None:
    service = start()
    ready(service)
    first = ask(service, "hi")
    second = service.regenerate(first.handle, ReplySettings())
    assert second is not None and second.done.wait(WAIT_S)
    assert service.journal.flush()
    shown = service.messages(first.handle)
    assert len(shown) == 2
    assert len(siblings(service.store, shown[1].message_id or 0)) == 2


@pytest.mark.slow
def test_calibration_pauses_for_a_turn_and_goes_on_after_it(start: Start) -> None:
    phrases = tuple(f"Measuring {n}" for n in range(6))
    service = start(
        Script(reply="Hm.", round_s=0.001, calibration=phrases, calibration_step_s=0.08)
    )
    until(lambda: service.status().phase == "calibrating")
    assert service.status().phrase.startswith("Measuring")
    reply = ask(service, "hi")
    backend = service.lifecycle.backend
    assert isinstance(backend, FakeBackend)
    assert reply.view.finish_reason == "eos"
    until(lambda: service.status().phase == "ready" and not service.lifecycle.needs_calibration)
    assert backend.num_measured == len(phrases)


def test_what_a_reply_asked_for_is_prepared_once_it_is_written(start: Start) -> None:
    service = start(Script(reply="Hm.", round_s=0.001))
    ready(service)
    backend = service.lifecycle.backend
    assert isinstance(backend, FakeBackend)
    until(lambda: not service.lifecycle.needs_calibration)
    steps = (*backend.script.calibration, "preparing drafts of 4 tokens")
    backend.script = replace(backend.script, calibration=steps, calibration_step_s=0.01)
    assert ask(service, "hi").view.finish_reason == "eos"
    until(lambda: backend.num_measured == len(steps))
    until(lambda: service.status().phase == "ready")


def test_controller_state_is_kept(start: Start) -> None:
    service = start()
    ready(service)
    ask(service, "hi")
    backend = service.lifecycle.backend
    assert isinstance(backend, FakeBackend)
    service.close()
    assert service.store.load_state("controller") == {"num_rounds": backend.num_rounds}
    assert backend.is_closed


@pytest.mark.slow
def test_what_was_learnt_is_kept_before_the_model_is_loaded_again(tmp_path: Path) -> None:
    """The log may be slow; the next load reads from it what the last one left."""

    class Slow(Store):
        def save_state(self, *asked: Any) -> None:
            time.sleep(0.2)
            super().save_state(*asked)

    read = list[Any]()
    with closing(Slow.open(tmp_path / "localspec.db")) as store:

        def open_backend(report: Any) -> FakeBackend:
            read.append(store.load_state("controller"))
            return FakeBackend(Script(reply="ok"))

        service = ChatService(store, session_info, open_backend)
        service.start()
        ready(service)
        ask(service, "hi")
        service.retry()
        until(lambda: len(read) == 2 and service.status().phase == "ready")
        service.close()
    assert read[0] is None and read[1]["num_rounds"] > 0


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    for turn in range(2):
        store = Store.open(tmp_path / "localspec.db")
        service = ChatService(store, session_info, lambda report: FakeBackend(FAST))
        service.start()
        handle = store.conversations()[0].id if turn else None
        reply = ask(service, f"turn {turn}", handle)
        texts = [message.text for message in service.messages(reply.handle)]
        service.close()
        store.close()
    assert texts == ["turn 0", FAST.reply, "turn 1", FAST.reply]


def test_difficult_text_comes_back_as_it_was(start: Start) -> None:
    service = start(Script(reply=lambda request: request.messages[-1].content, round_s=0.001))
    ready(service)
    text = "👩‍👩‍👧 שלום <|im_end|> a\0b e\u0301 \x1b[31m \ufeff"
    reply = ask(service, text)
    assert [message.text for message in service.messages(reply.handle)] == [text, text]


def test_half_a_surrogate_pair_becomes_a_replacement_character(start: Start) -> None:
    service = start(Script(reply=lambda request: request.messages[-1].content, round_s=0.001))
    ready(service)
    assert ask(service, "a\ud83dz").view.text == "a\ufffdz"


def test_prompt_leaves_empty_replies_out_and_joins_what_then_stands_together() -> None:
    shown = [
        ShownMessage("user", "one", "complete", 1),
        ShownMessage("assistant", "", "stopped", 2),
        ShownMessage("user", "two", "complete", 3),
    ]
    assert prompt_messages("Be brief.", shown) == (
        Message("system", "Be brief."),
        Message("user", "one\n\ntwo"),
    )
    assert prompt_messages(" ", shown[:1]) == (Message("user", "one"),)
