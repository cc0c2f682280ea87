"""What a model thinks is apart in the log, its exports and the history, and comes back."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.chat.service import ChatService, ReplySettings
from localspec.core.decoding import AUTO
from localspec.record.contents import Scope
from localspec.record.export import Format
from tests.kit.fakes import FakeBackend, Script
from tests.kit.services import ask, close, ended, open_service
from tests.kit.waiting import until

THOUGHT, ANSWER = "A question about ferns, it seems.", "Green ones."
RAW = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"


@pytest.fixture
def thinking_service(tmp_path: Path) -> Iterator[tuple[ChatService, FakeBackend]]:
    service, backend = open_service(tmp_path, Script(RAW, round_s=0.0))
    yield service, backend
    close(service)


def exported(service: ChatService, format: Format, folder: Path) -> Path:
    service.export(Scope(), format, folder / "out")
    return folder / "out"


def test_the_log_has_thought_and_reply_apart(
    thinking_service: tuple[ChatService, FakeBackend], tmp_path: Path
) -> None:
    service, backend = thinking_service
    handle = ask(service, "Which?").handle
    shown = service.messages(handle)[-1]
    assert (shown.thinking, shown.text) == (THOUGHT, ANSWER)
    row = service.turn_rows(handle)[0]
    assert row["num_thinking_tokens"] > 3 and row["thinking_ms"] >= 0
    assert service.conversations("ferns") == [], "a search is for what was said"
    record = service.reply_record(shown.message_id or 0)
    assert record.text == THOUGHT + ANSWER and record.record is not None
    assert sum(record.record.lengths) == len(record.text)
    ask(service, "And?", handle)
    assert backend.requests[-1].messages[1].thinking == THOUGHT
    assert backend.requests[-1].messages[1].content == ANSWER


def test_exports_name_the_thought_and_an_import_keeps_it(
    thinking_service: tuple[ChatService, FakeBackend], tmp_path: Path
) -> None:
    service, _ = thinking_service
    ask(service, "Which?")
    with exported(service, "csv", tmp_path).open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["thinking"], row["reply"]) == (THOUGHT, ANSWER)
    report = exported(service, "markdown", tmp_path).read_text(encoding="utf-8")
    assert f"no part of the reply:\n\n> > {THOUGHT}\n\nReply:\n\n> {ANSWER}\n" in report
    data = exported(service, "jsonl", tmp_path).read_bytes()
    (again,) = service.import_conversations(data)
    assert service.messages(again)[-1].thinking == THOUGHT


def test_a_chat_that_is_copied_or_not_logged_has_its_thoughts(
    thinking_service: tuple[ChatService, FakeBackend],
) -> None:
    service, _ = thinking_service
    handle = ask(service, "Which?").handle
    assert service.messages(service.copy(handle))[-1].thinking == THOUGHT
    service.store.logs_text = False
    unlogged = ask(service, "Which?").handle
    assert service.messages(unlogged)[-1].thinking == THOUGHT
    stored = service.store.snapshot()
    with stored:
        assert service.store.messages(unlogged)[-1].is_logged is False
    assert service.messages(service.copy(unlogged))[-1].thinking == THOUGHT


def test_a_checkpoint_that_comes_after_the_end_changes_no_unlogged_reply(
    thinking_service: tuple[ChatService, FakeBackend],
) -> None:
    service, _ = thinking_service
    service.store.logs_text = False
    reply = ask(service, "Which?")
    reply.pending.reply_text, reply.pending.reply_thinking = "", THOUGHT[:5]
    service.journal.checkpoint(reply.pending)
    service.journal.flush()
    kept = service.messages(reply.handle)[-1]
    assert (kept.thinking, kept.text) == (THOUGHT, ANSWER)


def test_a_thought_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    service, backend = open_service(tmp_path, Script(RAW, round_s=0.02, accepted=(0,)))
    try:
        reply = service.submit(None, "Which?", ReplySettings(thinks=True, thinking_budget=50))
        assert reply is not None
        until(lambda: reply.view.thinking)
        service.stop(reply)
        ended(service, reply)
        begun = service.messages(reply.handle)[-1]
        assert THOUGHT.startswith(begun.thinking) and begun.text == ""
        backend.script.round_s = 0.0
        backend.script.reply = RAW.removeprefix(f"<think>\n{begun.thinking}")
        ended(service, service.proceed(reply.handle, ReplySettings()))
        asked = backend.requests[-1]
        assert asked.continues and asked.messages[-1].thinking == begun.thinking
        row = service.turn_rows(reply.handle)[0]
        assert (row["thinks"], row["thinking_budget"]) == (1, 50)
        replayed = service.replay(begun.message_id or 0, AUTO).request
        assert (replayed.thinks, replayed.thinking_budget) == (True, 50)
    finally:
        close(service)
