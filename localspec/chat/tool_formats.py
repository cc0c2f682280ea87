"""The formats in which models write calls of tools: one table, with a reader for each.

A row of FORMATS names the marks that open a call and the one that closes it. A reader is given the
text from an opening mark on, and returns a `Block`, or None while more text may still make a call
(json_calls). JSON without a mark, as Llama writes it, is read in every format, at the beginning of
a reply. A model's format is the one that reads the call which its own chat template writes
(`format_of`), so it is known once the template is loaded.

Source: the chat templates of Hermes, Qwen (JSON, and Qwen3-Coder's functions), GLM-4.5 to 4.7,
Mistral (lists up to v7, names and arguments since v11), Granite 3 and Phi-4-mini, Gemma 4, LFM2,
gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from localspec.chat.json_calls import (
    Block,
    Call,
    Schema,
    Schemas,
    as_json,
    begins_call,
    cut_json,
    decoded,
    escaped,
    only_name,
    read_alone,
    read_json,
    unread,
)
from localspec.chat.notation_calls import (
    OF_GEMMA,
    OF_PYTHON,
    QUOTE,
    Notation,
    cut_gemma,
    cut_python,
    read_notation,
)
from localspec.chat.thinking import CALLING, NEXT, num_begun
from localspec.core.backend import Message, ToolCall
from localspec.core.errors import RequestError

PROBE = "localspec_probe"  # a tool that no chat template names
ID_LENGTH = 9  # characters of an id in Mistral's chat templates, which refuse all others
PYTHONS = {"True": True, "False": False, "None": None}  # as templates write them, which is no JSON


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls. closing: "" where a call ends by itself. others: further texts that
    may be control tokens. read: a block at the beginning of a text. cut: the call that a text
    begins, where the reply was cut in it."""

    name: str
    opening: tuple[str, ...]
    closing: str
    read: Callable[[CallFormat, str, Schemas, bool], Block | None]
    cut: Callable[[CallFormat, str, Schemas], Call | None]
    others: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts one of which ends a call; none where it ends by itself."""
        of_functions = ("</function>",) if "<function=" in self.opening else ()
        return (self.closing, *of_functions) if self.closing else ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.opening, self.closing, *self.others)

    def mark_of(self, text: str) -> str:
        """The opening mark that a text begins with."""
        return next((mark for mark in self.opening if text.startswith(mark)), "")


@dataclass(frozen=True)
class Steps:
    """How a name and one argument after the other are written. cut: an argument without its end.
    is_framed: a value stands between line breaks of the format."""

    head: re.Pattern[str]
    argument: re.Pattern[str]
    cut: re.Pattern[str]
    end: re.Pattern[str]
    closing: str
    is_framed: bool = False


FUNCTIONS = Steps(
    re.compile(r"\s*<function=([^>\n]+)>"),
    re.compile(
        r"\s*<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=\n<parameter=)|(?=\n</function>))"
        r"(?=\s*(?:<parameter=|</function>|</tool_call>|\Z))",
        re.DOTALL,
    ),
    re.compile(r"\s*<parameter=([^>\n]+)>(.*)", re.DOTALL),
    re.compile(r"\s*(?:</function>|</tool_call>)"),
    "\n</parameter>",
    is_framed=True,
)
PAIRS = Steps(
    re.compile(r"\s*([^\s<{}\[\]]+)(?=[\s<])"),
    re.compile(
        r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|</tool_call>|\Z))",
        re.DOTALL,
    ),
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", re.DOTALL),
    re.compile(r"\s*</tool_call>"),
    "</arg_value>",
)


def _read_marked(form: CallFormat, text: str, schemas: Schemas, has_ended: bool) -> Block | None:
    """Read JSON, a function with its parameters, or a name with pairs, by how the text begins."""
    mark = form.mark_of(text)
    body = text[len(mark) :].lstrip()
    if mark == "<function=" or body.startswith("<function="):
        start = 0 if mark == "<function=" else len(mark)
        return _read_steps(form, text, start, schemas, has_ended, FUNCTIONS)
    if body[:1] in ("{", "["):
        return read_json(text, len(mark), form.closing, schemas, has_ended)
    if "<function=".startswith(body) and not has_ended:
        return None
    return _read_steps(form, text, len(mark), schemas, has_ended, PAIRS)


def _read_steps(
    form: CallFormat, text: str, start: int, schemas: Schemas, has_ended: bool, steps: Steps
) -> Block | None:
    name, values, at = _arguments(text, start, schemas, steps)
    end = steps.end.match(text, at)
    if name and (end is not None or (has_ended and not text[at:].strip())):
        stop = len(text) if end is None else end.end()
        return Block((Call(name, as_json(values)) if name in schemas else text[:stop],), stop)
    if steps.cut.match(text, at):
        return None  # within a value, where a closing mark is text
    return unread(text, at, form.closing)


def _arguments(
    text: str, start: int, schemas: Schemas, steps: Steps
) -> tuple[str, dict[str, Any], int]:
    """Return the name, "" without one, the arguments that are whole, and where they end."""
    head, values = steps.head.match(text, start), dict[str, Any]()
    if head is None:
        return "", values, start
    name, at = head[1].strip(), head.end()
    while argument := steps.argument.match(text, at):
        key, at = argument[1].strip(), argument.end()
        values[key] = _value(_unframed(argument[2], steps), _schema_of(schemas, name, key))
    return name, values, at


def _unframed(raw: str, steps: Steps) -> str:
    return raw.removeprefix("\n").removesuffix("\n") if steps.is_framed else raw


def _schema_of(schemas: Schemas, name: str, key: str) -> Schema:
    properties = schemas.get(name, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _value(raw: str, schema: Schema) -> Any:
    """Return the text where the schema allows one, else the value that it is in JSON."""
    kinds, word = _kinds(schema), raw.strip()
    if "string" in kinds and not ("null" in kinds and word in ("null", "None")):
        return raw
    try:
        value, end = decoded(word)
    except ValueError:
        return PYTHONS.get(word, raw)
    return value if end == len(word) else raw


def _kinds(schema: Schema) -> set[str]:
    """Return the JSON types that a schema names."""
    named, choices = schema.get("type", ()), schema.get("enum")
    kinds = {named} if isinstance(named, str) else {one for one in named if isinstance(one, str)}
    if isinstance(choices, list) and all(isinstance(one, str) for one in choices):
        kinds.add("string")
    for part in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= _kinds(part) if isinstance(part, Mapping) else set()
    return kinds


def _cut_marked(form: CallFormat, text: str, schemas: Schemas) -> Call | None:
    mark = form.mark_of(text)
    start = 0 if mark == "<function=" else len(mark)
    if call := cut_json(text[start:], schemas):
        return call
    for steps in (FUNCTIONS, PAIRS):
        name, values, at = _arguments(text, start, schemas, steps)
        if name not in schemas:
            continue
        part = steps.cut.match(text, at)
        key = part[1].strip() if part else ""
        if part is None or "string" not in _kinds(_schema_of(schemas, name, key)):
            return Call(name, as_json(values)[:-1] if values else "")
        raw = _unframed(part[2][: len(part[2]) - num_begun(part[2], steps.closing)], steps)
        return Call(name, as_json({**values, key: raw})[:-2])  # without its quote and brace
    return None


# Before the arguments of Mistral's calls and gpt-oss's: a name, and marks.
OF_MISTRAL = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
OF_GPT_OSS = re.compile(
    r"([\w.-]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>\s*(?=\{)"
)
CUT_OF_MISTRAL = re.compile(r"\s*([\w.-]+)(?P<more>\[.*?)??(?P<arguments>\{.*)?\Z", re.DOTALL)
CUT_OF_GPT_OSS = re.compile(
    r"([\w.-]+)(?P<more>[\s<].*?)?(?:<\|message\|>\s*(?P<arguments>\{.*)?)?\Z", re.DOTALL
)


def _read_named(
    header: re.Pattern[str], form: CallFormat, text: str, schemas: Schemas, has_ended: bool
) -> Block | None:
    """Read JSON calls, or a name and its arguments."""
    start = len(form.mark_of(text))
    if text[start:].lstrip()[:1] in ("{", "["):
        return read_json(text, start, "", schemas, has_ended)
    if (match := header.match(text, start)) is None:
        return None
    try:
        arguments, end = decoded(text, match.end())
    except ValueError:
        return None
    return Block((Call(match[1], as_json(arguments)) if match[1] in schemas else text[:end],), end)


def _cut_named(
    header: re.Pattern[str], form: CallFormat, text: str, schemas: Schemas
) -> Call | None:
    text = text.removeprefix(form.mark_of(text))
    if text.lstrip()[:1] in ("{", "["):
        return cut_json(text, schemas)
    if (match := header.match(text)) is None:
        return None
    is_whole = bool(match["more"] or match["arguments"])
    name = only_name(match[1], is_whole, schemas)
    return None if name is None else Call(name, escaped(match["arguments"] or ""))


def _read_notation(
    notation: Notation, form: CallFormat, text: str, schemas: Schemas, has_ended: bool
) -> Block | None:
    start = len(form.mark_of(text))
    return read_notation(notation, text, start, form.closing, schemas, has_ended)


def _cut_notation(
    cut: Callable[[str, Schemas], Call | None], form: CallFormat, text: str, schemas: Schemas
) -> Call | None:
    body = text[len(form.mark_of(text)) :]
    return cut_json(body, schemas) or cut(body[: len(body) - num_begun(body, QUOTE)], schemas)


TOOL_CALL = CallFormat(
    "tool_call", ("<tool_call>", "<function="), "</tool_call>", _read_marked, _cut_marked
)
MISTRAL = CallFormat(
    "mistral", ("[TOOL_CALLS]",), "", partial(_read_named, OF_MISTRAL),
    partial(_cut_named, CUT_OF_MISTRAL), ("[CALL_ID]", "[ARGS]"),
)  # fmt: skip
GPT_OSS = CallFormat(
    "gpt_oss", (*(f"{NEXT}{one}" for one in CALLING), *CALLING), "",
    partial(_read_named, OF_GPT_OSS), partial(_cut_named, CUT_OF_GPT_OSS), ("<|message|>",),
)  # fmt: skip
LIST = CallFormat("list", ("<|tool_call|>",), "<|/tool_call|>", _read_marked, _cut_marked)
GEMMA = CallFormat(
    "gemma", ("<|tool_call>",), "<tool_call|>", partial(_read_notation, OF_GEMMA),
    partial(_cut_notation, cut_gemma), (QUOTE,),
)  # fmt: skip
PYTHON = CallFormat(
    "python", ("<|tool_call_start|>",), "<|tool_call_end|>", partial(_read_notation, OF_PYTHON),
    partial(_cut_notation, cut_python),
)  # fmt: skip
FORMATS = {one.name: one for one in (TOOL_CALL, MISTRAL, LIST, GEMMA, PYTHON, GPT_OSS)}


def call_format_of(
    source: str, names: Iterable[str], write: Callable[[Sequence[Message], bool], str]
) -> CallFormat | None:
    """Return the format of a model by what its chat template writes of an earlier call. names: of
    its added tokens. write: the text of a conversation, and with True the beginning of a reply."""
    if "tools" not in source:
        return TOOL_CALL  # it is shown none
    asked = (Message("user", "Hello."),)
    call = ToolCall("a1b2c3d4e", PROBE, '{"key": "a word"}')
    try:
        begun, whole = write(asked, True), write((*asked, Message("assistant", "", (call,))), False)
    except RequestError:  # it refuses so short a conversation
        begun = whole = ""
    return format_of(whole.removeprefix(begun), PROBE, " ".join((source, *names)))


def with_fitting_ids(message: Message, form: CallFormat | None) -> Message:
    """Return the message with the ids of calls as the chat template takes them, the same for a call
    and its answer."""
    if form is not MISTRAL:
        return message
    calls = tuple(replace(call, call_id=_short(call.call_id)) for call in message.tool_calls)
    return replace(message, tool_calls=calls, call_id=message.call_id and _short(message.call_id))


def _short(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id))[-ID_LENGTH:].rjust(ID_LENGTH, "0")


def format_of(written: str, name: str, source: str) -> CallFormat | None:
    """Return the format of a model whose chat template wrote this reply with a call of the tool of
    that name, None where no reader finds the call. source: of the template, with the names of the
    tokens, whose marks tell the format where it writes no calls of earlier replies."""
    if name not in written:
        marked = (one for one in FORMATS.values() if any(mark in source for mark in one.opening))
        return next(marked, TOOL_CALL)
    return next((one for one in FORMATS.values() if _reads(one, written, name)), None)


def _reads(form: CallFormat, written: str, name: str) -> bool:
    schemas: Schemas = {name: {}}
    places = [place for mark in form.opening if (place := written.find(mark)) >= 0]
    block = None
    if places:
        block = form.read(form, written[min(places) :], schemas, True)
    elif begins_call(written, schemas):
        block = read_alone(written, schemas, True)
    return block is not None and any(isinstance(one, Call) for one in block.items)
