"""No element comes out of text, whatever parser reads it; what was written stays readable."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Iterator

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from localspec.web.talk.plain_markdown import MARK, as_text, formulas

M = MARK
SHOWN = {
    "text": ("a < b & c <3 <- d", "a < b & c <3 <- d"),
    "a tag": ("<b>x</b>", f"<{M}b>x<{M}/b>"),
    "an entity": ("&lt; &", f"&{M}lt; &"),
    "a picture": ("![x](http://a/b.png)", f"!{M}[x](http://a/b.png)"),
    "an address": ("see <https://example.org/a>.", "see <https://example.org/a>."),
    "no address": ("see <https://a b>", f"see <{M}https://a b>"),
    "formatting": ("**bold**", "**bold**"),
    "code within a line": ("use `a<b>` here", f"use `a<{M}b>` here"),
    "code over two lines": ("`a\nb `<form>` c", f"`a\nb `<{M}form>` c"),
    "a fence": ("```html\n<b>&lt;\n```\n<i>", f"```html\n<b>&lt;\n```\n<{M}i>"),
    "a fence still open": ("~~~\n<b>", "~~~\n<b>"),
    "a longer fence": ("````\n~\n<b>\n````\n<i>", f"````\n~\n<b>\n````\n<{M}i>"),
    "a fence in a list": ("- ```\n  <b>\n  ```", f"- ```\n  <{M}b>\n  ```"),
    "a fence after one of a list": ("- ```\n```\n<b>\n```", f"- ```\n```\n<{M}b>\n```"),
    "a fence that a formula may take": ("$$\n```\n$$\n<b>\n```", f"$$\n```\n$$\n<{M}b>\n```"),
    "a fence in a link's title": ('[a]: /u "\n```\n"\n<b>', f'[a]: /u "\n```\n"\n<{M}b>'),
    "a tag that opens a fence": ("a\n~~~<b>", f"a\n~~~<{M}b>"),
    "words that a fence would hide": ("a\n> ```sh b <b>", f"a\n> ``{M}`sh b <{M}b>"),
    "the language of a fence that begins": ("a\n```sh", "a\n```sh"),
    "words behind a fence's language": ("```sh a=1\n<b>\n```", "```sh a=1\n<b>\n```"),
    "ends of lines": ("```\na\r```\r<b>", f"```\na\n```\n<{M}b>"),
    "our own mark": (f"<{M}b>", f"<{M}b>"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_signs_are_marked_where_they_could_begin_an_element(name: str) -> None:
    written, markdown = SHOWN[name]
    assert as_text(written) == markdown


# What opens, closes or swallows code, and what becomes an element outside of it.
SIGNS = (
    "` `` ``` ```` ~~~ ~~~~ <b> <form> </p> <div <!--x--> <?a?> <https://a.b> &lt; ![x](y) ![ [a]: "
    "](/u | --- $$ \\ \\[ \\] \\( $ * _ [ ] ( ) \" ' # - > + 1. a b1 http://a.b/ www.a.b"
).split()
SIGNS += ["\n"] * 12 + [" ", "  ", "    ", "\t", "\r", "\n- ", "\n> ", "\n```\n", "\n~~~\n"] * 2


def elements(tokens: list[Token]) -> Iterator[str]:
    for token in tokens:
        if token.type in ("html_block", "html_inline", "image"):
            yield token.content
        yield from elements(token.children or [])


@pytest.mark.slow
def test_no_element_comes_out_of_any_text() -> None:
    """Held against CommonMark's reference, with tables and without. Gradio takes a common indent
    off a message before it parses it."""
    chance = random.Random(7)
    parser = MarkdownIt("commonmark", {"html": True})
    num_bare = 0
    for _ in range(2500):
        written = "".join(chance.choice(SIGNS) for _ in range(chance.randint(1, 30)))
        markdown = as_text(written)
        num_bare += "<b>" in markdown or "<form>" in markdown
        for text in (markdown, inspect.cleandoc(markdown)):
            assert list(elements(parser.parse(text))) == [], repr(written)
        parser.enable("table") if "|" in written else parser.disable("table")
        assert markdown.replace(MARK, "") == written.replace("\r\n", "\n").replace("\r", "\n")
    assert num_bare > 25, "the rule for fences at the margin is tried too"


def test_a_diagram_stays_code_in_either_kind_of_fence() -> None:
    for fence in ("```mermaid", "~~~mermaid", "``` mermaid"):
        assert as_text(f"{fence}\ngraph TD\n") == f"{fence}{MARK}\ngraph TD\n"


def test_a_long_text_is_marked_quickly() -> None:
    text = "- `a` < b\n\n    c < d\n```\ne\n```\n" * 5_000 + "`" * 20_000 + "` `` " * 5_000
    started_s = time.thread_time()
    as_text(text)
    assert time.thread_time() - started_s < 5.0


@pytest.mark.parametrize(
    "text",
    [
        "costs $5 and $10",
        "from $5 to $10, or US$7",
        "$5/month or $6/month",
        "PATH=$HOME/bin:$PATH",
        "echo $A_B $C_D",
        "about $20-$30 each",
        "a $ b $ c",
        "between $1,000 and $2,000",
        "one $ only",
        "set $HOME$ or $PATH$",
        "exactly $5$ or $20+$",
    ],
)
def test_an_amount_or_a_variable_is_no_formula(text: str) -> None:
    assert formulas(text) == text


@pytest.mark.parametrize(
    "inside", ["a^2 + b^2 = c^2", "x", "x_1", "\\alpha", "f(x)", "n/2", "2x+1"]
)
def test_a_formula_between_dollars_is_marked(inside: str) -> None:
    assert formulas(f"so ${inside}$ holds, $9") == f"so {MARK}${inside}${MARK} holds, $9"


def test_tasks_of_a_list_are_boxes_and_other_brackets_stay() -> None:
    written = as_text("- [ ] open\n  1. [X] done\n- [link](x) [ ]\n```\n- [ ] code\n```")
    expected = f"- ☐{MARK} open\n  1. ☑{MARK} done\n- [link](x) [ ]\n```\n- [ ] code\n```"
    assert written == expected


def test_dollars_in_a_fence_stay_as_they_are() -> None:
    assert as_text("and\n```\n$b^2$\n```") == "and\n```\n$b^2$\n```"


@pytest.mark.parametrize(
    "text",
    [">" * 20_000 + " x", "> " * 20_000, "[" * 20_000, "*" * 20_000, " " * 20_000 + "- x"],
)
def test_nesting_without_end_is_bounded_and_quick(text: str) -> None:
    started_s = time.thread_time()
    written = as_text(text)
    assert time.thread_time() - started_s < 2.0
    followed = written.split(MARK)[0]
    assert followed.count(">") <= 16 and "[[" not in followed and "**" not in followed
    assert len(followed) - len(followed.lstrip(" ")) <= 64
