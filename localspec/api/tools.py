"""Tools: their descriptions in a request, and the calls of them in a reply.

`Calls` divides a growing reply into text and calls, by the format of the model
(chat.tool_formats). Text before, between and behind calls is content, and so is what cannot be read
as a call of these tools: it throws nothing else away. A call that the length of the reply cut is a
call with as much of its arguments as there is. Whether a model calls a tool is up to it, unless the
request forces a call (formats).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from localspec.api.faults import refusal
from localspec.chat.json_calls import Block, Call, Schemas, begins_call, escaped, read_alone
from localspec.chat.thinking import num_begun
from localspec.chat.tool_formats import TOOL_CALL, CallFormat
from localspec.core.backend import ToolCall
from localspec.core.files import parsed

# A call without marks may end with one of these.
ENDS_OF_JSON = ("}", "]", "```")


class Calls:
    """Divides a growing reply into text and calls. tools: their names, with the schemas of their
    arguments where these are known; without any, all is text. most: calls that are kept, the first
    ones; None: all."""

    def __init__(
        self,
        tools: Schemas | Iterable[str],
        most: int | None = None,
        form: CallFormat = TOOL_CALL,
    ) -> None:
        if not isinstance(tools, Mapping):
            tools = dict[str, Mapping[str, Any]]((name, {}) for name in tools)
        self._schemas: Schemas = tools
        self._most = most
        self._form = form
        self._held = ""
        self._is_open = False  # the held text begins with an opening mark, or with a call alone
        self._is_at_start = True  # where a call may stand without a mark
        self._is_after_call = False
        self._new = list[ToolCall]()
        self.num_calls = 0

    def push(self, text: str) -> str:
        """Return the text that is certain by now."""
        if not self._schemas:
            return text
        self._held += text
        return "" if self._is_open and not self._may_end(len(text)) else self._divide()

    def _may_end(self, num_new: int) -> bool:
        """Return whether an end of a call is among the newest characters. Only then a block is read
        again, for to read a long one takes milliseconds, in which nobody is answered."""
        ends = ENDS_OF_JSON if self._is_at_start else self._form.ends or ENDS_OF_JSON
        return any(self._held.find(end, -num_new - len(end) + 1) >= 0 for end in ends)

    def taken(self) -> tuple[ToolCall, ...]:
        """Return the calls that have become whole since the last time."""
        new, self._new = tuple(self._new), []
        return new

    def flush(self, is_cut: bool = False) -> tuple[str, tuple[ToolCall, ...], bool]:
        """Return the rest once no more text comes: text, calls, and whether the reply ends with a
        whole call or none is cut. is_cut: the reply did not come to its end."""
        text = self._divide(has_ended=True, is_cut=is_cut)
        is_whole = self.num_calls > 0 and (self._is_after_call or not is_cut)
        return text, self.taken(), is_whole

    def _divide(self, has_ended: bool = False, is_cut: bool = False) -> str:
        """Take from the held text what is certain: the text of it, while calls are kept apart."""
        said = list[str]()
        while True:
            if not self._is_open:
                said.append(self._before_a_call(has_ended))
                if not self._is_open:
                    return "".join(said)
            block = self._block(has_ended)
            if block is None and not has_ended:
                return "".join(said)
            if block is None and is_cut and (call := self._cut_call()):
                self._held, self._is_after_call = "", self._is_full  # it is not among those kept
                self._add(call)
                return "".join(said)
            if block is None:
                mark = self._form.mark_of(self._held)
                block = Block((mark,), len(mark))
            for item in block.items:
                if isinstance(item, Call):
                    self._add(item)
                else:
                    said.append(item)
            self._held = self._held[block.end :]
            self._is_after_call = bool(block.items) and isinstance(block.items[-1], Call)
            self._is_open = self._is_at_start = False

    def _before_a_call(self, has_ended: bool) -> str:
        """Take the text before the next call; `_is_open` says whether the rest begins one."""
        if self._is_at_start:
            begins = begins_call(self._held, self._schemas)
            self._is_open = begins is True or (begins is None and has_ended)
            if begins is not False:
                return ""
            self._is_at_start = False
        if self._is_after_call and not self._skip_after_call():
            return ""
        opening = self._form.opening
        places = [place for mark in opening if (place := self._held.find(mark)) >= 0]
        self._is_open = bool(places)
        num_open = 0 if has_ended else max(num_begun(self._held, mark) for mark in opening)
        end = min(places, default=len(self._held) - num_open)
        said, self._held = self._held[:end], self._held[end:]
        self._is_after_call = self._is_after_call and not said
        return said

    def _skip_after_call(self) -> bool:
        """Drop the space and closing marks after a call; whether anything else follows."""
        closing = self._form.closing
        self._held = self._held.lstrip()
        while closing and self._held.startswith(closing):
            self._held = self._held[len(closing) :].lstrip()
        return not closing.startswith(self._held) if closing else bool(self._held)

    def _block(self, has_ended: bool) -> Block | None:
        if self._is_at_start:
            return read_alone(self._held, self._schemas, has_ended)
        return self._form.read(self._form, self._held, self._schemas, has_ended)

    def _cut_call(self) -> Call | None:
        """Return the call that the held text begins; none where another one begins behind it."""
        mark = self._form.mark_of(self._held)
        if mark and any(one in self._held[len(mark) :] for one in self._form.opening[:1]):
            return None
        return self._form.cut(self._form, self._held, self._schemas)

    @property
    def _is_full(self) -> bool:
        return self._most is not None and self.num_calls >= self._most

    def _add(self, call: Call) -> None:
        if not self._is_full:
            self._new.append(ToolCall(f"call_{secrets.token_hex(12)}", *call))
            self.num_calls += 1


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments of these tools by their names."""
    functions = [tool["function"] for tool in tools]
    return {one["name"]: one.get("parameters") or {} for one in functions}


def names_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def tool_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The description that chat formats take of a function with a name and the schema of an object.
    Raises Refused."""
    if not isinstance(function.get("name"), str):
        raise refusal("A tool is a function with a name; localspec has no others.", "tools")
    function = {**function, "parameters": function.get("parameters") or {}}
    schema = function["parameters"]
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        why = "are no schema of an object, which the arguments of a call are"
        raise refusal(f"The parameters of {function['name']!r} {why}.", "tools")
    return {"type": "function", "function": function}


def refuse_only_foreign(foreign: Sequence[str], num_functions: int) -> None:
    """Raise Refused where a request has tools and none that its sender runs. foreign: the types of
    those that localspec or the model's maker would have to know. Beside functions they are left
    out, for a model need not call a tool."""
    if foreign and not num_functions:
        told = f"The tools are of the type {', '.join(dict.fromkeys(foreign))}, which localspec"
        raise refusal(f"{told} does not run. Send functions that your program runs.", "tools")


def arguments_of(text: str, param: str) -> str:
    """Return the arguments of an earlier call as JSON text of an object. Those of a call that was
    cut are taken as far as they go. Raises Refused."""
    text = escaped(text.strip() or "{}")
    try:
        value = from_json(text, allow_partial="trailing-strings")
        if isinstance(value, dict):
            is_whole = text.endswith("}") and isinstance(parsed(text), dict)
            return text if is_whole else json.dumps(value, ensure_ascii=False)
    except ValueError:
        pass
    raise refusal("The arguments of a tool call are no JSON object.", param)
