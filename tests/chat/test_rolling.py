"""A chat that drops its oldest messages does so for messages that waited, too."""

from __future__ import annotations

from pathlib import Path

from localspec.chat.service import ReplySettings
from tests.chat.services import close, ended, open_service
from tests.fakes import Script


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
