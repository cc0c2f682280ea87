"""What a model thinks is told apart from what it says, however the text is cut."""

from __future__ import annotations

import pytest

from localspec.chat.thinking import CHANNELS, NEXT, THINK, Marks, divided


def grown(text: str, size: int, marks: Marks = THINK) -> tuple[str, str]:
    """Both parts of the whole text; each only grows on the way there."""
    thought, answer = "", ""
    for at in range(0, len(text), size):
        found = divided(text[: at + size], marks)
        assert found.thought.startswith(thought) and found.answer.startswith(answer)
        thought, answer = found.thought, found.answer
    found = divided(text, marks, has_ended=True)
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


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("after", "answer"),
    [
        ("<|channel|>final<|message|>Yes.", "Yes."),
        ("<|channel|>commentary<|message|>I look.", "I look."),
        *((call, call) for call in (
            " to=functions.f<|channel|>commentary json<|message|>{}",
            "<|channel|>commentary to=functions.f json<|message|>{}",
            "<|channel|>analysis to=functions.f json<|message|>{}",
        )),
    ],
)  # fmt: skip
def test_a_thought_in_a_channel_ends_where_an_answer_or_a_call_begins(
    after: str, answer: str, size: int
) -> None:
    text = f"<|channel|>analysis<|message|>hm{NEXT}{after}"
    assert grown(text, size, CHANNELS) == ("hm", answer)
