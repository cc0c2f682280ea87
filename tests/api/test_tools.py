"""Tools are shown to the model in its own format, and its calls come apart from its text."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from localspec.api.tools import Calls
from localspec.chat.grammars import grammar_of
from localspec.chat.json_calls import Block
from localspec.chat.thinking import NEXT
from localspec.chat.tool_formats import FORMATS, CallFormat
from localspec.core.backend import Message, ToolCall
from tests.api.doors import CALL, REPLY, Doors

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "demo-12m"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TYPED = {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "weather?"}], "tools": [TOOL]}


def divided(
    text: str,
    size: int,
    names: tuple[str, ...] = ("weather",),
    form: CallFormat = FORMATS["tool_call"],
) -> tuple[str, list[str]]:
    calls, said = Calls(dict.fromkeys(names, TYPED), form=form), ""
    for at in range(0, len(text), size):
        said += calls.push(text[at : at + size])
    rest, found, _ = calls.flush()
    return said + rest, [call.arguments for call in found]


def call_with(arguments: str) -> str:
    return CALL.replace(LIMA, arguments)


LIMA = '{"city": "Lima"}'
BARE = CALL.splitlines()[1]
OTHER = CALL.replace("weather", "other")
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\na </tool_call>\nb\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>"
)
MISTRAL = "[TOOL_CALLS]"
NAMED = f"{MISTRAL}weather[CALL_ID]a1B2c3D4e[ARGS]{LIMA}"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "said", "arguments"),
    [
        (CALL, "", ['{"city": "Lima"}']),
        (f"I look. {CALL}", "I look. ", ['{"city": "Lima"}']),
        (CALL.removesuffix("</tool_call>"), "", ['{"city": "Lima"}']),
        ('{"name": "weather", "parameters": {"city": "Lima"}}', "", ['{"city": "Lima"}']),
        ('[{"name": "weather", "arguments": {}}]', "", ["{}"]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ('[1] is a note, "<tool" no call.', '[1] is a note, "<tool" no call.', []),
        ("<tool_call>{broken", "<tool_call>{broken", []),
        (f"<tool_call>{{broken</tool_call>\n{CALL}", "<tool_call>{broken</tool_call>\n", [LIMA]),
        (f"{CALL}\n{OTHER}", OTHER, [LIMA]),
        (f"{CALL}</tool_call>\n</tool_call>", "", [LIMA]),
        (f"<tool_call>[{BARE}, 1]</tool_call>", "1]</tool_call>", [LIMA]),
        (f"I look.\n{CALL}\nThen\n{CALL} I read.", "I look.\nThen\nI read.", [LIMA, LIMA]),
        (call_with('{"city": "Li\nma"}'), "", ['{"city": "Li\\nma"}']),
        (call_with('{"city": "a </tool_call> b"}'), "", ['{"city": "a </tool_call> b"}']),
        (call_with('{"city": "Lima",}'), "", [LIMA]),
        (call_with('{"city": "Lima"}}'), "", [LIMA]),
        (call_with("null"), "", ["{}"]),
        (call_with('"{\\"city\\": \\"Lima\\"}"'), "", [LIMA]),
        (call_with('{"city": "\\ud83d"}'), "", ['{"city": "\\ud83d"}']),
        (f"<tool_call>[{BARE}, {BARE}]</tool_call>", "", [LIMA, LIMA]),
        (f"{BARE}; {BARE}", "", [LIMA, LIMA]),
        (f"```json\n{BARE}\n```", "", [LIMA]),
        (f'{{"type": "function", "function": {BARE}}}', "", [LIMA]),
        ("```python\nx\n```", "```python\nx\n```", []),
        (CODER, "", ['{"city": "a </tool_call>\\nb", "days": 3}']),
        (CODER.replace("</parameter>\n", ""), "", ['{"city": "a </tool_call>\\nb", "days": 3}']),
        (CODER.removeprefix("<tool_call>\n"), "", ['{"city": "a </tool_call>\\nb", "days": 3}']),
        (GLM, "", ['{"city": "12", "days": [1, 2]}']),
        ("<tool_call>weather\n</tool_call>", "", ["{}"]),
        ("<tool_call>I do not know.</tool_call>", "<tool_call>I do not know.</tool_call>", []),
        ("A text.", "A text.", []),
        (" ", " ", []),
    ],
)
def test_calls_are_found_wherever_the_text_is_cut(
    text: str, said: str, arguments: list[str], size: int
) -> None:
    assert divided(text, size) == (said, arguments)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "said", "arguments"),
    [
        (f"I look. {MISTRAL}[{BARE}, {BARE}]", "I look. ", [LIMA, LIMA]),
        (f"{MISTRAL} [{BARE}]\nWell.", "Well.", [LIMA]),
        (NAMED + NAMED, "", [LIMA, LIMA]),
        (f"{MISTRAL}weather{LIMA}{MISTRAL}other{LIMA}", f"{MISTRAL}other{LIMA}", [LIMA]),
        (f"{MISTRAL}weather[ARGS]{{broken", f"{MISTRAL}weather[ARGS]{{broken", []),
        (f"{MISTRAL} is a mark. {NAMED}", f"{MISTRAL} is a mark. ", [LIMA]),
    ],
)
def test_calls_of_mistral_are_read_wherever_the_text_is_cut(
    text: str, said: str, arguments: list[str], size: int
) -> None:
    assert divided(text, size, form=FORMATS["mistral"]) == (said, arguments)


GEMMA = '<|tool_call>call:weather{city:<|"|>a <tool_call|>\n"b": c<|"|>,days:[1,true]}<tool_call|>'
GEMMAS = '{"city": "a <tool_call|>\\n\\"b\\": c", "days": [1, true]}'
PYTHON = (
    '<|tool_call_start|>[weather(city="a\nb", days=[1, True]), '
    "weather(city='<|tool_call_end|>')]<|tool_call_end|>"
)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("name", "text", "said", "arguments"),
    [
        ("gemma", f"I look. {GEMMA}{GEMMA}", "I look. ", [GEMMAS, GEMMAS]),
        ("gemma", "<|tool_call>call:weather{}<tool_call|> Well.", "Well.", ["{}"]),
        ("gemma", GEMMA.replace("weather", "other"), GEMMA.replace("weather", "other"), []),
        (
            "gemma",
            f"<|tool_call>broken{{<tool_call|>{GEMMA}",
            "<|tool_call>broken{<tool_call|>",
            [GEMMAS],
        ),
        ("gemma", f"<|tool_call>call:weather{{{LIMA}}}<tool_call|>", "", [LIMA]),
        (
            "gemma",
            '<|tool_call>call:weather{a:{b:<|"|><|"|>,c:-1.5}}<tool_call|>',
            "",
            ['{"a": {"b": "", "c": -1.5}}'],
        ),
        (
            "gpt_oss",
            f"<|channel|>commentary to=functions.weather json<|message|>{LIMA}",
            "",
            [LIMA],
        ),
        (
            "gpt_oss",
            f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{LIMA}",
            "",
            [LIMA],
        ),
        ("gpt_oss", f"I look.{NEXT} to=functions.weather<|message|>{LIMA}", "I look.", [LIMA]),
        ("gpt_oss", " to=functions.other<|message|>{}", " to=functions.other<|message|>{}", []),
        (
            "python",
            f"I look. {PYTHON}\nWell.",
            "I look. Well.",
            ['{"city": "a\\nb", "days": [1, true]}', '{"city": "<|tool_call_end|>"}'],
        ),
        ("python", f"<|tool_call_start|>[{BARE}]<|tool_call_end|>", "", [LIMA]),
        (
            "python",
            "<|tool_call_start|>[other(a=1), weather()]<|tool_call_end|>",
            'other({"a": 1})',
            ["{}"],
        ),
        (
            "python",
            "<|tool_call_start|>[weather(city=open('x'))]<|tool_call_end|>",
            "<|tool_call_start|>[weather(city=open('x'))]<|tool_call_end|>",
            [],
        ),
    ],
)
def test_calls_that_are_no_json_are_read_wherever_the_text_is_cut(
    name: str, text: str, said: str, arguments: list[str], size: int
) -> None:
    assert divided(text, size, form=FORMATS[name]) == (said, arguments)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("gemma", '<|tool_call>call:weather{city:<|"|>a\nb<|"', '{"city":"a\\nb'),
        ("gemma", "<|tool_call>call:weather{days:[1", '{"days":[1'),
        ("gemma", "<|tool_call>call:wea", ""),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Li', '{"city": "Li'),
        ("mistral", "[TOOL_CALLS]weather[AR", ""),
        ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city', '{"city'),
        ("list", '<|tool_call|>[{"name": "weather", "arguments": {"city', '{"city'),
        ("python", "<|tool_call_start|>[weather(city='a", ""),
        ("gpt_oss", ' to=functions.weather json<|message|>{"city": "Li', '{"city": "Li'),
        ("gpt_oss", "<|channel|>commentary to=functions.wea", ""),
    ],
)
def test_of_a_cut_call_in_each_format_the_beginning_is_told(
    name: str, text: str, arguments: str
) -> None:
    calls = Calls(["weather"], form=FORMATS[name])
    assert calls.push(text) == ""
    rest, found, are_whole = calls.flush(is_cut=True)
    assert [(one.name, one.arguments) for one in found] == [("weather", arguments)]
    assert (rest, are_whole) == ("", False)


ONE = ("weather", LIMA)
ARGUMENTS = '{"city": "Lima", "days": [1, 2'


@pytest.mark.parametrize(
    ("text", "names", "told"),
    [
        ('{"name": "wea', "weather", [("weather", "")]),
        ('{"name": "weather", "argu', "weather", [("weather", "")]),
        ('{"name": "weather", "parameters": ' + ARGUMENTS, "weather", [("weather", ARGUMENTS)]),
        ('<tool_call>\n{"name": "weather", "arguments": {', "weather", [("weather", "{")]),
        (f"{CALL}\n{CALL[:-25]}", "weather", [ONE, ("weather", '{"cit')]),
        (CALL.replace("Lima", "a\nb")[:-16], "weather", [("weather", '{"city": "a\\nb')]),
        (CODER[:70], "weather", [("weather", '{"city": "a </tool_call>\\nb')]),
        (CODER[:117], "weather", [("weather", '{"city": "a </tool_call>\\nb"')]),
        (GLM[:60], "weather", [("weather", '{"city": "12')]),
        ('{"name": "clock', "clock clocks", None),  # which of them?
        ('{"name": "clock"', "clock clocks", [("clock", "")]),
        ('{"name": "other", "arguments": {', "weather", None),
        ('{"na', "weather", None),
        ("<tool_", "weather", None),
    ],
)
def test_of_a_call_that_is_cut_the_beginning_is_told(
    text: str, names: str, told: list[tuple[str, str]] | None
) -> None:
    calls = Calls(dict.fromkeys(names.split(), TYPED))
    said = calls.push(text)
    rest, found, are_whole = calls.flush(is_cut=True)
    assert [(one.name, one.arguments) for one in found] == (told or []) and not are_whole
    assert said + rest == (text if told is None else "")


@pytest.mark.parametrize("said", ['{"answer": 4', "[1, 2", '[{"name": "other"', "```python"])
def test_json_that_is_no_call_streams(said: str) -> None:
    """What may still become a call of a tool is held back, and no more."""
    calls = Calls(["weather"])
    assert "".join(map(calls.push, said)) == said
    held = Calls(["weather"])
    assert held.push(BARE[:-1]) == "" and held.flush()[0] == BARE[:-1]


def test_a_call_comes_once_it_is_whole() -> None:
    calls = Calls(["weather"])
    assert calls.push(f"I look.\n{CALL}\nTh") == "I look.\nTh"
    assert [one.arguments for one in calls.taken()] == [LIMA]
    assert calls.push(f"en {CALL[:-3]}") == "en " and calls.taken() == ()
    assert calls.push(CALL[-3:]) == "" and len(calls.taken()) == 1


def test_a_long_call_is_not_read_again_with_each_token() -> None:
    """Its time would grow with the square of its length, and the server answers nobody else."""
    form, num_reads = FORMATS["tool_call"], 0

    def read(*asked: Any) -> Block | None:
        nonlocal num_reads
        num_reads += 1
        return form.read(*asked)

    calls = Calls(["weather"], form=replace(form, read=read))
    for character in call_with(json.dumps({"city": 99 * "if a[0] > {1}: </b>\n"})):
        calls.push(character)
    assert len(calls.taken()) == 1 and num_reads < 4


def test_a_reply_that_is_cut_in_text_behind_a_call_is_cut() -> None:
    calls = Calls(["weather"])
    assert calls.push(f"{CALL}\nThen I") == "Then I"
    rest, found, are_whole = calls.flush(is_cut=True)
    assert (rest, len(found), are_whole) == ("", 1, False)


@pytest.mark.parametrize("length", [0, 1, 9, 20, 21])
def test_a_call_that_was_cut_is_taken_back(client: OpenAI, doors: Doors, length: int) -> None:
    """As every interface returned it, with its raw line break."""
    whole = '{"city": "a\nb", "days": [1, 2]}'
    calls = Calls({"weather": TYPED})
    calls.push('<tool_call>{"name": "weather", "arguments": ' + whole[:length])
    _, (call,), _ = calls.flush(is_cut=True)
    function = {"name": "weather", "arguments": call.arguments}
    earlier = {"id": "a", "type": "function", "function": function}
    answer = {"role": "tool", "tool_call_id": "a", "content": "The arguments are no JSON."}
    said = {"role": "assistant", "content": None, "tool_calls": [earlier]}
    messages = [*ASKED["messages"], said, answer]  # type: ignore[misc]
    client.chat.completions.create(**{**ASKED, "messages": messages})  # type: ignore[call-overload]
    item = {"type": "function_call", "call_id": "a", **function, "status": "incomplete"}
    output = {"type": "function_call_output", "call_id": "a", "output": "No JSON."}
    question = {"role": "user", "content": "weather?"}
    client.responses.create(model=MODEL, input=[question, item, output])  # type: ignore[list-item]
    of_chat, of_responses = (one.messages[1].tool_calls[0] for one in doors.fake.requests)
    taken = json.loads(of_chat.arguments)
    assert taken == json.loads(of_responses.arguments)
    assert taken == {0: {}, 1: {}, 9: {}, 20: {"city": "a\nb"}, 21: {"city": "a\nb"}}[length]


def test_arguments_that_are_no_json_are_refused(client: OpenAI) -> None:
    import openai

    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "Lima"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*ASKED["messages"], said]  # type: ignore[misc]
    with pytest.raises(openai.BadRequestError, match="arguments of a tool call are no JSON"):
        client.chat.completions.create(**{**ASKED, "messages": messages})  # type: ignore[call-overload]


def test_a_call_whose_mark_alone_is_cut_is_whole() -> None:
    calls = Calls(["weather"])
    assert calls.push(CALL[:-4]) == ""
    _, found, are_whole = calls.flush(is_cut=True)
    assert [one.arguments for one in found] == ['{"city": "Lima"}'] and are_whole


def test_a_reply_that_is_cut_in_a_call_says_so_at_every_door(client: OpenAI, doors: Doors) -> None:
    """After so many of the fake's tokens, within the arguments."""
    limit = 32
    chat = client.chat.completions.create(**ASKED, max_tokens=limit)  # type: ignore[call-overload]
    (call,) = chat.choices[0].message.tool_calls
    assert (chat.choices[0].finish_reason, call.function.name) == ("length", "weather")
    assert call.function.arguments == '{"city":'
    *_, last = client.chat.completions.create(**ASKED, max_tokens=limit, stream=True)  # type: ignore[call-overload]
    assert last.choices[0].finish_reason == "length"
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    made = client.responses.create(
        model=MODEL,
        input="weather?",
        tools=[tool],  # type: ignore[list-item]
        max_output_tokens=limit,
    )
    assert [(one.type, one.status) for one in made.output] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    asked = {"model": MODEL, "messages": ASKED["messages"], "max_tokens": limit}
    known = [{"name": "weather", "input_schema": SCHEMA}]
    with doors.anthropic() as claude:
        message = claude.messages.create(**asked, tools=known)  # type: ignore[call-overload]
        with claude.messages.stream(**asked, tools=known) as stream:  # type: ignore[arg-type]
            streamed = stream.get_final_message()
    assert message.stop_reason == streamed.stop_reason == "max_tokens"
    assert message.content[-1].input == streamed.content[-1].input == {}  # type: ignore[union-attr]


