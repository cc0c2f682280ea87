"""What readers of a reply see of its rounds."""

from __future__ import annotations

import pytest

from localspec.chat.attachments import Attachment, with_attachments
from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.titles import title_of
from localspec.chat.turn import Reply, ReplySettings, ShownMessage, prompt_messages
from localspec.core.backend import Chunk
from localspec.core.decoding import OFF, TARGET, Step
from localspec.core.turn_stats import TurnStats


@pytest.mark.parametrize(
    ("sources", "drafter", "shown"),
    [
        (("eagle", TARGET), "eagle", "eagle"),
        (("ngram", "draft_model", TARGET), "chained", "chained"),
        ((TARGET,), "chained", OFF),
    ],
)
def test_a_round_was_drafted_by_the_one_that_was_asked(
    sources: tuple[str, ...], drafter: str, shown: str
) -> None:
    reply = Reply(PendingTurn(OpenConversation(-1, "one"), "hello"), ReplySettings())
    num_accepted = len(sources) - 1
    step = Step(drafter, 4, num_accepted, len(sources), 1.0, 2.0, 10)
    tokens = tuple(range(len(sources)))
    reply.add(Chunk("decode", TurnStats(3).plus(step), "text", tokens, sources, step))
    (found,) = reply.view.rounds
    assert (found.num_drafted, found.drafter) == (num_accepted, shown)
    reply.end("eos")
    assert reply.pending.end is not None and reply.pending.end.provenance == list(sources)


def test_half_a_character_is_mended_before_it_is_asked() -> None:
    """The tokenizer would refuse it, and name the message for a fault of the system prompt."""
    shown = [ShownMessage("user", "cut \ud83d", "complete", 1)]
    asked = prompt_messages("be \udc00 kind", shown)
    assert [one.content for one in asked] == ["be \ufffd kind", "cut \ufffd"]


def test_a_chat_begun_with_a_file_alone_is_called_after_it() -> None:
    files = [Attachment("notes.md", "# Plan"), Attachment("b.py", "pass")]
    assert title_of(with_attachments("", files)) == "notes.md"
    assert title_of(with_attachments("what is this?", files)) == "what is this?"
