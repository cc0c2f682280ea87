"""What readers of a reply see of its rounds."""

from __future__ import annotations

import pytest

from localspec.backend import Chunk, TurnStats
from localspec.chat.entries import Entry, Talk
from localspec.chat.turn import Reply, ReplySettings
from localspec.core import OFF, TARGET, Step


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
    reply = Reply(Entry(Talk(-1, "one"), "hello"), ReplySettings())
    num_accepted = len(sources) - 1
    step = Step(drafter, 4, num_accepted, len(sources), 1.0, 2.0, 10)
    tokens = tuple(range(len(sources)))
    reply.take(Chunk("decode", TurnStats(3).plus(step), "text", tokens, sources, step))
    (found,) = reply.view.rounds
    assert (found.num_drafted, found.drafter) == (num_accepted, shown)
    assert reply.provenance == list(sources)
