"""The model names a chat when it is idle, gives way to messages, and never renames a person's."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.chat.service import ChatService, ReplySettings
from localspec.chat.titles import ASK, title_from
from localspec.chat.turn import ShownMessage
from localspec.core.backend import Request
from localspec.record.store import Store
from tests.kit.fakes import FakeBackend, Script, session_info
from tests.kit.services import ask, close, ended
from tests.kit.waiting import until


def reply_of(request: Request) -> str:
    return "Title: **The lives of owls**" if request.messages[-1].content == ASK else "Owls sleep."


def opened(folder: Path, round_s: float = 0.001) -> tuple[ChatService, FakeBackend]:
    backend = FakeBackend(Script(reply=reply_of, round_s=round_s))
    store = Store.open(folder / "localspec.db")
    service = ChatService(store, session_info, lambda report: backend, makes_titles=True)
    service.start()
    until(lambda: service.status().phase == "ready")
    return service, backend


def titles(service: ChatService) -> list[str]:
    return [row.title for row in service.conversations()]


@pytest.mark.slow
def test_an_idle_model_names_the_chat_once_and_a_persons_title_stays(tmp_path: Path) -> None:
    service, backend = opened(tmp_path)
    handle = ask(service, "how do owls live?").handle
    assert titles(service) == ["how do owls live?"]
    until(lambda: titles(service) == ["The lives of owls"])
    asked = backend.requests[-1]
    before = backend.requests[-2].messages
    assert asked.messages[: len(before)] == before, "the cache holds the exchange"
    assert asked.max_tokens <= 24 and len(service.turn_rows()) == 1
    service.rename(handle, "mine")
    assert not service.store.conversation_list.entitle(handle, "another")
    close(service)


@pytest.mark.slow
def test_a_message_does_not_wait_for_a_title(tmp_path: Path) -> None:
    service, backend = opened(tmp_path, round_s=0.4)
    handle = ask(service, "how do owls live?").handle
    until(lambda: backend.requests[-1].messages[-1].content == ASK)
    reply = service.submit(handle, "and bees?", ReplySettings())
    ended(service, reply)
    assert titles(service) == ["how do owls live?"], "the title gave way"
    close(service)


def test_switched_off_it_stays_off(tmp_path: Path) -> None:
    service, _ = opened(tmp_path)
    assert service.titles is not None and service.titles.is_on
    service.titles.switch(False)
    reply = ask(service, "how do owls live?")
    assert service.titles.task(reply) is None
    close(service)
    service, _ = opened(tmp_path)
    assert service.titles is not None and not service.titles.is_on
    close(service)


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("Title: The lives of owls.", "The lives of owls"),
        ("\n“Owls at night”\nmore", "Owls at night"),
        ("owls " * 9, None),
        ("<think> about owls", None),
        ("Something else entirely", None),
        ("Owls, nothing else", None),
        ("A title about owls", None),
        ("```owls\ndef owls():", None),
        ("", None),
        ("...", None),
        ("I'm sorry, I can't title owls", None),
        ("I cannot write about owls", None),
        ("Sure! Owls at night", None),
        ("Sorry, no owls", None),
        ("As an AI, I know owls", None),
        ("Here is one: Owls", None),
        ("Assistant: owls at night", None),
        ("user", None),
        ("They sleep", None),
        ("Their lives are short", None),
        ("Their lives are", "Their lives are"),
        ("Owls in Iceland", "Owls in Iceland"),
        ("Sure signs of owls", "Sure signs of owls"),
        ("<think>\nThey sleep: a title\n</think>\nOwls at night", None),
    ],
)
def test_what_is_no_title_is_not_used(written: str, title: str | None) -> None:
    exchange = [ShownMessage("user", "how do owls live, at night?", "complete", 1)]
    exchange.append(ShownMessage("assistant", "They sleep. Their lives are short.", "complete", 2))
    assert title_from(written, exchange) == title
