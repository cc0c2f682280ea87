"""OpenAI's own client has a text continued as it stands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from localspec.core.backend import BYTES_AS_TEXT, Chunk, Logprob, Message, Request
from localspec.core.turn_stats import TurnStats
from tests.api.doors import REPLY, Doors, serve_interfaces
from tests.kit.fakes import FakeBackend

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "demo-12m"


def test_a_text_is_continued_without_the_chat_format(client: OpenAI, doors: Doors) -> None:
    found = client.completions.create(model=MODEL, prompt="Count:", max_tokens=400)
    assert found.choices[0].text == REPLY and found.choices[0].finish_reason == "stop"
    asked = doors.fake.requests[-1]
    assert asked.is_raw and asked.messages == (Message("user", "Count:"),)
    assert found.choices[0].speculation["drafter"] == "draft_model"  # type: ignore[attr-defined]


def test_a_stream_spells_the_same_text_up_to_the_usual_limit(client: OpenAI, doors: Doors) -> None:
    parts = list(client.completions.create(model=MODEL, prompt="endless", stream=True))
    assert (200 * REPLY).startswith("".join(part.choices[0].text for part in parts))
    assert parts[-1].choices[0].finish_reason == "length"
    assert doors.fake.requests[-1].max_tokens == 16


def test_every_prompt_has_its_choices(client: OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt=["echo a", "echo b"], n=2)
    assert [choice.text for choice in found.choices] == ["echo a"] * 2 + ["echo b"] * 2
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]


def test_every_prompt_is_counted_once(client: OpenAI) -> None:
    prompts = ["echo a", "echo this and much more"]
    one, other = (client.completions.create(model=MODEL, prompt=each).usage for each in prompts)
    assert one is not None and other is not None and one.prompt_tokens != other.prompt_tokens
    both = client.completions.create(model=MODEL, prompt=prompts, n=2).usage
    *parts, last = client.completions.create(
        model=MODEL, prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}
    )
    assert not any(part.usage for part in parts)
    for usage in (both, last.usage):
        assert usage is not None
        assert usage.prompt_tokens == one.prompt_tokens + other.prompt_tokens
        assert usage.completion_tokens == 2 * (one.completion_tokens + other.completion_tokens)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize(("prompts", "n"), [(["x"] * 9, 2), ([], 1)])
def test_too_many_prompts_are_named_as_what_is_too_much(
    client: OpenAI, prompts: list[str], n: int
) -> None:
    import openai

    said = f"n is {n} for each of {len(prompts)} prompts, .* between 1 and 16"
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(model=MODEL, prompt=prompts, n=n)


def test_logprobs_have_the_places_of_their_tokens(client: OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt="Count:", logprobs=1, max_tokens=400)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert REPLY[offset:].startswith(token)
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {" one": -0.5}


FOX = "\N{FOX FACE}"


class Halving(FakeBackend):
    """Its rounds end within a character, as those of a model with byte tokens."""

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        first, last = (
            part.decode(errors=BYTES_AS_TEXT) for part in (FOX.encode()[:2], FOX.encode()[2:])
        )
        halves, stats = [Logprob(first, -0.5, ()), Logprob(last, -0.5, ())], TurnStats(1)
        both = (Logprob("a", -0.5, ()), halves[0]), (halves[1], Logprob("b", -0.5, ()))
        yield Chunk("prefill", stats)
        yield Chunk("decode", stats, "a", (1, 2), lengths=(1, 0), logprobs=both[0])
        yield Chunk("decode", stats, f"{FOX}b", (3, 4), lengths=(1, 1), logprobs=both[1])
        yield Chunk("done", stats, finish_reason="eos")


def test_parts_of_a_character_have_its_place(tmp_path: Path) -> None:
    with serve_interfaces(Halving(), tmp_path) as doors, doors.openai() as client:
        found = client.completions.create(model=MODEL, prompt="x", logprobs=0).choices[0]
        stream = client.completions.create(model=MODEL, prompt="x", logprobs=0, stream=True)
        streamed = [part.choices[0].logprobs for part in stream]
        asked: Any = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
        chat = client.chat.completions.create(model=MODEL, **asked).choices[0].logprobs
    assert [one.token for one in chat.content] == ["a", "\ufffd", "\ufffd", "b"]
    assert bytes(byte for one in chat.content for byte in one.bytes).decode() == f"a{FOX}b"
    assert found.logprobs is not None and found.logprobs.text_offset == [0, 1, 1, 2]
    assert found.text[2] == "b"
    offsets = [place for one in streamed if one is not None for place in one.text_offset or ()]
    assert offsets == [0, 1, 1, 2]


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "."}, {"best_of": 4}, {"n": 17}])
def test_what_cannot_be_done_is_refused(client: OpenAI, fields: dict[str, object]) -> None:
    import openai

    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="x", **fields)  # type: ignore[call-overload]
