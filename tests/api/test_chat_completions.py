"""OpenAI's own client gets chats from localspec: whole, streamed, refused, and logged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from localspec.api.accounts import StreamUsage
from localspec.api.chat_completions import Head, events
from localspec.api.pieces import Piece, pieces
from localspec.api.replies import Asked
from localspec.chat.tool_formats import FORMATS, CallFormat
from localspec.core.backend import Chunk, Message, Request
from localspec.core.turn_stats import TurnStats
from tests.api.doors import REPLY, Doors
from tests.kit.waiting import until

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "demo-12m"
ASKED = [{"role": "user", "content": "Count."}]


def test_a_whole_answer_has_text_usage_and_how_it_was_drafted(client: OpenAI) -> None:
    found = client.chat.completions.create(model=MODEL, messages=ASKED)  # type: ignore[arg-type]
    choice = found.choices[0]
    assert choice.message.content == REPLY and choice.message.role == "assistant"
    assert choice.finish_reason == "stop" and found.model == MODEL
    usage, speculation = found.usage, choice.speculation  # type: ignore[attr-defined]
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == speculation["num_accepted_tokens"] > 0
    rejected = speculation["num_draft_tokens"] - speculation["num_accepted_tokens"]
    assert details.rejected_prediction_tokens == rejected
    assert speculation["drafter"] == "draft_model" and speculation["exact"] is True
    assert speculation["mean_accepted_length"] > 1 and speculation["speedup"] > 0
    assert "fastest" in speculation["reason"] and isinstance(speculation["seed"], int)


def test_a_stream_spells_the_same_text_and_ends_with_the_usage(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=ASKED,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == REPLY
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts[-2:]] == [None, "stop"]
    assert parts[-1].choices[0].speculation["drafter"] == "draft_model"  # type: ignore[attr-defined]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens > 5
    assert len({part.id for part in chunks}) == 1 and len(parts) > 4


class Chunks(Asked):
    """A reply of these chunks, without a server."""

    def __init__(self, *chunks: Chunk | None, tools: tuple[Any, ...] = ()) -> None:
        reply: Any = SimpleNamespace(request=Request((), tools=tools))
        super().__init__(None, [reply])  # type: ignore[arg-type]
        self._chunks = chunks

    async def chunks(self, reply: Any) -> AsyncGenerator[Chunk | None]:
        for chunk in self._chunks:
            yield chunk

    def call_format(self, reply: Any) -> CallFormat:
        return FORMATS["tool_call"]


def test_a_stream_is_kept_open_within_a_long_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.api.pieces.PING_S", 0.0)
    tool = {"function": {"name": "f"}}
    begun = Chunk("decode", TurnStats(3), '<tool_call>{"name": "f", "arguments": {"text": "')
    asked = Chunks(Chunk("decode", TurnStats(3), "I write."), begun, begun, tools=(tool,))

    async def found() -> list[Piece | None]:
        return [piece async for piece in pieces(asked, asked.replies[0])]

    assert [piece and piece.text for piece in asyncio.run(found())] == [
        "I write.", "", None, "", None,
    ]  # fmt: skip


def test_the_role_comes_with_the_turn_and_not_before_it() -> None:
    """A reply that waits in the queue has said nothing, by which clients measure the wait."""

    async def first_events() -> list[bytes | None]:
        asked = Chunks(None, Chunk("prefill", TurnStats(3)))
        usage = StreamUsage(None, 1)
        return [one async for one in events(asked, Head("a", "b", "c", None), usage)]

    nothing, begun, *_ = asyncio.run(first_events())
    assert nothing is None and begun is not None and b'"role": "assistant"' in begun


def test_the_settings_reach_the_engine(client: OpenAI, doors: Doors) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "Be brief."}, *ASKED],  # type: ignore[list-item]
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["five"],
        max_completion_tokens=9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        extra_body={
            "top_k": 5,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "drafter": "ngram",
            "num_draft_tokens": 3,
            "workload": "code",
            "leniency": "threshold:0.5",
        },
    )
    asked = doors.fake.requests[-1]
    assert asked.messages == (Message("system", "Be brief."), Message("user", "Count."))
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.05, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (asked.stop, asked.max_tokens) == (("five",), 9)
    assert (asked.drafter, asked.num_draft_tokens, asked.workload) == ("ngram", 3, "code")
    assert sampling.leniency is not None


def test_unset_settings_are_those_of_openai(client: OpenAI, doors: Doors) -> None:
    client.chat.completions.create(model=MODEL, messages=ASKED)  # type: ignore[arg-type]
    asked = doors.fake.requests[-1]
    assert asked.sampling.temperature == 1.0 and asked.sampling.leniency is None
    assert asked.max_tokens is None, "as many as the context has room for"
    assert asked.workload == "chat", "recognised"


def test_every_choice_has_a_seed_of_its_own(client: OpenAI, doors: Doors) -> None:
    found = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,  # type: ignore[arg-type]
        n=3,
        seed=5,
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in doors.fake.requests] == [5, 6, 7]
    seeds = [choice.speculation["seed"] for choice in found.choices]  # type: ignore[attr-defined]
    assert seeds == [5, 6, 7]
    assert found.usage is not None and found.usage.completion_tokens % 3 == 0


def test_parts_of_text_are_joined(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "echo "}, {"type": "text", "text": "this"}]
    found = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
    )
    assert found.choices[0].message.content == "echo this"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temperature": 9}, "temperature", "between 0 and 5"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"extra_body": {"drafter": "oracle"}}, "drafter", "no drafter called 'oracle'"),
        ({"extra_body": {"drafter": "self_quant"}}, "drafter", "cannot draft here"),
        ({"extra_body": {"leniency": "loose"}}, "leniency", "is no lenient rule"),
        ({"extra_body": {"leniency": "threshold:7"}}, "leniency", "must lie between"),
        ({"extra_body": {"num_draft_tokens": -1}}, "num_draft_tokens", "must lie between 0"),
        ({"extra_body": {"workload": "poems"}}, "workload", "no kind of text called 'poems'"),
        ({"extra_body": {"best_of": 3}}, "best_of", "best_of is 3, but all choices are returned"),
        ({"extra_body": {"min_tokens": 5}}, "min_tokens", "Send ignore_eos"),
        ({"extra_body": {"guided_json": {"type": "object"}}}, "guided_json", "response_format"),
        ({"functions": [{"name": "f"}]}, "functions", "sent as tools"),
        ({"extra_body": {"top_k": -2}}, "top_k", "top_k is -2, but it must lie between 0"),
        ({"extra_body": {"thinking_budget": 2**63}}, "thinking_budget", "must be smaller than 2"),
        ({"max_tokens": 2**63}, "max_tokens", "must be smaller than 2"),
        (
            {"extra_body": {"chat_template_kwargs": {"Thinking": True}}},
            "chat_template_kwargs.Thinking",
            "does not know the field",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
            "messages.0.content.0.type",
            "messages.0.content.0.type: Field required",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "valid string"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"n": 99}, "n", "between 1 and 16"),
        ({"n": 0}, "n", "Choose a number in this range"),
        ({"frequency_penalty": 3}, "frequency_penalty", "between -2 and 2"),
        ({"logit_bias": {"5": 9}}, "logit_bias", "no such bias"),
        ({"messages": []}, "messages", "no message to answer"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages.0.role", "must have one of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "read text only",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(
    client: OpenAI, doors: Doors, fields: dict[str, object], param: str | None, said: str
) -> None:
    import openai

    asked = {"model": MODEL, "messages": ASKED, **fields}
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert caught.value.type == "invalid_request_error" and caught.value.param == param
    assert doors.fake.requests == []


def test_logprobs_of_each_token_are_given_where_they_are_asked_for(client: OpenAI) -> None:
    import openai

    asked = {"model": MODEL, "messages": ASKED, "logprobs": True, "top_logprobs": 2}
    found = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    content = found.choices[0].logprobs.content
    assert "".join(one.token for one in content) == REPLY
    assert content[0].bytes == list(b"One") and content[0].logprob == -0.5
    assert [one.token for one in content[0].top_logprobs] == [" one", " two"]
    parts = client.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    streamed = [part.choices[0].logprobs for part in parts]
    assert sum(len(one.content) for one in streamed if one) == len(content)
    with pytest.raises(openai.BadRequestError, match="needs logprobs"):
        client.chat.completions.create(**{**asked, "logprobs": False})  # type: ignore[call-overload]


def test_the_bytes_of_a_part_of_a_character_are_not_known(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "echo \N{REPLACEMENT CHARACTER}é"}]
    asked = {"model": MODEL, "messages": messages, "logprobs": True}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content  # type: ignore[call-overload]
    found = {one.token: one.bytes for one in content}
    assert found["\N{REPLACEMENT CHARACTER}"] is None and found["é"] == [0xC3, 0xA9]


def test_what_the_model_thinks_is_apart(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "think"}]}
    message = client.chat.completions.create(**asked).choices[0].message  # type: ignore[call-overload]
    assert (message.reasoning_content, message.content) == ("Let me see.", REPLY)
    parts = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    deltas = [part.choices[0].delta for part in parts]
    assert "".join(getattr(one, "reasoning_content", "") for one in deltas) == "Let me see."
    assert "".join(one.content or "" for one in deltas) == REPLY


def test_a_model_that_is_not_loaded_is_not_found(client: OpenAI) -> None:
    import openai

    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match=f"no model 'gpt-9' here, but '{MODEL}'"):
        client.chat.completions.create(model="gpt-9", messages=ASKED)  # type: ignore[arg-type]


def test_turns_are_logged_apart_from_the_pages_chats(client: OpenAI, doors: Doors) -> None:
    client.chat.completions.create(
        model=MODEL,
        messages=[  # type: ignore[list-item]
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "First."},
            {"role": "assistant", "content": "One."},
            {"role": "user", "content": "Second."},
        ],
        seed=3,
    )
    assert doors.service.flush()
    row = doors.service.turn_rows()[-1]
    assert (row["source"], row["seed"], row["system_prompt"]) == ("api", 3, "Be brief.")
    logged = [one.text for one in doors.service.store.branch(row["message_id"])]
    assert logged == ["First.", "One.", "Second.", REPLY]
    assert row["num_output_tokens"] > 0 and row["state"] == "complete"
    listed = [one.id for one in doors.service.conversations()]
    assert row["conversation_id"] not in listed


def test_a_client_that_goes_away_frees_its_place(client: OpenAI, doors: Doors) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "endless and slow"}],
        stream=True,
    )
    next(iter(stream))
    until(lambda: doors.service.current is not None)
    stream.close()
    until(lambda: doors.service.current is None)
    assert doors.fake.num_rounds < 100, "it was stopped, not written to its end"
    assert doors.service.latest is not None
    assert doors.service.latest.view.finish_reason == "cancelled"


def test_a_client_that_leaves_as_a_chunk_comes_is_noticed() -> None:
    """The cancel and the event fall into the same turn of the loop."""
    wakes = list[Any]()
    view = SimpleNamespace(ended_s=None)
    reply: Any = SimpleNamespace(watch=wakes.append, view=view, chunks_from=lambda number: ())

    async def leave() -> None:
        service: Any = None
        reading = asyncio.ensure_future(anext(Asked(service, [reply]).chunks(reply)))
        await asyncio.sleep(0)
        wakes[0]()
        await asyncio.sleep(0)
        reading.cancel()
        done, _ = await asyncio.wait({reading}, timeout=1.0)
        assert done and reading.cancelled()

    asyncio.run(leave())


@pytest.mark.slow
def test_a_client_that_does_not_wait_for_a_whole_answer_frees_its_place(doors: Doors) -> None:
    import openai

    with doors.openai() as impatient, pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "endless and slow"}],
            timeout=0.3,
        )
    until(lambda: doors.service.current is None)
    assert doors.fake.num_rounds < 200


def test_a_reply_that_the_page_stops_says_so(client: OpenAI, doors: Doors) -> None:
    import openai

    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "endless and slow"}],
        stream=True,
    )
    parts = iter(stream)
    next(parts)
    current = until(lambda: doors.service.current)
    doors.service.stop(current)
    with pytest.raises(openai.APIError, match="stopped on localspec's own page"):
        list(parts)
