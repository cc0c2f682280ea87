"""Of a program's conversation, sent whole with each request, only what is new is logged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.chat.programs import ProgramService
from localspec.core.backend import Message, Request, ToolCall
from localspec.record.export import Scope
from tests.kit.fakes import Script
from tests.kit.services import close, ended, open_service

CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


def scripted(request: Request) -> str:
    asked = request.messages[-1].content
    return CALL if asked == "weather?" else f" reply to {asked} "


def opened(folder: Path) -> ProgramService:
    service, _ = open_service(folder, Script(reply=scripted, round_s=0.0, prefill_s=0.0))
    return ProgramService(service)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[ProgramService]:
    found = opened(tmp_path)
    yield found
    close(found.service)


def asked(*texts: str, system: str = "") -> Request:
    """The person's message and the program's reply in turns."""
    roles = ("user", "assistant")
    messages = [Message(roles[place % 2], text) for place, text in enumerate(texts)]  # type: ignore[arg-type]
    if system:
        messages.insert(0, Message("system", system))
    return Request(tuple(messages), workload="auto")


def answered(programs: ProgramService, request: Request) -> list[str]:
    """What the log holds of the conversation at the end of this turn, in the order of its talk."""
    ended(programs.service, programs.answer(request))
    row = programs.service.turn_rows()[-1]
    return [one.text.strip() for one in programs.service.store.branch(row["message_id"])]


def stored(programs: ProgramService) -> int:
    store = programs.service.store
    return sum(len(store.messages(one.id)) for one in store.conversations())


def conversations(programs: ProgramService) -> int:
    return len({row["conversation_id"] for row in programs.service.turn_rows()})


def test_a_long_chat_is_logged_once_and_each_turn_has_its_row(
    programs: ProgramService, tmp_path: Path
) -> None:
    said = list[str]()
    for number in range(12):
        said.append(f"question {number}")
        found = answered(programs, asked(*said, system="Be brief."))
        said.append(f"reply to question {number}")  # without the spaces around it, as some send it
        assert found == said
    assert stored(programs) == 24 and conversations(programs) == 1
    assert len(programs.service.turn_rows()) == 12
    out = tmp_path / "out.md"
    programs.service.export(Scope(), "markdown", out)
    assert out.read_text("utf-8").count("reply to question 3") == 1


def test_another_reply_stands_beside_the_first(programs: ProgramService) -> None:
    answered(programs, asked("one"))
    again = asked("one", "reply to one", "two")
    assert answered(programs, again) == answered(programs, again)
    assert (stored(programs), conversations(programs)) == (5, 1)


def test_a_changed_history_is_a_branch(programs: ProgramService) -> None:
    answered(programs, asked("one"))
    answered(programs, asked("one", "reply to one", "two"))
    changed = ["one", "another reply", "two"]
    assert answered(programs, asked(*changed)) == [*changed, "reply to two"]
    assert (stored(programs), conversations(programs)) == (4 + 3, 1)


def test_the_answer_of_a_tool_follows_the_call(programs: ProgramService) -> None:
    answered(programs, asked("weather?"))
    call = Message("assistant", "", (ToolCall("1", "weather", "{}"),))
    told = Message("tool", "Sun.", call_id="1")
    request = Request((Message("user", "weather?"), call, told), workload="auto")
    assert answered(programs, request) == ["weather?", CALL, "Sun.", "reply to Sun."]
    assert (stored(programs), conversations(programs)) == (4, 1)


def test_requests_that_begin_alike_are_conversations_of_their_own(
    programs: ProgramService,
) -> None:
    for system in ("", "", "Be brief."):
        answered(programs, asked("one", system=system))
    assert (stored(programs), conversations(programs)) == (6, 3)
    other = asked("one", "reply to one", "two", system="Be long.")
    assert answered(programs, other) == ["one", "reply to one", "two", "reply to two"]
    assert conversations(programs) == 4


def test_a_request_follows_a_turn_that_the_log_could_not_take_yet(
    programs: ProgramService,
) -> None:
    """The program is faster than the disk: the reply has ended, its row has not."""
    first = programs.answer(asked("one"))
    assert first.done.wait(20)
    second = programs.answer(asked("one", "reply to one", "two"))
    ended(programs.service, second)
    assert (stored(programs), conversations(programs)) == (4, 1)


def started_again(programs: ProgramService, folder: Path) -> ProgramService:
    """The same log in the next process."""
    close(programs.service)
    return opened(folder)


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    programs = opened(tmp_path)
    said = ["one", "reply to one", "two", "reply to two"]  # without the spaces around a reply
    answered(programs, asked("one", system="Be brief."))
    answered(programs, asked(*said[:3], system="Be brief."))
    programs = started_again(programs, tmp_path)
    assert answered(programs, asked(*said, "three", system="Be brief.")) == [
        *said,
        "three",
        "reply to three",
    ]
    assert (stored(programs), conversations(programs)) == (6, 1)
    changed = ["one", "another reply", "two"]
    answered(programs, asked(*changed, system="Be brief."))
    assert (stored(programs), conversations(programs)) == (6 + 3, 1), "a branch"
    answered(programs, asked("one", system="Be brief."))
    answered(programs, asked(*said, "three", system="Be long."))
    assert conversations(programs) == 3, "no earlier messages; another system prompt"
    close(programs.service)


def test_what_follows_a_call_is_logged_once_also_after_a_restart(tmp_path: Path) -> None:
    programs = opened(tmp_path)
    call = Message("assistant", "", (ToolCall("1", "weather", "{}"),))
    told = Message("tool", "Sun.", call_id="1")
    said = (Message("user", "weather?"), call, told)
    answered(programs, asked("weather?"))
    answered(programs, Request(said, workload="auto"))
    programs = started_again(programs, tmp_path)
    said = (*said, Message("assistant", "reply to Sun."), Message("user", "wind?"))
    answered(programs, Request(said, workload="auto"))
    assert (stored(programs), conversations(programs)) == (6, 1)
    close(programs.service)


def test_a_conversation_without_texts_begins_anew_after_a_restart(tmp_path: Path) -> None:
    programs = opened(tmp_path)
    programs.service.store.keep_text(False)
    answered(programs, asked(""))
    answered(programs, asked("one"))
    programs = started_again(programs, tmp_path)
    answered(programs, asked("one", "reply to one", "two"))
    answered(programs, asked("", "", "two"))
    assert conversations(programs) == 4
    close(programs.service)


def test_only_the_newest_conversations_are_looked_through(
    programs: ProgramService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.record.message_tree.MOST_CONVERSATIONS", 2)
    for text in ("one", "two", "three"):
        answered(programs, asked(text))
    answered(programs, asked("two", "reply to two", "more"))
    assert conversations(programs) == 3
    answered(programs, asked("one", "reply to one", "more"))
    assert conversations(programs) == 4, "it was begun before the newest two"


def test_a_conversation_without_texts_goes_on_in_its_own_process(programs: ProgramService) -> None:
    programs.service.store.keep_text(False)
    answered(programs, asked("one", system="Be brief."))
    answered(programs, asked("one", "reply to one", "two", system="Be brief."))
    assert (stored(programs), conversations(programs)) == (4, 1)
