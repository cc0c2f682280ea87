"""Which parts of a message are code. Everything else is then kept from becoming markup.

Contract: pure. Only what every Markdown parser reads as code counts: fences of backticks or tildes,
at the margin or within a list item; lines indented by four where no list is open; code within a
line. A doubtful part counts as text: its signs are then escaped, which would be visible in code,
but text is never mistaken for code.

Source: spec.commonmark.org/0.31.2, 4.4, 4.5, 5.2 and 6.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

FENCE = re.compile(r" *(`{3,}(?=[^`]*$)|~{3,})")
# A list item's sign with what stands before its text. A number other than 1 ends no paragraph.
MARKER = re.compile(r" *(?:[-+*]|(\d{1,9})[.)])(?: {1,4}(?=\S)| |$)")
INLINE = re.compile(r"(?<![\\`])(`{1,2})(?!`)[^\n]+?(?<!`)\1(?!`)")
INDENT = 4
DEEPEST = 64  # largest indent that marks code


class Fence(NamedTuple):
    """sign: what closes it, or more of the same. within: where the text of its list item begins."""

    sign: str
    within: int

    def is_closed_by(self, line: str) -> bool:
        is_near = _indent(line) < self.within + INDENT
        signs = line.strip()
        return is_near and signs.startswith(self.sign) and not signs.strip(self.sign[0])


def pieces(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, in order, each with whether it is code."""
    lines = text.split("\n")
    ended = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
    marked = zip(block_lines(lines), ended, strict=True)
    for is_code, group in groupby(marked, key=lambda one: one[0]):
        piece = "".join(line for _, line in group)
        yield from [(True, piece)] if is_code else _inline(piece)


def _inline(text: str) -> Iterator[tuple[bool, str]]:
    done = 0
    for found in INLINE.finditer(text):
        yield False, text[done : found.start()]
        yield True, found.group()
        done = found.end()
    yield False, text[done:]


def block_lines(lines: Iterable[str]) -> Iterator[bool]:
    """Of each line, whether it lies in a block of code; a fence's own lines do."""
    items: list[int] = []  # where the text of each open list item begins
    fence: Fence | None = None
    is_after_blank, is_after_indented = True, False
    for raw in lines:
        line = raw.expandtabs(INDENT).rstrip()
        if fence is not None and (not line or _indent(line) >= fence.within):
            yield True
            fence = None if fence.is_closed_by(line) else fence
            is_after_blank = not line
            continue
        if not line:
            yield False
            is_after_blank = True
            continue
        _leave(items, line, is_after_blank)
        may_indent = not items and (is_after_blank or is_after_indented)
        fence = _enter(items, line, is_after_blank)
        is_after_indented = may_indent and INDENT <= _indent(line) <= DEEPEST
        is_after_blank = False
        yield is_after_indented or (fence is not None and not MARKER.match(line))


def _leave(items: list[int], line: str, is_after_blank: bool) -> None:
    """Close the list items that this line does not belong to; a paragraph may go on at the margin,
    but not after an empty line."""
    if is_after_blank or FENCE.match(line) or MARKER.match(line):
        while items and _indent(line) < items[-1]:
            items.pop()


def _enter(items: list[int], line: str, is_after_blank: bool) -> Fence | None:
    """Open the list items that begin in this line; the fence that it opens, None if none."""
    within, rest = (items[-1] if items else 0), line
    while _indent(rest) < within + INDENT:
        if opened := FENCE.match(rest):
            return Fence(opened[1], within)
        found = MARKER.match(rest)
        if found is None or not (is_after_blank or items or found[1] in (None, "1")):
            return None
        within = found.end()
        items.append(within)
        rest = " " * within + rest[within:]
    return None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
