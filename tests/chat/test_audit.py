"""A replay says identical, tie or fault, and a turn that cannot be replayed says why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from localspec.backend import Candidate, Chunk, Message, Request
from localspec.chat import audit
from localspec.core import OFF
from localspec.errors import LocalspecError
from tests.fakes import FakeBackend, Script

ROW: dict[str, Any] = {
    "temperature": 0.0,
    "num_output_tokens": 5,
    "exact": True,
    "continues_message_id": None,
    "model": "demo-12m",
    "dtype": "float32",
    "repetition_penalty": 1.0,
    "finish_reason": "eos",
}
HELLO = (Message("user", "hello"),)
GO = threading.Event()


@dataclass
class Says(FakeBackend):
    """A backend whose plain reply and candidates are given."""

    tokens: tuple[int, ...] = ()
    best: tuple[Candidate, ...] = ()
    dtype: str = "float32"
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def describe(self) -> Any:
        return replace(super().describe(), dtype=self.dtype)

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        self.requests.append(request)
        chunks = FakeBackend(Script(round_s=0.0)).generate(request, cancel)
        first = next(iter(chunks))
        for token in self.tokens[: request.max_tokens]:
            yield replace(first, phase="decode", tokens=(token,))

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        self.asked.append(tokens)
        return self.best


def replayed(
    backend: Says, *tokens: int, cancel: threading.Event = GO, finish_reason: str = "length"
) -> audit.Finding:
    row = {**ROW, "dtype": backend.dtype, "finish_reason": finish_reason}
    replay = audit.Replay(HELLO, row, tokens)
    replay.run(backend, cancel)
    assert replay.finding is not None and replay.refusal is None
    return replay.finding


def best(margin: float) -> tuple[Candidate, ...]:
    return (Candidate(3, " cat", 10.0, 0.5), Candidate(9, " dog", 10.0 - margin, 0.4))


def test_the_same_tokens_are_identical_and_were_decoded_plainly() -> None:
    backend = Says(tokens=(1, 2, 3))
    found = replayed(backend, 1, 2, 3)
    assert (found.outcome, found.num_compared) == ("identical", 3)
    assert backend.requests[0].drafter == OFF and backend.requests[0].sampling.temperature == 0.0
    assert "Identical" in audit.sentence(found) and "3 tokens" in audit.sentence(found)


@pytest.mark.parametrize(
    ("margin", "dtype", "outcome"),
    [
        (0.00005, "float32", "tie"),
        (0.01, "float32", "differs"),
        (0.01, "bfloat16", "tie"),
        (0.5, "bfloat16", "differs"),
    ],
)
def test_a_difference_is_judged_by_the_margin_of_both_candidates(
    margin: float, dtype: str, outcome: str
) -> None:
    backend = Says(tokens=(1, 9, 4), best=best(margin), dtype=dtype)
    found = replayed(backend, 1, 3, 5)
    assert (found.outcome, found.num_compared) == (outcome, 1)
    assert backend.asked == [(1,)]
    said = audit.sentence(found)
    assert "token 2" in said and "“ cat” (logit 10.0000" in said and "“ dog”" in said
    assert ("this is a fault" in said) is (outcome == "differs")


def test_a_token_outside_the_candidates_is_a_fault() -> None:
    found = replayed(Says(tokens=(7,), best=best(0.0)), 3)
    assert found.outcome == "differs" and "not among the 2 likeliest" in audit.sentence(found)


def test_a_reply_that_goes_on_where_it_had_ended_is_seen() -> None:
    ended = (Candidate(9, " dog", 5.0, 0.5), Candidate(0, "", 4.99999, 0.5))
    found = replayed(Says(tokens=(1, 2, 9), best=ended), 1, 2, finish_reason="eos")
    assert (found.outcome, found.num_compared) == ("tie", 2)
    assert "the end of the reply" in audit.sentence(found)


def test_a_replay_that_was_stopped_says_how_far_it_came() -> None:
    stopped = threading.Event()
    stopped.set()
    found = replayed(Says(tokens=(1,)), 1, 2, cancel=stopped)
    assert (found.outcome, found.num_compared) == ("cancelled", 1)


def test_a_fault_of_the_engine_is_no_finding() -> None:
    class Fails(Says):
        def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
            for chunk in super().generate(request, cancel):
                yield replace(chunk, phase="done", finish_reason="error", error="Out of memory.")

    with pytest.raises(LocalspecError, match="Out of memory"):
        replayed(Fails(tokens=(1,)), 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"temperature": 0.7}, "sampled at temperature 0.7"),
        ({"exact": False}, "lenient"),
        ({"continues_message_id": 4}, "continues an earlier one"),
        ({"model": "other"}, "written by other"),
        ({"dtype": "bfloat16"}, "written in bfloat16"),
        ({"num_output_tokens": 0}, "nothing to compare"),
        ({"temperature": None}, "nothing to compare"),
    ],
)
def test_what_cannot_be_replayed_says_why(changed: dict[str, Any], words: str) -> None:
    replay = audit.Replay(HELLO, ROW | changed, (1,))
    replay.run(Says(), GO)
    assert words in (replay.refusal or "") and replay.finding is None


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), None)],
)
def test_the_end_of_the_shorter_one_is_a_difference(
    one: tuple[int, ...], other: tuple[int, ...], place: int | None
) -> None:
    assert audit.first_difference(one, other) == place


def test_nothing_is_decoded_beyond_the_first_difference() -> None:
    given: list[int] = []

    class Counts(Says):
        def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
            for chunk in super().generate(request, cancel):
                given.extend(chunk.tokens)
                yield chunk

    replayed(Counts(tokens=(1, 9, 4, 5), best=best(0.0)), 1, 3, 4, 5)
    assert given == [1, 9]
