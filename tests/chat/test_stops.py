"""A reply ends at its first stop string, however its text is cut."""

from __future__ import annotations

import random

import pytest

from localspec.chat.stops import StopStrings
from localspec.errors import RequestError


def test_stop_strings_are_found_across_any_cut() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        stops = ["".join(rng.choices("ab\n", k=length)) for length in lengths]
        text = "".join(rng.choices("ab\n", k=rng.randrange(14)))
        finder, shown, hit, position = StopStrings(stops), "", False, 0
        while position < len(text) and not hit:
            size = rng.randint(1, 4)
            safe, hit = finder.push(text[position : position + size])
            shown, position = shown + safe, position + size
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert hit == bool(ends)
        if hit:
            first_end = min(ends)
            longest = max(len(s) for s in stops if text[:first_end].endswith(s))
            assert shown == text[: first_end - longest]
        else:
            assert shown + finder.flush() == text


def test_only_a_possible_stop_is_held_back() -> None:
    finder = StopStrings(["\nUser:"])
    assert finder.push("Hello\nUs") == ("Hello", False)
    assert finder.push("e it") == ("\nUse it", False)
    assert finder.push("\nUser: x") == ("", True)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["", "x"])


@pytest.mark.parametrize(
    ("begun", "pieces", "shown", "is_hit"),
    [
        ("a\nUs", ("er", ":x"), "", True),
        ("a\nUs", ("e it",), "e it", False),
        ("a\nUs", ("\nUser: x",), "", True),
        ("a\nUser:", ("b",), "b", False),  # it was complete, and the person went on all the same
        ("a", ("\nUs", "er"), "", False),
    ],
)
def test_a_stop_string_may_have_begun_before_the_reply_goes_on(
    begun: str, pieces: tuple[str, ...], shown: str, is_hit: bool
) -> None:
    finder = StopStrings(["\nUser:"], begun)
    found = [finder.push(piece) for piece in pieces]
    assert "".join(text for text, _ in found) == shown
    assert any(hit for _, hit in found) is is_hit


def test_what_is_shown_and_held_is_not_shown_again() -> None:
    finder = StopStrings(["STOP"], "a ST")
    assert finder.push("O") == ("", False)
    assert finder.flush() == "O"
