"""A chat that drops its oldest messages does so for messages that waited, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from localspec.chat.service import ReplySettings
from localspec.core.backend import Chunk, Message, Request
from localspec.core.errors import ContextOverflow, EngineLost
from tests.kit.fakes import FakeBackend, Script
from tests.kit.services import close, ended, open_service


@pytest.mark.slow
def test_an_engine_that_is_slow_to_count_is_neither_lost_nor_is_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, backend = open_service(tmp_path, Script())
    first = service.submit(None, "first", ReplySettings())
    assert first is not None and ended(service, first)
    service.decide(first.handle, "roll")

    def count_tokens(messages: tuple[Message, ...], tools: object = ()) -> int:
        raise EngineLost("The engine does not answer.")

    with monkeypatch.context() as patched:
        patched.setattr(backend, "count_tokens", count_tokens)
        patched.setattr(backend, "generate", partial(uncounted, backend))
        reply = service.submit(first.handle, "second", ReplySettings())
        assert ended(service, reply).view.finish_reason == "eos"
    assert not service.lifecycle.was_lost
    close(service)


def uncounted(backend: FakeBackend, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
    """`generate` counts by itself, at the other end."""
    return FakeBackend(backend.script).generate(request, cancel)


@pytest.mark.slow
def test_a_message_that_waits_until_the_context_is_full_follows_what_the_chat_decided(
    tmp_path: Path,
) -> None:
    """When it was sent, the reply before it was still empty."""
    script = Script(reply="word " * 60, round_s=0.005, context_length=180)
    service, backend = open_service(tmp_path, script)
    settings = ReplySettings(max_tokens=60)
    first = service.submit(None, "first", settings)
    assert first is not None
    service.decide(first.handle, "roll")
    later = [service.submit(first.handle, text, settings) for text in ("second", "third")]
    replies = [ended(service, reply) for reply in later]
    assert [reply.view.error for reply in replies] == [None, None]
    assert [reply.settings.num_left_out for reply in replies] == [0, 2]
    asked = [message.content for message in backend.requests[-1].messages]
    assert asked[0] == "second" and asked[-1] == "third"
    assert [row["num_left_out"] for row in service.turn_rows()] == [0, 0, 2]
    close(service)


def test_a_rolling_chat_frees_room_for_several_messages_at_once(tmp_path: Path) -> None:
    """What stands behind the messages that are left out is read again, so that happens seldom."""
    service, _ = open_service(
        tmp_path, Script(reply="word " * 20, round_s=0.001, context_length=300)
    )
    settings = ReplySettings(max_tokens=20)
    handle = ended(service, service.submit(None, "first", settings)).handle
    service.decide(handle, "roll")
    left_out = list[int]()
    for number in range(16):
        last = left_out[-1] if left_out else 0
        kept = ReplySettings(max_tokens=20, num_left_out=last)  # as a page asks
        reply = ended(service, service.submit(handle, f"message {number}", kept))
        left_out.append(reply.settings.num_left_out)
    changes = sum(left != right for left, right in pairwise(left_out))
    assert left_out[-1] > 0 and changes <= 3
    close(service)


@pytest.mark.slow
def test_what_an_edited_message_could_go_without_is_what_stands_before_it(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path, Script(reply="word " * 20, context_length=120))
    settings = ReplySettings(max_tokens=20)
    handle = ended(service, service.submit(None, "first", settings)).handle
    for text in ("second", "third"):
        ended(service, service.submit(handle, text, settings))
    edited = next(one for one in service.messages(handle) if one.text == "second").message_id
    with pytest.raises(ContextOverflow) as overflow:
        service.edit(handle, edited or 0, "word " * 80, settings)
    assert overflow.value.fewest_left_out == 2
    close(service)
