"""What a reply is held to, by the fields of the interfaces: a format, or the call of a tool.

Contract: a format or a choice of tools becomes the text of a grammar (chat.grammars), "" where any
text will do. A reply with a format may call a tool instead where tools may be called. What cannot
be held to is refused, with the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localspec.api.faults import refusal
from localspec.api.fields import refuse_unless
from localspec.api.tools import schemas_of
from localspec.chat.grammars import ANY_OBJECT, grammar_of
from localspec.chat.schemas import closed
from localspec.core.backend import Request
from localspec.core.errors import RequestError

Schema = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


def schema_of(form: Mapping[str, Any] | None, param: str) -> Schema | None:
    """The schema of a format whose fields stand in one object; None for text. With `strict` its
    objects have no other properties than those that it names. Raises Refused."""
    kind = "text" if form is None else form.get("type")
    if kind == "text":
        return None
    if form is None or kind not in ("json_object", "json_schema"):
        raise refusal(f"{param} is {kind!r}, but must be text, json_object or json_schema.", param)
    schema = ANY_OBJECT if kind == "json_object" else form.get("schema")
    if not isinstance(schema, Mapping):
        raise refusal(f"{param} is json_schema, but holds no schema, a JSON object.", param)
    return closed(schema) if form.get("strict") else schema


def held(
    request: Request,
    param: str,
    schema: Schema | None,
    tools: Tools = (),
    to_call: Tools = (),
) -> Request:
    """The request with the tools that the model is shown, held to a call of one of `to_call`, or to
    the schema or a call of a tool. param: the field that asks for it. Raises Refused."""
    request = replace(request, tools=tuple(tools))
    if schema is None and not to_call:
        return request
    if request.ignores_end:
        raise refusal("ignore_eos asks for text beyond the end that a form has.", "ignore_eos")
    functions = [tool["function"] for tool in to_call or tools]
    try:
        return replace(request, grammar=grammar_of(None if to_call else schema, functions))
    except RequestError as error:
        raise refusal(str(error), param) from error


def with_choice(
    request: Request,
    tools: Tools,
    choice: str | None,
    named: str | None,
    param: str,
    schema: Schema | None,
) -> Request:
    """As `held`, by a tool_choice of OpenAI's interfaces. named: the tool that must be called.
    Raises Refused."""
    known = ("none", "auto", "required")
    refuse_unless(choice, (None, *known), "tool_choice", f"must be one of {', '.join(known)}.")
    if named is not None or choice == "required":
        return held(request, "tools", None, tools, called(tools, named))
    return held(request, param, schema, () if choice == "none" else tools)


def called(tools: Tools, name: str | None) -> Tools:
    """The tools of which one must be called: all, or the one that is named. Raises Refused."""
    found = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not found:
        known = ", ".join(schemas_of(tools)) or "none"
        wanted = "a call" if name is None else f"a call of {name!r}"
        raise refusal(f"tool_choice asks for {wanted}, but the tools are: {known}.", "tool_choice")
    return found
