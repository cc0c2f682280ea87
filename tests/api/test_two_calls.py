"""Two calls in one reply, with text around them, as the clients of OpenAI and Anthropic read them:
the same whole and streamed, at every interface, of a model with a format of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from localspec.core.backend import Description
from tests.api.doors import Doors, serve_interfaces
from tests.kit.fakes import FakeBackend, Script

MODEL = "demo-12m"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
ASKED = [{"role": "user", "content": "weather?"}]
SAID = (
    "I look.\n[TOOL_CALLS]clock[ARGS]{}\nAnd there.\n"
    '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Lima"}}, '
    '{"name": "weather", "arguments": {"city": "Cusco"}}]'
)
TEXT = "I look.\n[TOOL_CALLS]clock[ARGS]{}\nAnd there.\n"
CITIES = [("weather", "Lima"), ("weather", "Cusco")]


@dataclass
class OfItsOwnFormat(FakeBackend):
    """A model that writes calls as it is told to."""

    call_format: str | None = "mistral"

    def describe(self) -> Description:
        return replace(super().describe(), call_format=self.call_format)


@pytest.fixture(scope="module")
def own_format_doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    backend = OfItsOwnFormat(Script(reply=SAID, round_s=0.0005, prefill_s=0.0))
    with serve_interfaces(backend, tmp_path_factory.mktemp("doors")) as running:
        yield running


@pytest.mark.parametrize("is_streamed", [False, True])
def test_in_chats_of_openai(own_format_doors: Doors, is_streamed: bool) -> None:
    asked: Any = {"model": MODEL, "messages": ASKED}
    asked["tools"] = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    with own_format_doors.openai() as client:
        if is_streamed:
            with client.chat.completions.stream(**asked) as stream:
                events = list(stream)
                choice = stream.get_final_completion().choices[0]
            ended = [one.arguments for one in events if one.type.endswith("arguments.done")]
            deltas = [one.chunk.choices[0].delta for one in events if one.type == "chunk"]
            assert max(len(one.tool_calls or ()) for one in deltas) == 1
            assert ended == ['{"city": "Lima"}', '{"city": "Cusco"}']
        else:
            choice = client.chat.completions.parse(**asked).choices[0]
    calls = [one.function for one in choice.message.tool_calls]
    assert [(one.name, one.parsed_arguments["city"]) for one in calls] == CITIES
    assert (choice.message.content, choice.finish_reason) == (TEXT, "tool_calls")
    assert len({one.id for one in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("is_streamed", [False, True])
def test_in_responses_of_openai(own_format_doors: Doors, is_streamed: bool) -> None:
    tool = {"type": "function", **FUNCTION, "strict": True}
    asked: Any = {"model": MODEL, "input": ASKED, "tools": [tool]}
    with own_format_doors.openai() as client:
        if is_streamed:
            with client.responses.stream(**asked) as stream:
                response = stream.until_done().get_final_response()
        else:
            response = client.responses.parse(**asked)
    calls = [one for one in response.output if one.type == "function_call"]
    assert [(one.name, one.parsed_arguments["city"]) for one in calls] == CITIES
    assert (response.output_text, response.status) == (TEXT, "completed")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_in_messages_of_anthropic(own_format_doors: Doors, is_streamed: bool) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA}
    asked: Any = {"model": MODEL, "max_tokens": 300, "messages": ASKED, "tools": [tool]}
    with own_format_doors.anthropic() as client:
        if is_streamed:
            with client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
    uses = [one for one in message.content if one.type == "tool_use"]
    assert [(one.name, one.input["city"]) for one in uses] == CITIES
    assert "".join(one.text for one in message.content if one.type == "text") == TEXT
    assert message.stop_reason == "tool_use"


def test_tools_for_a_model_whose_calls_are_not_read_are_refused(
    own_format_doors: Doors, tmp_path: Any
) -> None:
    import openai

    backend = OfItsOwnFormat(Script(reply="{}"), call_format=None)
    asked: Any = {"model": MODEL, "messages": ASKED}
    asked["tools"] = [{"type": "function", "function": FUNCTION}]
    with serve_interfaces(backend, tmp_path) as running, running.openai() as client:
        with pytest.raises(openai.BadRequestError, match="format that localspec does not read"):
            client.chat.completions.create(**asked)
        assert client.chat.completions.create(**asked, tool_choice="required").choices
