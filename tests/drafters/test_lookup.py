"""The lookup: one sequence at a time, beside a past that never changes."""

from __future__ import annotations

import random

import pytest

from localspec.drafters import lookup as lookup_module
from localspec.drafters.lookup import HANDICAP, Lookup, Place, is_own, length_of

SHARED = tuple(range(100, 110))  # ten tokens that stand in the past


def said(lookup: Lookup, tokens: list[int]) -> tuple[list[int], int, bool]:
    """Followers of the end, the length of its match, and whether it is the sequence's own."""
    place: Place = lookup.follow(tokens)
    return [f[2] for f in lookup.followers(place)], length_of(place), is_own(place)


def test_growing_text_equals_a_fresh_index_at_every_length() -> None:
    rng, grown, tokens = random.Random(8), Lookup(), [1, 2]
    for _ in range(100):
        tokens.extend(rng.randrange(4) for _ in range(rng.randrange(1, 4)))
        assert said(grown, tokens) == said(Lookup(), list(tokens))


def test_edits_and_other_conversations_leave_no_trace() -> None:
    past = ((0, 1, 2, 3) * 6, (3, 2, 1, 0, 2) * 5)
    rng, held = random.Random(9), Lookup(past)
    text = [rng.randrange(4) for _ in range(30)]
    for _ in range(100):
        kept = rng.randrange(len(text) + 1)
        text = text[:kept] + [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        text = text[-40:] if rng.random() < 0.2 else text
        assert said(held, text) == said(Lookup(past), list(text))


def test_a_turn_that_goes_on_from_the_last_is_not_indexed_again() -> None:
    held, first = Lookup(), [1, 2, 3, 1, 2]
    held.follow(first)
    index = held._own
    held.follow([*first, 3, 9])
    assert held._own is index and len(index) == 7
    held.follow([*first, 4])
    assert held._own is not index and len(held._own) == 6


def test_the_past_speaks_where_the_sequence_has_nothing_to_say() -> None:
    lookup = Lookup([(*SHARED, 55)])
    assert said(lookup, [1, 2, *SHARED]) == ([55], len(SHARED) - HANDICAP, False)


def test_the_sequence_itself_wins_over_a_past_that_matches_as_long() -> None:
    lookup = Lookup([(*SHARED, 55)])
    assert said(lookup, [*SHARED, 66, 3, *SHARED]) == ([66], len(SHARED), True)
    short = [*SHARED[-3:], 66, 3, *SHARED]
    assert said(lookup, short) == ([55], len(SHARED) - HANDICAP, False)


@pytest.mark.parametrize("length", range(1, HANDICAP + 1))
def test_a_few_tokens_in_common_with_the_past_say_nothing(length: int) -> None:
    lookup = Lookup([(*SHARED, 55)])
    assert said(lookup, [1, 2, *SHARED[-length:]]) == ([], 0, False)


def test_no_match_runs_from_one_past_conversation_into_the_next() -> None:
    lookup = Lookup([SHARED, (55, 56)])
    assert said(lookup, [1, *SHARED]) == ([], 0, False)
    assert said(lookup, [1, *SHARED[4:], 55]) == ([], 0, False)


def test_of_a_long_past_the_newest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "MAX_PAST_TOKENS", 25)
    old, new = tuple(range(10, 30)), tuple(range(40, 60))
    lookup = Lookup([old, new])
    assert len(lookup._past) == 25
    assert said(lookup, list(new[:8]))[0] == [48]
    assert said(lookup, list(old[:8]))[0] == []
    assert len(Lookup([old[:5], old[:10], new])._past) == 25


def test_the_past_is_found_again_after_another_conversation() -> None:
    lookup = Lookup([(*SHARED, 55)])
    turn = [1, 2, *SHARED]
    first = said(lookup, turn)
    said(lookup, [7, 8, 9])
    assert said(lookup, list(turn)) == first
    assert said(lookup, [*turn, 55])[0] == []


def test_shorter_matches_come_after_longer_ones() -> None:
    lookup = Lookup()
    place = lookup.follow([2, 3, 70, 1, 2, 3, 80, 1, 2, 3])
    assert [f[2] for f in lookup.followers(place)] == [80]
    shorter = lookup.shorter(place)
    assert sorted(f[2] for f in lookup.followers(shorter)) == [70, 80]
    assert length_of(shorter) == 2
    assert length_of(lookup.shorter(shorter)) == 0