def test_without_tools_all_is_text() -> None:
    assert divided(CALL, 2, ()) == (CALL, [])


def test_a_whole_answer_and_a_stream_have_the_same_calls(client: OpenAI, doors: Doors) -> None:
    choice = client.chat.completions.create(**ASKED).choices[0]  # type: ignore[call-overload]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look.\n"
    called = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
    assert called == [("weather", '{"city": "Lima"}'), ("weather", '{"city": "Cusco"}')]
    assert doors.fake.requests[-1].tools == (TOOL,)
    parts = list(client.chat.completions.create(**ASKED, stream=True))  # type: ignore[call-overload]
    streamed = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
    assert [(one.function.name, one.function.arguments) for one in streamed] == called
    assert [one.index for one in streamed] == [0, 1]
    events = [part.choices[0].delta for part in parts]
    assert max(len(one.tool_calls or ()) for one in events) == 1, "one event a call"
    assert [one.role for one in events] == ["assistant"] + [None] * (len(events) - 1)
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_the_answer_of_a_tool_goes_back_to_the_model(client: OpenAI, doors: Doors) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun."},
    ]
    client.chat.completions.create(**{**ASKED, "messages": messages})  # type: ignore[call-overload]
    asked = doors.fake.requests[-1].messages
    assert asked[1] == Message("assistant", "", (ToolCall("call_1", "weather", "{}"),))
    assert asked[2] == Message("tool", "Sun.", call_id="call_1")
    assert doors.service.flush()
    row = doors.service.turn_rows()[-1]
    logged = [one.text for one in doors.service.store.branch(row["message_id"])]
    assert logged[:3] == ["hello", "weather({})", "Sun."]


