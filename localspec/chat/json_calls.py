"""Calls of tools that a model writes as JSON: whole, cut, between marks or alone.

A `Block` is what was read of a text: the calls in it, what in it is no call (as text, so that
nothing is lost), and where it ends. A reader returns None while more text may still make a call.
Raw line breaks in strings, arguments that are a JSON text, a comma or a bracket too many and lists
of calls are read, as models write them all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]  # of the arguments, by the name of the tool

ARGUMENTS = ("arguments", "parameters")  # models were trained to call them by one of two names
KEYS_OF_A_CALL = {*ARGUMENTS, "name", "id", "type", "function"}
# What stands between calls: brackets of a list, separators, a bracket too many.
BETWEEN = re.compile(r"[\s,;\[\]}]*")
STRING = r'"(?:[^"\\]|\\.)*(?:"|\Z)'
STRINGS = re.compile(STRING, re.DOTALL)
SPARE_COMMA = re.compile(rf"({STRING})|,(?=\s*[}}\]])", re.DOTALL)
CONTROL = re.compile(r"[\x00-\x1f]")
FENCE = re.compile(r"\s*```(?:json)?")
# The beginning of a call that was cut: its name, the quote behind it, its arguments.
CUT = re.compile(
    r'[\s,;\[]*\{\s*(?:"type":\s*"function",\s*)?(?:"function":\s*\{\s*)?"name":\s*"([^"]+)("?)'
    rf'(?:,\s*"(?:{"|".join(ARGUMENTS)})":\s*(.*))?',
    re.DOTALL,
)
BEFORE_A_NAME = ("{", '{"type":"function",', '{"type":"function","function":{', '{"function":{')


class Call(NamedTuple):
    """A call as a model wrote it. arguments: JSON text of an object, or the beginning of one."""

    name: str
    arguments: str


class Block(NamedTuple):
    """Calls and texts in their order, and how many characters they took."""

    items: tuple[Call | str, ...]
    end: int


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)  # takes raw line breaks


def decoded(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins there, and its end. Raises ValueError."""
    try:
        return DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_json(value: Any) -> str:
    """Return JSON text without half a character, which no stream can carry."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def escaped(text: str) -> str:
    """Return the same JSON, whole or cut, with the raw line breaks in its strings escaped."""

    def escape(string: re.Match[str]) -> str:
        return CONTROL.sub(lambda raw: json.dumps(raw[0])[1:-1], string[0])

    return STRINGS.sub(escape, text)


def call_of(data: Any, schemas: Schemas) -> Call | None:
    """Return the call that a JSON value is, None where it is no call of these tools."""
    if isinstance(data, dict) and isinstance(data.get("function"), dict):
        data = data["function"]
    if not isinstance(data, dict) or not KEYS_OF_A_CALL.issuperset(data):
        return None
    name, arguments = data.get("name"), next((data[key] for key in ARGUMENTS if key in data), None)
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments, _ = decoded(arguments.strip())
        except ValueError:
            return None
    if not isinstance(name, str) or name not in schemas or not isinstance(arguments or {}, dict):
        return None
    return Call(name, as_json(arguments or {}))


def read_json(
    text: str, start: int, closing: str, schemas: Schemas, has_ended: bool
) -> Block | None:
    """Read one value after the other, or a list of them, up to the closing mark or other text."""
    items, at = list[Call | str](), start
    while True:
        at = _after(BETWEEN, text, at)
        if closing and text.startswith(closing, at):
            return _block(text, items, at + len(closing))
        rest = text[at:]
        if not rest or (closing and closing.startswith(rest)):
            return _block(text, items, len(text)) if has_ended and items else None
        if not rest.startswith("{"):
            return _block(text, items, at) if items else unread(text, start, closing)
        try:
            data, end = decoded(text, at)
        except ValueError:
            return _mended(text, at, items, closing, schemas, has_ended)
        items.append(call_of(data, schemas) or text[at:end])
        at = end


def _block(text: str, items: Sequence[Call | str], end: int) -> Block:
    """Return what was read; all of it, with its marks, is text where no call is among it."""
    has_call = any(isinstance(item, Call) for item in items)
    return Block(tuple(items) if has_call else (text[:end],), end)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _mended(
    text: str, at: int, items: list[Call | str], closing: str, schemas: Schemas, has_ended: bool
) -> Block | None:
    """Read a value with a comma too many; what is no JSON up to the closing mark is text."""
    place = _closing_outside_strings(text, at, closing)
    if place is None and not has_ended:
        return None
    stop = len(text) if place is None else place
    end = stop if place is None else stop + len(closing)
    try:
        data, _ = decoded(SPARE_COMMA.sub(r"\1", text[at:stop]))
    except ValueError:
        data = None
    if call := call_of(data, schemas):
        return Block((*items, call), end)
    if place is None:  # it was cut
        return _block(text, items, at) if items else None
    return _block(text, (*items, text[at:end]), end)


def _closing_outside_strings(text: str, at: int, closing: str) -> int | None:
    if not closing or text.find(closing, at) < 0:
        return None
    marks = re.compile(f"{STRING}|({re.escape(closing)})", re.DOTALL)
    return next((one.start() for one in marks.finditer(text, at) if one[1]), None)


def unread(text: str, at: int, closing: str) -> Block | None:
    """Return all up to the closing mark as text; None before it comes."""
    place = text.find(closing, at) if closing else -1
    if place < 0:
        return None
    return Block((text[: place + len(closing)],), place + len(closing))


def cut_json(text: str, schemas: Schemas) -> Call | None:
    """Return the call that a text begins, None where it cannot be told which tool it calls."""
    if (match := CUT.match(text)) is None:
        return None
    name = only_name(match[1], bool(match[2]), schemas)
    return None if name is None else Call(name, escaped(match[3] or ""))


def only_name(begun: str, is_whole: bool, schemas: Schemas) -> str | None:
    """Return the one tool that is meant by a name or by its beginning."""
    names = [one for one in schemas if one == begun or (not is_whole and one.startswith(begun))]
    return names[0] if len(names) == 1 else None


def begins_call(text: str, names: Iterable[str]) -> bool | None:
    """Return whether a reply begins with a call of one of these tools, without a mark before it;
    None while it still may."""
    if text.strip() and "```json".startswith(text.strip()):
        return None
    fence = FENCE.match(text)
    compact = "".join(text[fence.end() if fence else 0 :].split()).removeprefix("[")
    heads = [f'{before}"name":"{name}"' for name in names for before in BEFORE_A_NAME]
    heads += [f'{{"{key}":' for key in ARGUMENTS]
    if any(compact.startswith(head) for head in heads):
        return True
    return None if any(head.startswith(compact) for head in heads) else False


def read_alone(text: str, schemas: Schemas, has_ended: bool) -> Block | None:
    """Read calls without a mark, up to other text."""
    fence = FENCE.match(text)
    closing = "```" if fence else ""
    return read_json(text, fence.end() if fence else 0, closing, schemas, has_ended)
