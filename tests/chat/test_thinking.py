"""What a model thinks is told apart from what it says, however the text is cut."""

from __future__ import annotations

import pytest

from localspec.chat.thinking import Thoughts


def divided(text: str, size: int) -> tuple[str, str]:
    thoughts, reasoning, said = Thoughts(), "", ""
    parts = [thoughts.push(text[at : at + size]) for at in range(0, len(text), size)]
    for thought, spoken in (*parts, thoughts.flush()):
        reasoning, said = reasoning + thought, said + spoken
    return reasoning, said


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>\nhm\n</think>\n\nYes.", ("hm\n", "Yes.")),
        ("  <think>a < b </th </think>c", ("a < b </th ", "c")),
        ("No mark, <think>not</think> here.", ("", "No mark, <think>not</think> here.")),
        (" \n", ("", " \n")),
        ("<thin", ("", "<thin")),
        ("<think>cut </thi", ("cut </thi", "")),
        ("", ("", "")),
        ("<think>a</think>b\n c\n", ("a", "b\n c\n")),
    ],
)
def test_the_marks_are_found_wherever_the_text_is_cut(
    text: str, wanted: tuple[str, str], size: int
) -> None:
    reasoning, said = divided(text, size)
    assert (reasoning.strip("\n"), said) == (wanted[0].strip("\n"), wanted[1])
