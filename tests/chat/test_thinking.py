"""What a model thinks is told apart from what it says, however the text is cut."""

from __future__ import annotations

import pytest

from localspec.chat.thinking import THINK, divided


def grown(text: str, size: int) -> tuple[str, str]:
    """Both parts of the whole text; each only grows on the way there."""
    thought, answer = "", ""
    for at in range(0, len(text), size):
        found = divided(text[: at + size], THINK)
        assert found.thought.startswith(thought) and found.answer.startswith(answer)
        thought, answer = found.thought, found.answer
    found = divided(text, THINK, has_ended=True)
    assert found.thought.startswith(thought) and found.answer.startswith(answer)
    return found.thought, found.answer


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
    reasoning, said = grown(text, size)
    assert (reasoning.strip("\n"), said) == (wanted[0].strip("\n"), wanted[1])
