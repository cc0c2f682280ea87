"""What is code is left as it was written; what only looks like it is kept from being markup."""

from __future__ import annotations

import time

import pytest

from localspec.web.talk.code import pieces
from localspec.web.talk.messages import as_text

SHOWN = {
    "tildes": ("~~~html\n<b>\n~~~\n<i>", "~~~html\n<b>\n~~~\n&#0060;i>"),
    "tildes around backticks": ("~~~\n```\n<b>\n~~~\n<i>", "~~~\n```\n<b>\n~~~\n&#0060;i>"),
    "a longer fence": ("````\n```\n<b>\n````\n<i>", "````\n```\n<b>\n````\n&#0060;i>"),
    "a fence still open": ("~~~\n<b>", "~~~\n<b>"),
    "indented": ("so:\n\n    a < b\n\nand <i>", "so:\n\n    a < b\n\nand &#0060;i>"),
    "indented by a tab": ("\ta < b", "\ta < b"),
    "a paragraph that goes on": ("so\n    a < b", "so\n    a &#0060; b"),
    "within a list": (
        "1. do\n   ~~~\n   a<b\n   ~~~\n   <b>",
        "1. do\n   ~~~\n   a<b\n   ~~~\n   &#0060;b>",
    ),
    "in a list's list": (
        "- a\n  - b\n    ```\n    <x>\n    ```\n- <y>",
        "- a\n  - b\n    ```\n    <x>\n    ```\n- &#0060;y>",
    ),
    "beside a list's sign": ("- ```\n  a<b\n  ```\n<i>", "- ```\n  a<b\n  ```\n&#0060;i>"),
    "cut off by the list's end": ("- ```\n  a<b\n\n<i>", "- ```\n  a<b\n\n&#0060;i>"),
    "a list's own text": ("- x\n\n      a < b", "- x\n\n      a &#0060; b"),
    "after a list": ("- x\n\nso\n\n    a < b", "- x\n\nso\n\n    a < b"),
    "double backticks": ("``a ` <b>`` <i>", "``a ` <b>`` &#0060;i>"),
    "a backtick that is none": ("\\`<b>\\`", "\\`&#0060;b>\\`"),
    "a quoted fence": ("> ```\n> x\n> ```\n\n<y>", "> ```\n> x\n> ```\n\n&#0060;y>"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_code_is_shown_as_it_was_written_and_nothing_else_is_markup(name: str) -> None:
    written, markdown = SHOWN[name]
    assert as_text(written) == markdown


@pytest.mark.parametrize("written", [written for written, _ in SHOWN.values()])
def test_the_pieces_are_the_text(written: str) -> None:
    assert "".join(piece for _, piece in pieces(written)) == written


def test_a_diagram_stays_code_in_either_kind_of_fence() -> None:
    for fence in ("```mermaid", "~~~mermaid", "``` mermaid"):
        assert as_text(f"{fence}\ngraph TD\n") == f"{fence}\u2063\ngraph TD\n"


def test_a_long_text_is_cut_quickly() -> None:
    text = "- `a` < b\n\n    c < d\n```\ne\n```\n" * 5_000 + "`" * 20_000 + "` `` " * 5_000
    started_s = time.perf_counter()
    as_text(text)
    assert time.perf_counter() - started_s < 5.0
