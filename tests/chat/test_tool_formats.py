"""The format of a model's calls is known from its chat template, and its calls are read whatever
their marks are to the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from localspec.api.tools import Calls
from localspec.chat.context_room import check_servable
from localspec.chat.template import ChatTemplate
from localspec.chat.tool_formats import FORMATS
from localspec.core.backend import Description, Message, Request, ToolCall
from localspec.core.errors import RequestError
from tests.kit.fakes import FakeBackend
from tests.kit.tiny_tokenizer import tiny_tokenizer

BEGINNING = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
LOOP = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or "
    "() %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = {"c": "c.function.name", "a": "c.function.arguments"}
HERMES = '<tool_call>\n{"name": "{{ %(c)s }}", "arguments": {{ %(a)s | tojson }}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function={{ %(c)s }}>\n{%% for k, v in %(a)s.items() %%}<parameter={{ k }}>\n"
    "{{ v }}\n</parameter>\n{%% endfor %%}</function>\n</tool_call>"
)
GLM = (
    "<tool_call>{{ %(c)s }}\n{%% for k, v in %(a)s.items() %%}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{%% endfor %%}</tool_call>"
)
NINE = "{%% if c.id | length != 9 %%}{{ raise_exception('Ids have 9 characters.') }}{%% endif %%}"
OLD_MISTRAL = NINE + (
    '[TOOL_CALLS] [{"name": "{{ %(c)s }}", "arguments": {{ %(a)s | tojson }}, "id": "{{ c.id }}"}]'
)
MISTRAL = NINE + "[TOOL_CALLS]{{ %(c)s }}[CALL_ID]{{ c.id }}[ARGS]{{ %(a)s | tojson }}"
GRANITE = '<|tool_call|>[{"name": "{{ %(c)s }}", "arguments": {{ %(a)s | tojson }}}]'
LLAMA = '{"name": "{{ %(c)s }}", "parameters": {{ %(a)s | tojson }}}'
GEMMA = (
    "<|tool_call>call:{{ %(c)s }}{{ '{' }}{%% for k, v in %(a)s.items() %%}{{ k }}:"
    '{%% if v is string %%}<|"|>{{ v }}<|"|>{%% else %%}{{ v }}{%% endif %%}'
    "{%% if not loop.last %%},{%% endif %%}{%% endfor %%}{{ '}' }}<tool_call|>"
)
PYTHON = (
    "<|tool_call_start|>[{{ %(c)s }}({%% for k, v in %(a)s.items() %%}{{ k }}={{ v | tojson }}"
    "{%% if not loop.last %%}, {%% endif %%}{%% endfor %%})]<|tool_call_end|>"
)
GPT_OSS = (
    " to=functions.{{ %(c)s }}<|channel|>commentary json<|message|>{{ %(a)s | tojson }}<|call|>"
)
UNKNOWN = "<｜tool▁call▁begin｜>{{ %(c)s }}<｜tool▁sep｜>{{ %(a)s | tojson }}<｜tool▁call▁end｜>"
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>"]
MARKS += ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"]
MARKS += ["<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>"]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "size": {"type": "integer"}}}
ASKED = (Message("user", "Write."),)


def template_with(source: str, marks: Sequence[str] = MARKS) -> ChatTemplate:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (HERMES, "tool_call"),
        (CODER, "tool_call"),
        (GLM, "tool_call"),
        (OLD_MISTRAL, "mistral"),
        (MISTRAL, "mistral"),
        (GRANITE, "list"),
        (LLAMA, "tool_call"),
        (GEMMA, "gemma"),
        (PYTHON, "python"),
        (GPT_OSS, "gpt_oss"),
    ],
)
def test_a_call_is_read_as_the_models_template_writes_it(written: str, name: str) -> None:
    """With marks that the tokenizer calls special, and an id that no template of Mistral takes."""
    template = template_with(BEGINNING + LOOP.replace("CALL", written % WORDS))
    assert template.call_format is FORMATS[name]
    call = ToolCall("call_0123456789abcdef", "write", '{"path": "a.py", "size": 7}')
    before = template.render(ASKED)
    called = (*ASKED, Message("assistant", "", (call,)), Message("user", "And?"))
    reply = template.render(called)[len(before) :]
    calls = Calls({"write": SCHEMA}, form=template.call_format)
    detokenizer = template.detokenizer()
    text = "".join(calls.push(detokenizer.push(token)) for token in reply)
    rest, found, _ = calls.flush()
    assert [(one.name, one.arguments) for one in found] == [("write", call.arguments)]
    assert (text + rest).strip() == "user\nAnd?\nassistant"


def test_marks_tell_the_format_where_a_template_writes_no_calls() -> None:
    named = "{# Call tools behind [TOOL_CALLS]. #}"
    template = template_with(BEGINNING + named + LOOP.replace("CALL", ""), marks=[])
    assert template.call_format is FORMATS["mistral"]
    tokens = ["<|tool_call_start|>", "<|tool_call_end|>"]
    template = template_with(BEGINNING + LOOP.replace("CALL", ""), marks=tokens)
    assert template.call_format is FORMATS["python"]


def test_a_model_whose_calls_are_not_read_says_so_unless_a_call_is_forced() -> None:
    template = template_with(BEGINNING + LOOP.replace("CALL", UNKNOWN % WORDS))
    assert template.call_format is None
    backend = FakeBackend()
    known = backend.describe()
    tool = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}

    def check(call_format: str | None, **fields: Any) -> None:
        loaded = Description(**{**known.__dict__, "call_format": call_format})
        check_servable(backend, loaded, Request(ASKED, **fields))

    with pytest.raises(RequestError, match=r"format that localspec does not read.* tool_choice"):
        check(None, tools=(tool,))
    check(None, tools=(tool,), grammar="forced")
    check(None)
    check("mistral", tools=(tool,))
