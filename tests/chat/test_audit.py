"""A reply is made again with what was logged, and what is found is said in words."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from localspec.chat import audit
from localspec.chat.service import ReplySettings
from localspec.core.backend import Candidate, Chunk, Message, Request
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.errors import LocalspecError, StoreError
from tests.kit.fakes import FakeBackend, Script
from tests.kit.services import ask, close, ended, open_service

ROW: dict[str, Any] = {
    "temperature": 0.0,
    "num_output_tokens": 5,
    "exact": True,
    "continues_message_id": None,
    "model": "demo-12m",
    "dtype": "float32",
    "repetition_penalty": 1.0,
    "presence_penalty": None,  # as an older log has it
    "frequency_penalty": 0.25,
    "finish_reason": "eos",
    "seed": 7,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "workload": "chat",
    "device": "cpu",
    "kernels": None,
    "target_fingerprint": None,
    "prompt_fingerprint": None,
    "thinks": None,
    "thinking_budget": None,
    "is_raw": None,
    "grammar": None,
    "source": "page",
    "decode_ms": 900.0,
    "num_draft_tokens": 4,
    "drafter": "ngram",
}
HELLO = (Message("user", "hello"),)
GO = threading.Event()


@dataclass
class Says(FakeBackend):
    """A backend whose plain reply and candidates are given."""

    tokens: tuple[int, ...] = ()
    best: tuple[Candidate, ...] = ()
    dtype: str = "float32"
    fingerprint: str | None = None
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def describe(self) -> Any:
        return replace(super().describe(), dtype=self.dtype, fingerprint=self.fingerprint)

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        self.requests.append(request)
        chunks = FakeBackend(Script(round_s=0.0)).generate(request, cancel)
        first = next(iter(chunks))
        for token in self.tokens[: request.max_tokens]:
            stats = replace(first.stats, decode_ms=4.0)
            yield replace(first, phase="decode", tokens=(token,), stats=stats)

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        self.asked.append(tokens)
        return self.best


def replayed(
    backend: Says, *tokens: int, cancel: threading.Event = GO, **changed: Any
) -> tuple[audit.Finding, str]:
    """What was found, and the sentence about it."""
    row = {**ROW, "dtype": backend.dtype, "finish_reason": "length", **changed}
    replay = audit.Replay(HELLO, row, tokens)
    replay.run(backend, cancel)
    assert replay.finding is not None and replay.refusal is None
    return replay.finding, audit.sentence(replay)


def best(margin: float) -> tuple[Candidate, ...]:
    return (Candidate(3, " cat", 10.0, 0.5), Candidate(9, " dog", 10.0 - margin, 0.4))


def test_the_same_tokens_are_identical_and_were_decoded_plainly() -> None:
    backend = Says(tokens=(1, 2, 3))
    found, said = replayed(backend, 1, 2, 3)
    assert (found.outcome, found.num_compared) == ("identical", 3)
    assert backend.requests[0].drafter == OFF and backend.requests[0].sampling.temperature == 0.0
    head = "Identical: made again without drafting, the model wrote the same 3 tokens."
    times = "Writing took 900 ms then, with word lookup, and 4.00 ms now, without drafting."
    assert said == f"{head} {times}"


def test_a_sampled_reply_is_asked_for_with_its_seed_and_settings() -> None:
    backend = Says(tokens=(1, 2))
    row = {**ROW, "temperature": 0.7, "top_k": 40, "prompt_fingerprint": "p"}
    replay = audit.Replay(HELLO, row, (1, 2), drafter="ngram")
    replay.run(backend, GO)
    (asked,) = backend.requests
    assert asked.sampling == SamplingParams(0.7, top_k=40, seed=7, frequency_penalty=0.25)
    assert (asked.drafter, asked.max_tokens, asked.workload) == ("ngram", 3, "chat")
    assert "made again with drafting" in audit.sentence(replay)


def test_a_sampled_reply_that_differs_is_said_to_differ_by_rounding_alone() -> None:
    backend = Says(tokens=(1, 9), best=best(3.0))
    found, said = replayed(backend, 1, 3, temperature=0.7, prompt_fingerprint="p")
    assert found.outcome == "differs" and "The seed is the same, so both should be" in said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": "bfloat16"}, "the precision (bf16 then, fp32 now) changed"),
        ({"kernels": "fastest"}, None),  # unknown now
        ({"target_fingerprint": "other"}, "the files of the model changed"),
        (
            {"target_fingerprint": "other", "device": "a GPU"},
            "the device (a GPU then, cpu now) and the files of the model changed",
        ),
        ({"temperature": 0.7}, "how localspec draws tokens (it was written by an earlier version)"),
    ],
)
def test_what_changed_meanwhile_is_said_beside_a_difference(
    changed: dict[str, Any], words: str | None
) -> None:
    backend = Says(tokens=(1, 9), best=best(3.0), fingerprint="mine")
    found, said = replayed(backend, 1, 3, **changed)
    assert (found.outcome, found.is_explained) == ("differs", words is not None)
    assert (words or "this is a fault") in said
    assert ("no fault" in said) is found.is_explained
    same, said = replayed(Says(tokens=(1,), fingerprint="mine"), 1, **changed)
    assert same.outcome == "identical" and ("although" in said) is (words is not None)


def test_another_prompt_is_a_change() -> None:
    class Prompted(Says):
        def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
            for chunk in super().generate(request, cancel):
                yield replace(chunk, stats=replace(chunk.stats, prompt_fingerprint="now"))

    backend = Prompted(tokens=(9,), best=best(3.0))
    _, said = replayed(backend, 3, prompt_fingerprint="then")
    assert "the prompt as the model reads it (its chat template or tokenizer) changed" in said
    _, said = replayed(backend, 3, prompt_fingerprint="now")
    assert "changed" not in said


@pytest.mark.parametrize(
    ("margin", "dtype", "outcome"),
    [
        (0.00005, "float32", "tie"),
        (0.01, "float32", "differs"),
        (0.01, "bfloat16", "tie"),
        (0.5, "bfloat16", "differs"),
        (0.01, "4-bit", "tie"),  # its layers may compute in bf16
        (0.5, "8-bit", "differs"),
    ],
)
def test_a_difference_is_judged_by_the_margin_of_both_candidates(
    margin: float, dtype: str, outcome: str
) -> None:
    backend = Says(tokens=(1, 9, 4), best=best(margin), dtype=dtype)
    found, said = replayed(backend, 1, 3, 5)
    assert (found.outcome, found.num_compared) == (outcome, 1)
    assert backend.asked == [(1,)]
    assert "token 2" in said and "“ cat” (logit 10.0000" in said and "“ dog”" in said
    assert ("this is a fault" in said) is (outcome == "differs")


def test_a_token_outside_the_candidates_is_a_fault() -> None:
    found, said = replayed(Says(tokens=(7,), best=best(0.0)), 3)
    assert found.outcome == "differs" and "not among the 2 likeliest" in said


def test_a_reply_that_goes_on_where_it_had_ended_is_seen() -> None:
    ended = (Candidate(9, " dog", 5.0, 0.5), Candidate(0, "", 4.99999, 0.5))
    found, said = replayed(Says(tokens=(1, 2, 9), best=ended), 1, 2, finish_reason="eos")
    assert (found.outcome, found.num_compared) == ("tie", 2)
    assert "the end of the reply" in said


def test_a_replay_that_was_stopped_says_how_far_it_came() -> None:
    class Stopped(Says):
        def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
            yield from super().generate(request, cancel)
            cancel.set()

    cancel = threading.Event()
    for num_compared in (1, 0):  # the second replay is stopped before it begins
        found, _ = replayed(Stopped(tokens=(1,)), 1, 2, cancel=cancel)
        assert (found.outcome, found.num_compared) == ("cancelled", num_compared)


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
        ({"temperature": 0.7, "seed": None}, "its seed was not logged"),
        ({"exact": False}, "lenient"),
        ({"model": "other"}, "written by other"),
        ({"num_output_tokens": 0}, "nothing to compare"),
        ({"temperature": None}, "nothing to compare"),
    ],
)
def test_what_cannot_be_made_again_says_why(changed: dict[str, Any], words: str) -> None:
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


# -- out of a log ---------------------------------------------------------------------------


def test_every_reply_has_a_seed_and_is_asked_for_again_as_it_was(tmp_path: Path) -> None:
    """An answer without two of the earlier messages, and one that continues a cut reply."""
    service, backend = open_service(tmp_path)
    try:
        handle = ask(service, "First").handle
        ask(service, "Second", handle)
        settings = ReplySettings(
            SamplingParams(0.7, top_p=0.9), 4, system_prompt="Be brief.", num_left_out=2
        )
        ended(service, service.submit(handle, "Third", settings))
        ended(service, service.proceed(handle, settings))
        rows = service.turn_rows(handle)
        assert all(row["seed"] is not None for row in rows)
        assert len({row["seed"] for row in rows}) == len(rows)
        for row, asked in zip(rows, list(backend.requests), strict=True):
            replay = service.replay(row["message_id"], asked.drafter)
            replay.run(backend, threading.Event())
            again = backend.requests[-1]
            decisive = ("messages", "sampling", "continues", "begun_tokens", "drafter", "workload")
            assert {n: getattr(again, n) for n in decisive} == {
                n: getattr(asked, n) for n in decisive
            }
            assert again.max_tokens <= asked.max_tokens
            assert replay.finding is not None and replay.finding.outcome == "identical"
        assert backend.requests[3].continues and backend.requests[2].messages[1].content == "Second"
    finally:
        close(service)


def test_a_reply_that_is_not_in_the_log_cannot_be_made_again(tmp_path: Path) -> None:
    service, _ = open_service(tmp_path)
    try:
        with pytest.raises(StoreError, match="no tokens of this reply"):
            service.replay(99, OFF)
    finally:
        close(service)
