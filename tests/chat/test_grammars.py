"""Replies that are held to a schema or a call parse and are valid, whatever drafts, over real
vocabularies; a schema that cannot be held to is refused."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from localspec.chat.grammars import ANY_OBJECT, Grammars, ReplyGrammar, grammar_of
from localspec.chat.template import ChatTemplate
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.errors import RequestError
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.draft_tree import DraftTreeDrafter
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from tests.kit.tiny import Plans, agreeing_draft, decoded, tiny_llama, with_cache
from tests.kit.tokenizers_at_hand import FINE, TEXTS
from tools.demo_pair.tokenizer import train_tokenizer

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "company"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": PERSON}
CLOCK = {"name": "clock", "description": "What time it is."}
PROMPT = (7, 30, 9, 7, 30)
ARMS = (("draft_model", 4), ("draft_tree", 8), ("ngram", 4))


@lru_cache
def template() -> ChatTemplate:
    """Over 320 byte-level tokens and an end of text."""
    encoder = train_tokenizer(TEXTS * 3, FINE)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=encoder, eos_token="<|end|>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    return ChatTemplate(tokenizer)


@lru_cache
def engine() -> Engine:
    module = tiny_llama(vocab_size=template().vocab_size + 7)  # padded, as models are
    parts = Parts(with_cache(module), with_cache(agreeing_draft(module)))
    kinds = (DraftModelDrafter, DraftTreeDrafter, NgramDrafter)
    return Engine(parts.target, {kind.name: kind.build(parts) for kind in kinds})


@lru_cache
def grammars() -> Grammars:
    return Grammars(template(), engine().target.vocab_size)


def written(grammar: str, plans: Plans, sampling: SamplingParams, most: int = 200) -> list[int]:
    ends = template().end_ids
    held = grammars().of(grammar)
    engine().target.cache.rollback(0)
    sequence = engine().start(PROMPT, sampling, most, ends, grammar=held)
    return decoded(engine(), sequence, plans)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_reply_to_a_schema_is_valid_and_the_same_whatever_drafts(temperature: float) -> None:
    grammar = grammar_of(PERSON)
    for seed in range(2):
        sampling = SamplingParams(temperature, seed=seed)
        plain = written(grammar, Plans((OFF, 0)), sampling)
        assert plain[-1] in template().end_ids
        jsonschema.validate(json.loads(template().decode(plain)), PERSON)
        plans = [Plans(arm) for arm in ARMS]
        assert all(written(grammar, one, sampling) == plain for one in plans)
        assert sum(step.num_accepted_tokens for one in plans for step in one.steps) > 0


@pytest.mark.slow
def test_max_tokens_cuts_json_where_it_stands() -> None:
    sampling, grammar = SamplingParams(1.0, seed=0), grammar_of(PERSON)
    whole = written(grammar, Plans((OFF, 0)), sampling)
    cut = written(grammar, Plans(("draft_model", 4)), sampling, 9)
    assert cut == whole[:9]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_names_a_tool_and_its_arguments_are_valid(seed: int) -> None:
    from localspec.api.tools import Calls

    found = written(
        grammar_of(functions=(WEATHER,)), Plans(("draft_tree", 6)), SamplingParams(1.0, seed=seed)
    )
    calls = Calls(["weather"])
    calls.push(template().decode(found))
    _, (call,), _ = calls.flush()
    jsonschema.validate(json.loads(call.arguments), PERSON)


def allows(held: ReplyGrammar, text: str) -> bool:
    """Whether a reply may be this text."""
    tokens = template().encode_text(text)
    rows = held.masks((), [tokens[:place] for place in range(len(tokens) + 1)])
    (end,) = template().end_ids
    return all(
        rows[place][token // 8] >> token % 8 & 1 for place, token in enumerate([*tokens, end])
    )


def test_a_call_stands_alone_or_between_its_marks_and_names_its_arguments_in_two_ways() -> None:
    held = grammars().of(grammar_of(functions=(WEATHER, CLOCK)))
    for name in ("arguments", "parameters"):
        call = json.dumps({"name": "clock", name: {}})
        assert allows(held, call) and allows(held, f"<tool_call>\n{call}\n</tool_call>")
    assert not allows(held, '{"name": "other", "arguments": {}}')
    assert not allows(held, '{"name": "weather", "arguments": {}}'), "its schema asks for more"
    assert not allows(held, f"Yes. {call}") and not allows(held, "{}")


def test_a_call_has_the_arguments_that_its_tool_names_and_no_others() -> None:
    """Unless the schema says that there are others, or puts an object together of several."""

    def takes(schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
        held = grammars().of(grammar_of(functions=[{"name": "f", "parameters": schema}]))
        return allows(held, json.dumps({"name": "f", "arguments": arguments}))

    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    closed = {"type": "object", "properties": {"a": inner}}
    assert takes(closed, {"a": {"b": 1}}) and takes(closed, {})
    assert not takes(closed, {"x": 1}) and not takes(closed, {"a": {"x": 1}})
    assert takes({**closed, "additionalProperties": True}, {"a": {"b": 1}, "x": 1})
    assert not takes({"properties": {}}, {"x": 1}) and takes({}, {"x": 1})
    listed = {"properties": {"a": {"type": "array", "items": {"anyOf": [inner, {"enum": [1]}]}}}}
    assert takes(listed, {"a": [{"b": 1}, 1]}) and not takes(listed, {"a": [{"x": 1}]})
    parts = [{"properties": {"a": {"type": "integer"}}}, {"$ref": "#/$defs/inner"}]
    composed = {"type": "object", "allOf": parts, "$defs": {"inner": inner}}
    assert takes(composed, {"a": 1, "b": 2})
    defined = {"properties": {"a": {"$ref": "#/$defs/inner"}}, "$defs": {"inner": inner}}
    assert takes(defined, {"a": {"b": 1}}) and not takes(defined, {"a": {"x": 1}})


NAMES: dict[str, Any] = {f"p{place}": {} for place in range(501)}
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": NAMES}, "has 501 properties in one object, but .* at most 500"),
        ({"anyOf": 10 * [{"properties": NAMES}]}, "has 5,010 properties, but .* at most 5,000"),
        (DEEP, "has 81 levels, but .* at most 60"),
        ({"enum": ["word" * 10] * 6000}, "has 264,010 characters"),
    ],
)
def test_a_schema_that_is_too_large_is_refused_by_its_size(
    schema: dict[str, Any], said: str
) -> None:
    function = {"name": "f", "parameters": schema}
    for asked in ({"schema": schema}, {"functions": [function]}):
        with pytest.raises(RequestError, match=said):
            grammar_of(**asked)  # type: ignore[arg-type]


def test_a_large_schema_holds_its_reply_to_the_end() -> None:
    objects = [
        {"type": "object", "properties": {f"{letter}{place}": {} for place in range(200)}}
        for letter in "abcd"
    ]
    assert allows(grammars().of(grammar_of({"anyOf": objects})), '{"a7": 1, "a199": 2}')


def test_a_format_beside_tools_leaves_the_choice() -> None:
    held = grammars().of(grammar_of({"type": "integer"}, (CLOCK,)))
    assert allows(held, "12") and allows(held, '{"name": "clock", "arguments": {}}')
    assert not allows(held, '"12"')


def test_any_object_is_an_object_without_needless_space() -> None:
    held = grammars().of(grammar_of(ANY_OBJECT))
    assert allows(held, '{"a": [1, {"b": null}], "c": "x y"}')
    for wrong in ("[]", "1", '{"a":1}', '{ "a": 1}', '{"a": 1}\n', '{"a": 1'):
        assert not allows(held, wrong)


def test_a_text_that_may_not_be_is_followed_by_anything() -> None:
    """Nothing behind a wrong draft token is ever reached, and the grammar is as before."""
    held = grammars().of(grammar_of({"enum": ["ab", "cd"]}))
    quote, bad = template().encode_text('"')[0], template().encode_text("x")[0]
    first, wrong, again = held.masks((), [(), (quote, bad, bad), ()])
    assert first == again != wrong and set(wrong) == {255}


def test_a_reply_that_is_continued_is_held_from_its_beginning() -> None:
    grammar = grammar_of({"enum": ["ab", "cd"]})
    tokens = template().encode_text('"ab"')
    rest = grammars().of(grammar, tokens[:2]).masks((), [tokens[2:]])
    assert rest == grammars().of(grammar).masks((), [tokens])
    with pytest.raises(RequestError, match="does not begin as"):
        grammars().of(grammar, template().encode_text("Hello"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strange"},
        {"type": "object", "properties": 5},
        {"$ref": "https://example.com/schema"},
        {"type": "string", "pattern": "(?=a)b"},
        {"not": {"type": "string"}},
        {"enum": []},
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused(schema: dict[str, Any]) -> None:
    parameters = {"properties": {"x": schema}, "required": ["x"]}
    for asked in ({"schema": schema}, {"functions": [{"name": "f", "parameters": parameters}]}):
        with pytest.raises(RequestError, match=r"cannot hold a reply to this schema: .*\. Change"):
            grammar_of(**asked)  # type: ignore[arg-type]


def test_a_schema_that_ends_nowhere_is_refused_before_its_reply_begins() -> None:
    with pytest.raises(RequestError, match=r"too complex to go on .*Simplify its schema"):
        grammars().of(grammar_of({"$ref": "#"}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm", "llama2"])
def test_real_vocabularies_spell_a_valid_reply(shared_data: Path, name: str) -> None:
    of_model = ChatTemplate.load(shared_data / "tokenizers" / name)
    held = Grammars(of_model, of_model.vocab_size + 5).of(grammar_of(PERSON))
    text = '{"name": "Zoë 北京", "age": 36, "kind": "person", "tags": ["a b", ""]}'
    # Inside a text: SentencePiece puts a space before the first word.
    tokens = of_model.encode_reply(f"\n{text}")
    while of_model.decode(tokens) != text:
        del tokens[0]
    wanted = [*tokens, min(of_model.end_ids)]
    rows = held.masks((), [tokens[:place] for place in range(len(wanted))])
    assert all(row[t // 8] >> t % 8 & 1 for row, t in zip(rows, wanted, strict=True))
