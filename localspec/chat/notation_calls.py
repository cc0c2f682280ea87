"""Calls of tools in notations that are no JSON: Gemma 4's and Python's, as LFM2 writes it.

Gemma 4 writes call:name{key:<|"|>text<|"|>,number:3}, LFM2 a list of calls of Python functions
whose arguments are literals. Nothing of a model's text is ever run: it is parsed.

Source: the chat template of Gemma 4, the documentation of LFM2.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localspec.chat.json_calls import Block, Call, Schemas, as_json, decoded, only_name, read_json

QUOTE = '<|"|>'
GEMMA = re.compile(r"\s*call:([\w.-]+)\s*(\{.*)\Z", re.DOTALL)
CUT_GEMMA = re.compile(r"\s*call:([\w.-]+)\s*(\{.*)?\Z", re.DOTALL)
# What is written in another way than in JSON: texts and keys. Texts in plain quotes are left alone.
GEMMA_WORD = re.compile(
    r'(?P<json>"(?:[^"\\]|\\.)*")|<\|"\|>(?P<text>.*?)(?P<end><\|"\|>|\Z)|'
    r"(?P<key>[A-Za-z_][\w.$-]*)(?=\s*:)",
    re.DOTALL,
)
PYTHON_TEXT = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
CUT_PYTHON = re.compile(r"\s*\[?\s*([\w.]+)(\()?")
JSONS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Notation:
    """text: a pattern of texts, in which a closing mark is text. calls: of a whole block; raises
    ValueError."""

    text: str
    calls: Callable[[str], list[tuple[str, dict[str, Any]]]]


def read_notation(
    notation: Notation, text: str, start: int, closing: str, schemas: Schemas, has_ended: bool
) -> Block | None:
    """Read the calls up to the closing mark; what cannot be read is text."""
    if text[start:].lstrip().startswith(("[{", "{")):
        return read_json(text, start, closing, schemas, has_ended)
    marks = re.compile(f"{notation.text}|({re.escape(closing)})", re.DOTALL)
    place = next((one.start() for one in marks.finditer(text, start) if one[1]), None)
    if place is None and not has_ended:
        return None
    stop = len(text) if place is None else place
    end = stop if place is None else stop + len(closing)
    try:
        calls = notation.calls(text[start:stop])
    except ValueError:
        calls = []
    if not any(name in schemas for name, _ in calls):
        return None if place is None else Block((text[:end],), end)
    written = ((name, as_json(values)) for name, values in calls)
    items = (Call(*one) if one[0] in schemas else "{}({})".format(*one) for one in written)
    return Block(tuple(items), end)


def _gemmas_call(body: str) -> list[tuple[str, dict[str, Any]]]:
    if (match := GEMMA.match(body)) is None:
        raise ValueError("it is no call")
    written = match[2].strip()
    if written.startswith('{{"') and written.endswith("}}"):  # JSON within the braces of the call
        written = written[1:-1]
    values, end = decoded(_as_json(written))
    if not isinstance(values, dict) or end < len(_as_json(written).rstrip()):
        raise ValueError("its arguments are no object")
    return [(match[1], values)]


def _as_json(written: str) -> str:
    def word(match: re.Match[str]) -> str:
        if match["json"] is not None:
            return match["json"]
        if match["key"] is not None:
            return json.dumps(match["key"])
        text = json.dumps(match["text"], ensure_ascii=False)
        return text if match["end"] else text[:-1]

    return GEMMA_WORD.sub(word, written)


def cut_gemma(body: str, schemas: Schemas) -> Call | None:
    """Return the call that a text begins behind its mark."""
    if (match := CUT_GEMMA.match(body)) is None:
        return None
    name = only_name(match[1], match[2] is not None, schemas)
    return None if name is None else Call(name, _as_json(match[2] or ""))


def _pythons_calls(body: str) -> list[tuple[str, dict[str, Any]]]:
    def escape(text: re.Match[str]) -> str:
        return text[0].replace("\n", "\\n").replace("\r", "\\r")

    try:
        tree = ast.parse(PYTHON_TEXT.sub(escape, body.strip()), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_pythons_call(node) for node in nodes]
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError("it is no Python") from error


def _pythons_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("it is no call with named arguments")
    values = {one.arg or "": _literal(one.value) for one in node.keywords}
    json.dumps(values)  # a TypeError for what JSON has not
    return ast.unparse(node.func), values


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in JSONS:
        return JSONS[node.id]
    return ast.literal_eval(node)


def cut_python(body: str, schemas: Schemas) -> Call | None:
    """Return the call that a text begins behind its mark, without its arguments."""
    if (match := CUT_PYTHON.match(body)) is None:
        return None
    name = only_name(match[1], match[2] is not None, schemas)
    return None if name is None else Call(name, "")


OF_GEMMA = Notation(r'<\|"\|>.*?(?:<\|"\|>|\Z)', _gemmas_call)
OF_PYTHON = Notation(r"""(?:"(?:[^"\\]|\\.)*(?:"|\Z)|'(?:[^'\\]|\\.)*(?:'|\Z))""", _pythons_calls)
