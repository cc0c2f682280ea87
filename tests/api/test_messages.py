"""Anthropic's own client gets messages from localspec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from localspec.core.backend import Message
from tests.api.doors import REPLY, Doors

if TYPE_CHECKING:
    from anthropic import Anthropic

MODEL = "demo-12m"
ASKED = [{"role": "user", "content": "Count."}]
THINK = [{"role": "user", "content": [{"type": "text", "text": "think"}]}]


@pytest.fixture
def claude(doors: Doors) -> Iterator[Anthropic]:
    with doors.anthropic() as opened:
        yield opened


@pytest.mark.slow
def test_a_whole_message(claude: Anthropic, doors: Doors) -> None:
    found = claude.messages.create(
        model=MODEL,
        max_tokens=300,
        system="Be brief.",
        messages=ASKED,  # type: ignore[arg-type]
        stop_sequences=["eleven"],
        extra_body={"temperature": 0.25, "top_k": 4, "drafter": "ngram", "seed": 3},
    )
    assert [block.text for block in found.content] == [REPLY]  # type: ignore[union-attr]
    assert (found.stop_reason, found.stop_sequence, found.model) == ("end_turn", None, MODEL)
    assert found.usage.output_tokens > 5 and found.usage.input_tokens > 0
    assert found.speculation["drafter"] == "ngram"  # type: ignore[attr-defined]
    asked = doors.fake.requests[-1]
    assert asked.messages[0] == Message("system", "Be brief.") and asked.stop == ("eleven",)
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.sampling.seed) == (0.25, 4, 3)


def test_a_stream_of_a_model_that_thinks_has_two_blocks(claude: Anthropic) -> None:
    with claude.messages.stream(
        model=MODEL,
        max_tokens=300,
        messages=THINK,  # type: ignore[arg-type]
    ) as stream:
        events = list(stream)
        final = stream.get_final_message()
    text = "".join(one.text for one in events if one.type == "text")
    thinking, said = final.content
    assert text == said.text == REPLY  # type: ignore[union-attr]
    assert thinking.thinking == "Let me see."  # type: ignore[union-attr]
    assert final.stop_reason == "end_turn" and final.usage.output_tokens > 5
    assert final.usage.input_tokens == events[0].message.usage.input_tokens > 2  # type: ignore[union-attr]
    whole = claude.messages.create(
        model=MODEL,
        max_tokens=300,
        messages=THINK,  # type: ignore[arg-type]
    )
    assert [block.type for block in whole.content] == ["thinking", "text"]


def test_a_reply_that_is_cut_says_so(claude: Anthropic) -> None:
    found = claude.messages.create(model=MODEL, max_tokens=3, messages=ASKED)  # type: ignore[arg-type]
    assert found.stop_reason == "max_tokens" and found.usage.output_tokens == 3


def test_tokens_are_counted(claude: Anthropic) -> None:
    asked = {"model": MODEL, "messages": ASKED}
    tool = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object"}}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {"tools": [tool], "thinking": thinking, "tool_choice": {"type": "auto"}}
    alone = claude.messages.count_tokens(**asked)  # type: ignore[arg-type]
    shown = claude.messages.count_tokens(**asked, **fields)  # type: ignore[arg-type]
    assert shown.input_tokens > alone.input_tokens > 2
    reply = claude.messages.create(**asked, tools=[tool], max_tokens=9)  # type: ignore[call-overload]
    assert reply.usage.input_tokens == shown.input_tokens
    hidden = claude.messages.count_tokens(**asked, tools=[tool], tool_choice={"type": "none"})  # type: ignore[arg-type]
    assert hidden == alone


def test_models_are_told_as_anthropic_does(claude: Anthropic) -> None:
    import anthropic

    listed = claude.models.list()
    (model,) = listed
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.max_input_tokens == 4096 and model.created_at.tzinfo is not None
    assert (listed.first_id, listed.last_id, listed.has_more) == (MODEL, MODEL, False)
    assert claude.models.retrieve(MODEL) == model
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.models.retrieve("claude-9")
    assert caught.value.body["type"] == "error"  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "claude-9"}, "NotFoundError"),
        ({"tool_choice": {"type": "any"}}, "BadRequestError"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "BadRequestError"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "BadRequestError",
        ),
    ],
)
def test_errors_are_anthropics(claude: Anthropic, fields: dict[str, object], error: str) -> None:
    import anthropic

    asked = {"model": MODEL, "max_tokens": 9, "messages": ASKED, **fields}
    with pytest.raises(getattr(anthropic, error)) as caught:
        claude.messages.create(**asked)  # type: ignore[call-overload]
    body = caught.value.body
    assert isinstance(body, dict) and body["type"] == "error" and body["error"]["message"]


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"type": "tool_result", "tool_use_id": "1", "content": 3}, "content.0.content"),
        ({"type": "tool_result", "tool_use_id": "1", "content": {"a": 1}}, "content.0.content"),
        ({"type": "tool_result", "tool_use_id": "1", "content": [3]}, "content.0.content.0"),
        ({"type": "tool_result", "tool_use_id": 1, "content": "Sun."}, "content.0.tool_use_id"),
        ({"type": "tool_use", "id": "1", "name": "f", "input": [1]}, "content.0.input"),
        ({"type": "tool_use", "id": "1", "name": 3, "input": {}}, "content.0.name"),
    ],
)
def test_a_block_of_a_wrong_kind_is_refused_with_its_place(
    doors: Doors, block: dict[str, object], place: str
) -> None:
    message = {"role": "assistant" if "input" in block else "user", "content": [block]}
    with doors.http() as http:
        answer = http.post("/v1/messages", json={"max_tokens": 9, "messages": [*ASKED, message]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"messages.1.{place}: ")


def test_a_thought_cannot_be_shorter_than_nothing(doors: Doors) -> None:
    thinking = {"type": "enabled", "budget_tokens": -5}
    with doors.http() as http:
        asked = {"max_tokens": 9, "messages": ASKED, "thinking": thinking}
        answer = http.post("/v1/messages", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("thinking.budget_tokens: ")
