"""What readers of a reply see of its rounds."""

from __future__ import annotations

import pytest

from localspec.chat.attachments import Attachment, with_attachments
from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.titles import title_of
from localspec.chat.turn import Reply, ReplySettings, ShownMessage, prompt_messages
from localspec.core.backend import Chunk
from localspec.core.decoding import TARGET, Step
from localspec.core.turn_stats import TurnStats


@pytest.mark.parametrize(
    ("sources", "drafter", "num_filled", "shown"),
    [
        (("eagle", TARGET), "eagle", 0, ("eagle",)),
        (("ngram", "draft_model", TARGET), "chained", 0, ("chained",)),
        (("mtp", "ngram", TARGET), "mtp", 3, ("mtp", "ngram")),
        (("mtp", TARGET), "mtp", 3, ("mtp",)),
        ((TARGET,), "chained", 0, ()),
    ],
)
def test_round_names_the_drafters_of_its_accepted_tokens(
    sources: tuple[str, ...], drafter: str, num_filled: int, shown: tuple[str, ...]
) -> None:
    reply = Reply(PendingTurn(OpenConversation(-1, "one"), "hello"), ReplySettings())
    num_accepted = len(sources) - 1
    filler = "ngram" if num_filled else None
    step = Step(
        drafter, 4, num_accepted, len(sources), 1.0, 2.0, 10,
        num_checked_tokens=num_accepted + 1, num_filled_tokens=num_filled, filler=filler,
    )  # fmt: skip
    tokens = tuple(range(len(sources)))
    reply.add(Chunk("decode", TurnStats(3).plus(step), "text", tokens, sources, step))
    (found,) = reply.view.rounds
    assert (found.num_drafted, found.drafters) == (num_accepted, shown)
    if num_filled:  # the guesses of each drafter are its own
        assert reply.view.stats is not None
        assert reply.view.stats.drafted_by == {"mtp": 1, "ngram": 3}
        assert reply.view.guesses == {"mtp": (1, 1), "ngram": (num_accepted - 1, num_accepted)}
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
