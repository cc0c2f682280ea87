"""OpenAI's own client gets responses from localspec."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from localspec.core.backend import Message
from tests.api.doors import REPLY, Doors

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "demo-12m"


@pytest.mark.slow
def test_a_whole_response(client: OpenAI, doors: Doors) -> None:
    found = client.responses.create(
        model=MODEL, input="Count.", instructions="Be brief.", max_output_tokens=300
    )
    assert found.output_text == REPLY and found.status == "completed"
    assert found.usage is not None and found.usage.output_tokens > 5
    assert found.usage.input_tokens_details.cache_write_tokens == 0, "OpenAI's type requires it"
    assert found.speculation["exact"] is True  # type: ignore[attr-defined]
    wanted = (Message("system", "Be brief."), Message("user", "Count."))
    assert doors.fake.requests[-1].messages == wanted


@pytest.mark.slow
def test_a_stream_has_every_event_that_the_client_puts_together(client: OpenAI) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "think"}]}]
    with client.responses.stream(model=MODEL, input=items) as stream:  # type: ignore[arg-type]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed" and kinds.count("response.output_text.delta") > 3
    assert final.output_text == REPLY
    assert [item.type for item in final.output] == ["reasoning", "message"]


@pytest.mark.slow
def test_effort_none_is_no_thinking_and_what_has_no_effect_is_taken(
    client: OpenAI, doors: Doors
) -> None:
    none = {"effort": "none"}
    found = client.responses.create(
        model=MODEL,
        input="x",
        reasoning=none,  # type: ignore[arg-type]
        prompt_cache_key="chats",
        safety_identifier="somebody",
    )
    assert doors.fake.requests[-1].thinks is False
    assert found.reasoning is not None and found.reasoning.effort == "none"


def test_a_response_that_is_cut_is_incomplete(client: OpenAI) -> None:
    found = client.responses.create(model=MODEL, input="Count.", max_output_tokens=3)
    assert found.status == "incomplete" and found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"include": ["message.output_text.logprobs"]},
        {"tools": [{"type": "web_search"}]},
        {"text": {"format": {"type": "xml"}}},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
    ],
)
def test_what_cannot_be_done_is_refused(client: OpenAI, fields: dict[str, object]) -> None:
    import openai

    with pytest.raises(openai.BadRequestError):
        client.responses.create(**{"model": MODEL, "input": "x", **fields})  # type: ignore[call-overload]
