"""Tools: their descriptions in a request, and the calls of them in a reply.

Contract: a model is shown tools by its own chat format and writes calls as it was trained to: JSON
between "<tool_call>" and "</tool_call>" (Hermes, Qwen), or a reply that is nothing but JSON (Llama,
Mistral), with the name of a tool and its arguments. `Calls` holds back what may become a call until
the end of the reply; what turns out to be none is text. A call that the length of the reply cut is
one too, with as much of its arguments as there is. Whether a model calls a tool is up to it, unless
the request forces a call (formats).

Source: the chat templates of these families.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localspec.api.faults import refusal
from localspec.backend import ToolCall
from localspec.chat.thinking import num_begun
from localspec.files import parsed

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
ARGUMENTS = ("arguments", "parameters")
BEGUN = re.compile(
    rf'\s*{{\s*"name":\s*"([^"]+)("?)(?:,\s*"(?:{"|".join(ARGUMENTS)})":\s*(.*))?', re.DOTALL
)


class Calls:
    """Divides a growing reply into text and calls. names: of the tools; without any, all is
    text. most: calls that are kept, the first ones; None: all."""

    def __init__(self, names: Iterable[str], most: int | None = None) -> None:
        self._names = frozenset(names)
        self._most = most
        self._held = ""
        self._is_call = False
        self._has_said = False

    def push(self, text: str) -> str:
        """The text that is certain by now."""
        if not self._names:
            return text
        self._held += text
        if not self._is_call and not self._has_said:
            self._is_call = self._held.lstrip()[:1] in ("{", "[")
        if self._is_call or not (self._has_said or self._held.strip()):
            return ""
        place = self._held.find(OPEN)
        self._is_call = place >= 0
        end = place if self._is_call else len(self._held) - num_begun(self._held, OPEN)
        said, self._held = self._held[:end], self._held[end:]
        self._has_said = self._has_said or bool(said)
        return said

    def flush(self, is_cut: bool = False) -> tuple[str, tuple[ToolCall, ...], bool]:
        """What was held, once no more text comes: text or calls, and whether these are whole.
        is_cut: the reply did not come to its end."""
        held, self._held = self._held, ""
        found = calls_in(held[: len(held) - num_begun(held, CLOSE)], self._names)
        if found:
            return "", found[: self._most], True
        head, _, last = held.rpartition(OPEN)
        found = (*calls_in(head, self._names), *begun_call(last, self._names)) if is_cut else ()
        kept = found[: self._most]
        return "" if found else held, kept, len(kept) < len(found)


def calls_in(text: str, names: Iterable[str]) -> tuple[ToolCall, ...]:
    """The calls that a text consists of; none where a part of it is no call of these tools."""
    try:
        if OPEN in text:
            data = [parsed(block) for block in BLOCK.findall(text)]
        else:
            whole = parsed(text)
            data = whole if isinstance(whole, list) else [whole]
    except ValueError:
        return ()
    found = [_call(one, frozenset(names)) for one in data]
    return tuple(call for call in found if call) if all(found) else ()


def begun_call(text: str, names: Iterable[str]) -> tuple[ToolCall, ...]:
    """The call that a text begins, by what is there of its arguments; none where it cannot be told
    which of these tools is called."""
    if (match := BEGUN.match(text)) is None:
        return ()
    begun, is_whole, arguments = match.groups()
    found = [name for name in names if name == begun or (not is_whole and name.startswith(begun))]
    return (_with_id(found[0], arguments or ""),) if len(found) == 1 else ()


def _call(data: Any, names: frozenset[str]) -> ToolCall | None:
    if not isinstance(data, dict) or data.get("name") not in names:
        return None
    arguments: Any = next((data[key] for key in ARGUMENTS if key in data), {})
    if not isinstance(arguments, dict):
        return None
    return _with_id(data["name"], json.dumps(arguments, ensure_ascii=False))


def _with_id(name: str, arguments: str) -> ToolCall:
    return ToolCall(f"call_{secrets.token_hex(12)}", name, arguments)


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


def arguments_of(text: str, param: str) -> str:
    """The arguments of an earlier call as JSON text of an object. Raises Refused."""
    try:
        is_object = isinstance(parsed(text or "{}"), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise refusal("The arguments of a tool call are no JSON object.", param)
    return text or "{}"
