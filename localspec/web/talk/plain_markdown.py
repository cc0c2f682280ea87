"""What a person or a model wrote, as Markdown out of which no element of HTML can come.

Contract: `as_text` puts an invisible MARK behind every sign that could begin a tag, an entity or a
picture, in text and in code alike, so nothing depends on how a parser tells them apart. Only a
fence at the margin keeps its signs bare, for the colours of its language, and only in a message
where nothing else could run across the line that opens it. Copying takes the marks out
(static/live.js).

Sources: spec.commonmark.org/0.31.2, 4.5; html.spec.whatwg.org, 13.2.5.6 (what follows a `<`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

MAX_NESTING = 16  # of quotes and lists; deeper is written out, since parsers recurse
INDENT = 4  # of a line that ends no fence
MARK = "\u2063"  # invisible separator
LATEX_DELIMITERS: list[dict[str, str | bool]] = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
    {"left": f"{MARK}$", "right": f"${MARK}", "display": False},
]

# No tag begins by a `<` before the characters named. An address between angle brackets is a link,
# as without them.
SIGN = re.compile(r"<(?![\s\d=.,:;()|-]|https?://[^\s<>`]+>)|&(?=#?\w{1,31};)|!(?=\[)")
FENCE = re.compile(r"(?:[ \t>]|[-+*] |\d{1,9}[.)] )*(`{3,}(?=[^`]*$)|~{3,})")
# What may take the opening line of a fence for its own: another fence, the title of a link's
# definition; and a formula, which Gradio also finds within code.
RUNS_ON = re.compile(r"`{3}|~{3}|\]:")
FORMULA_START = re.compile(r"\$\$|\\[\[(]")
# Gradio would draw these, and a drawing may name pictures and scripts: they stay code.
DIAGRAM = re.compile(r"((?:```|~~~)[ \t]*mermaid)(?=\s)")
FORMULA = re.compile(r"(?<![\\$\w])\$(?=[^\s$])([^$\n]{1,300}?)(?<=[^\s\\])\$(?![\w$])")
LOOKS_LIKE_MATHS = re.compile(r"[\\^_=<>{}+*/]|^[A-Za-z]('|\([A-Za-z]\))?$")
AMOUNT = re.compile(r"^\d[\d,.]*\s?([A-Za-z%]*[+*/]?|/[a-z]+)$")
NESTED = re.compile(rf"^((?:[ ]?>[ ]?){{{MAX_NESTING}}})(?=[ ]*>)", re.MULTILINE)
# Gradio takes the boxes of a list of tasks out of the page, so they become signs.
TASK = re.compile(r"^([ \t>]*(?:[-*+]|\d{1,9}[.)])[ \t]+)\[([ xX])\](?=[ \t])", re.MULTILINE)
BOXES = {" ": f"☐{MARK}", "x": f"☑{MARK}"}
INDENTED = re.compile(rf"^[ \t]{{{4 * MAX_NESTING}}}(?=[ \t])", re.MULTILINE)
BRACKETS = re.compile(r"[\[\]]{20,}|[*_~]{40,}")


def as_text(text: str) -> str:
    """The Markdown of a message; tags, entities and images in it stay the characters they are."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace(MARK, "")
    lines = text.split("\n")
    opened = FENCE.match(lines[-1])
    if opened and len(lines[-1][opened.end() :].split()) > 1:  # a fence would hide these words
        lines[-1] = MARK.join((lines[-1][: opened.end() - 1], lines[-1][opened.end() - 1 :]))
    fenced, is_sure = _fenced(lines)
    parts = []
    for is_code, group in groupby(zip(fenced, lines, strict=True), key=lambda one: one[0]):
        part = "\n".join(line for _, line in group)
        if not (is_code and is_sure):
            part = SIGN.sub(rf"\g<0>{MARK}", part)
        parts.append(part if is_code else TASK.sub(_box, _flat(formulas(part))))
    return DIAGRAM.sub(rf"\1{MARK}", "\n".join(parts))


def _fenced(lines: Sequence[str]) -> tuple[list[bool], bool]:
    """Of each line, whether it lies in a fence or opens or closes one; and whether every parser
    finds the same, whatever else it knows."""
    found, sign = list[bool](), ""
    is_sure = not any(FORMULA_START.search(line) for line in lines)
    for line in lines:
        opened = None if sign else FENCE.match(line)
        found.append(bool(sign or opened))
        if opened is not None:
            sign = opened[1]
            is_sure = is_sure and line.startswith(sign) and not SIGN.search(line)
        elif not sign:
            is_sure = is_sure and not RUNS_ON.search(line)
        elif (rest := line.strip())[:3] in ("```", "~~~"):
            is_end = rest.startswith(sign) and not rest.strip(sign[0])
            is_sure = is_sure and is_end and len(line.rstrip(" ")) - len(rest) < INDENT
            sign = "" if is_end else sign
    return found, is_sure


def _box(match: re.Match[str]) -> str:
    return f"{match[1]}{BOXES[match[2].lower()]}"


def formulas(text: str) -> str:
    """Mark the inline formulas between single dollars; amounts and shell variables are none."""
    return FORMULA.sub(_marked, text) if text.count("$") > 1 else text


def _marked(match: re.Match[str]) -> str:
    inside = match.group(1)
    is_formula = LOOKS_LIKE_MATHS.search(inside) and not AMOUNT.search(inside)
    return f"{MARK}${inside}${MARK}" if is_formula else match.group()


def _flat(text: str) -> str:
    """Bound what a Markdown parser would follow down; nobody writes this deep by intention. Signs
    become entities: at 5,000 of them behind backslashes Gradio's page stands still for 20 s."""
    text = INDENTED.sub(rf"\g<0>{MARK}", NESTED.sub(rf"\g<0>{MARK}", text))
    return BRACKETS.sub(lambda match: "".join(f"&#{ord(sign)};" for sign in match.group()), text)