def test_who_takes_one_call_at_a_time_gets_the_first(client: OpenAI, doors: Doors) -> None:
    one = client.chat.completions.create(**ASKED, parallel_tool_calls=False)  # type: ignore[call-overload]
    called = one.choices[0].message.tool_calls
    assert [each.function.arguments for each in called] == ['{"city": "Lima"}']
    assert one.choices[0].message.content == "I look.\n"
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    asked = {"model": MODEL, "tools": [tool], "input": "weather?"}
    response = client.responses.create(**asked, parallel_tool_calls=False)  # type: ignore[call-overload]
    assert [item.type for item in response.output] == ["message", "function_call"]
    assert response.parallel_tool_calls is False
    known = {"name": "weather", "input_schema": SCHEMA}
    with doors.anthropic() as claude:
        message = claude.messages.create(
            model=MODEL,
            max_tokens=300,
            messages=ASKED["messages"],  # type: ignore[arg-type]
            tools=[known],  # type: ignore[list-item]
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
    assert [block.type for block in message.content] == ["text", "tool_use"]


def test_a_reply_goes_back_as_the_client_dumps_it(client: OpenAI, doors: Doors) -> None:
    """With the fields of the client's own types that no reply of ours has."""
    found = client.chat.completions.create(**ASKED).choices[0].message  # type: ignore[call-overload]
    dumped = found.model_dump()
    assert dumped["audio"] is None and len(dumped["tool_calls"]) == 2
    dumped["annotations"] = []  # as OpenAI's own replies have it
    answers = [
        {"role": "tool", "tool_call_id": one.id, "content": "Sun."} for one in found.tool_calls
    ]
    messages = [*ASKED["messages"], dumped, *answers]  # type: ignore[misc]
    client.chat.completions.create(**{**ASKED, "messages": messages})  # type: ignore[call-overload]
    assert len(doors.fake.requests[-1].messages[1].tool_calls) == 2
    made = client.responses.create(model=MODEL, input="think")
    items = [{"role": "user", "content": "think"}, *(item.model_dump() for item in made.output)]
    assert None in items[1].values() and None in items[2].values()
    client.responses.create(model=MODEL, input=[*items, {"role": "user", "content": "And?"}])  # type: ignore[arg-type]
    assert [one.role for one in doors.fake.requests[-1].messages] == ["user", "assistant", "user"]


def test_a_call_is_up_to_the_model_unless_it_is_forced(client: OpenAI, doors: Doors) -> None:
    import openai

    def grammar(**fields: object) -> str:
        client.chat.completions.create(**ASKED, **fields)  # type: ignore[call-overload]
        assert doors.fake.requests[-1].tools == (TOOL,), "the model is shown all of them"
        return doors.fake.requests[-1].grammar

    forced = grammar_of(functions=[TOOL["function"]])
    named = {"type": "function", "function": {"name": "weather"}}
    assert grammar(tool_choice="required") == grammar(tool_choice=named) == forced
    assert grammar(tool_choice="auto") == ""
    for parameters in ("of a city", {"type": "array"}, {"type": ["object", "null"]}):
        unusable = {**TOOL, "function": {"name": "weather", "parameters": parameters}}
        with pytest.raises(openai.BadRequestError, match="parameters of 'weather' are no schema"):
            client.chat.completions.create(**{**ASKED, "tools": [unusable]}, tool_choice="required")  # type: ignore[call-overload]
    for choice in ({**named, "function": {"name": "clock"}}, "whatever"):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            grammar(tool_choice=choice)
    unasked = client.chat.completions.create(**ASKED, tool_choice="none")  # type: ignore[call-overload]
    assert unasked.choices[0].finish_reason == "stop"


def test_anthropics_client_calls_and_answers(doors: Doors) -> None:
    tool = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
    asked = {"model": MODEL, "max_tokens": 300, "tools": [tool]}
    question = {"role": "user", "content": "weather?"}
    with doors.anthropic() as client:
        found = client.messages.create(**asked, messages=[question])  # type: ignore[call-overload]
        with client.messages.stream(**asked, messages=[question]) as stream:  # type: ignore[arg-type]
            streamed = stream.get_final_message()
        uses = [block for block in found.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": uses[0].id, "content": "Sun."},
            {"type": "text", "text": "Well?"},
        ]
        reply = {"role": "assistant", "content": [block.model_dump() for block in found.content]}
        after = {"role": "user", "content": results}
        client.messages.create(**asked, messages=[question, reply, after])  # type: ignore[call-overload]
        client.messages.create(**asked, messages=[question], tool_choice={"type": "any"})  # type: ignore[call-overload]
    assert found.stop_reason == streamed.stop_reason == "tool_use"
    assert [use.input for use in uses] == [{"city": "Lima"}, {"city": "Cusco"}]
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [
        use.input for use in uses
    ]
    *_, shown, forced = doors.fake.requests
    assert forced.grammar == grammar_of(functions=[forced.tools[0]["function"]])
    assert shown.tools[0]["function"]["parameters"] == SCHEMA
    assert [one.role for one in shown.messages] == ["user", "assistant", "tool", "user"]
    called = shown.messages[1].tool_calls
    assert [json.loads(one.arguments)["city"] for one in called] == ["Lima", "Cusco"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropics_tool_runner_runs_the_tools(doors: Doors, is_streamed: bool) -> None:
    """It asks for a thread on the server first, and sends the whole conversation without one."""
    from anthropic import beta_tool

    @beta_tool
    def weather(city: str) -> str:
        """Of a city."""
        return f"Sun in {city}."

    with doors.anthropic() as client:
        last = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=300,
            tools=[weather],
            messages=[{"role": "user", "content": "weather?"}],
            stream=is_streamed,  # type: ignore[call-overload]
        ).until_done()
    assert last.content[0].text == REPLY
    answers = [one.content for one in doors.fake.requests[-1].messages if one.role == "tool"]
    assert answers == ["Sun in Lima.", "Sun in Cusco."]


@pytest.mark.slow
def test_responses_call_and_answer(client: OpenAI, doors: Doors) -> None:
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    asked = {"model": MODEL, "tools": [tool]}
    question = {"role": "user", "content": "weather?"}
    found = client.responses.create(**asked, input=[question])  # type: ignore[call-overload]
    with client.responses.stream(**asked, input=[question]) as stream:
        given = [one.arguments for one in stream if one.type.endswith("arguments.done")]
        streamed = stream.get_final_response()
    calls = [item for item in found.output if item.type == "function_call"]
    assert [json.loads(one.arguments)["city"] for one in calls] == ["Lima", "Cusco"]
    assert given == [one.arguments for one in calls]
    for one in (found, streamed):
        assert [item.type for item in one.output] == ["message", "function_call", "function_call"]
    told = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "Sun."} for one in calls
    ]
    back = [item.model_dump(exclude_none=True) for item in found.output]
    client.responses.create(**asked, input=[question, *back, *told])  # type: ignore[call-overload]
    client.responses.create(**asked, input=[question], tool_choice="required")  # type: ignore[call-overload]
    named = {"type": "function", "name": "weather"}
    client.responses.create(**asked, input=[question], tool_choice=named)  # type: ignore[call-overload]
    *_, shown, forced, chosen = doors.fake.requests
    assert [one.role for one in shown.messages] == ["user", "assistant", "tool", "tool"]
    assert [one.call_id for one in shown.messages[1].tool_calls] == [one.call_id for one in calls]
    assert forced.grammar == chosen.grammar == grammar_of(functions=[forced.tools[0]["function"]])
    assert shown.grammar == "" and shown.tools[0]["function"]["parameters"] == SCHEMA


PIECES = (
    *(mark for form in FORMATS.values() for mark in form.marks),
    *'{}[]",:\\ \n',
    *('<parameter=city>', "</parameter>", "<arg_key>city</arg_key>", "<arg_value>", "</arg_value>"),
    *("weather", "call:weather", "weather(city='a')", '"name": "weather"', BARE, "json", "text"),
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_no_text_is_lost_and_no_cut_changes_what_is_read(name: str) -> None:
    random, num_calls = Random(3), 0
    for _ in range(120):
        text = "".join(random.choices(PIECES, k=random.randint(1, 20)))
        said, arguments = divided(text, len(text), form=FORMATS[name])
        assert divided(text, 1, form=FORMATS[name]) == (said, arguments)
        assert arguments or said == text
        num_calls += len(arguments)
    assert num_calls
