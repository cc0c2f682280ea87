"""Formats of replies, over every interface that has them: held to, or refused before anything is
decoded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from localspec.chat.grammars import ANY_OBJECT, grammar_of
from tests.api.doors import Doors

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "demo-12m"
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}]}


class City(BaseModel):
    name: str
    people: int


def format_of(schema: object) -> dict[str, object]:
    named = {"name": "City", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def test_a_format_reaches_the_engine(client: OpenAI, doors: Doors) -> None:
    schema = {**City.model_json_schema(), "additionalProperties": False}
    formats = (None, {"type": "text"}, {"type": "json_object"}, format_of(schema))
    for form in formats:
        fields = {} if form is None else {"response_format": form}
        client.chat.completions.create(**ASKED, **fields)
    sent = [request.grammar for request in doors.fake.requests]
    assert sent == ["", "", grammar_of(ANY_OBJECT), grammar_of(schema)]


@pytest.mark.slow
def test_a_format_of_responses_reaches_the_engine_and_is_repeated(
    client: OpenAI, doors: Doors
) -> None:
    form = {"type": "json_schema", "name": "City", "schema": ANY_OBJECT, "strict": True}
    found = client.responses.create(model=MODEL, input="x", text={"format": form})  # type: ignore[call-overload]
    assert doors.fake.requests[-1].grammar == grammar_of(ANY_OBJECT)
    assert found.text.format.type == "json_schema"


@pytest.mark.slow
def test_a_format_of_messages_is_parsed_by_anthropics_client(doors: Doors) -> None:
    form = {"type": "json_schema", "schema": ANY_OBJECT}
    asked = {"model": MODEL, "max_tokens": 300}
    with doors.anthropic() as client:
        client.messages.create(  # type: ignore[call-overload]
            **asked, messages=ASKED["messages"], output_config={"format": form}
        )
        said = [{"role": "user", "content": '{"name": "echo", "people": 9}'}]
        found = client.messages.parse(**asked, messages=said, output_format=City)  # type: ignore[arg-type]
    assert found.parsed_output == City(name="echo", people=9)
    first, second = (request.grammar for request in doors.fake.requests[-2:])
    assert first == grammar_of(ANY_OBJECT) and '"people"' in second


def test_a_strict_format_has_the_properties_that_it_names(client: OpenAI, doors: Doors) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    closed = {**schema, "additionalProperties": False}
    for strict, wanted in ((True, closed), (False, schema)):
        named = {"name": "a", "schema": schema, "strict": strict}
        form: Any = {"type": "json_schema", "json_schema": named}
        client.chat.completions.create(**ASKED, response_format=form)
        assert doors.fake.requests[-1].grammar == grammar_of(wanted)


def test_others_are_answered_while_a_schema_is_compiled(
    client: OpenAI, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_answered = threading.Event()

    def compiled(*asked: object) -> str:
        assert has_answered.wait(5.0), "nobody else was answered meanwhile"
        return grammar_of(ANY_OBJECT)

    monkeypatch.setattr("localspec.api.formats.grammar_of", compiled)
    form: Any = {"type": "json_object"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.chat.completions.create, **ASKED, response_format=form)
        with doors.openai() as other:
            assert other.models.list().data
        has_answered.set()
        assert asked.result().choices[0].message.content


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (
            format_of({"properties": {f"p{n}": {} for n in range(3000)}}),
            "has 3,000 properties in one object",
        ),
        ({"type": "json_schema"}, "holds no schema"),
        (format_of("object"), "holds no schema"),
        (format_of({"type": "strange"}), "cannot hold a reply to this schema: .*strange. Change"),
        (format_of({"$ref": "https://example.com/x"}), "cannot hold a reply to this schema"),
    ],
)
def test_a_format_that_cannot_be_held_to_is_refused_before_anything_is_decoded(
    client: OpenAI, doors: Doors, form: dict[str, Any], said: str
) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=said) as of_chat:
        client.chat.completions.create(**ASKED, response_format=form)
    flat = {"type": form["type"], "name": "x", **form.get("json_schema", {})}
    with pytest.raises(openai.BadRequestError, match=said) as of_response:
        client.responses.create(model=MODEL, input="x", text={"format": flat})  # type: ignore[call-overload]
    assert [of_chat.value.param, of_response.value.param] == ["response_format", "text.format"]
    assert doors.fake.requests == []
