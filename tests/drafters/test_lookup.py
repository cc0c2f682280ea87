"""The suffix automaton agrees with looking everywhere; the lookup follows one sequence at a time,
beside a past that never changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from time import thread_time

import pytest

from localspec.drafters import lookup as lookup_module
from localspec.drafters.lookup import (
    HANDICAP,
    MAX_COUNTED,
    NOWHERE,
    Lookup,
    Matches,
    Suffixes,
    is_own,
    length_of,
)

Context = tuple[int, ...]
SHARED = tuple(range(100, 110))  # ten tokens that stand in the past


def said(lookup: Lookup, tokens: list[int]) -> tuple[list[int], int, bool]:
    """Followers of the end, the length of its match, and whether it is the sequence's own."""
    place: Matches = lookup.follow(tokens)
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


def test_a_prediction_is_followed_where_the_sequence_has_no_match_and_left_again() -> None:
    prediction, text = (50, 51, 52, 53, 54, 55), [1, 2, 3, 51, 52]
    held = Lookup()
    held.follow(text, prediction)
    place = held.follow(text, prediction)
    assert [f[2] for f in held.followers(place)] == [53] and length_of(place) == 2
    text += [9, 53, 54]  # an edit; the rest is found again
    assert [f[2] for f in held.followers(held.follow(text, prediction))] == [55]
    assert said(held, text) == said(Lookup(), text), "gone with the turn that it was given for"
    at_its_end = held.follow([1, 2, 54, 55], prediction)
    assert held.followers(at_its_end) == [], "the sequence is another text"
    grown = Lookup()
    for token in (53, 54, 55, 1):
        text.append(token)
        found, fresh = grown.follow(text, prediction), Lookup()
        assert grown.followers(found) == fresh.followers(fresh.follow(list(text), prediction))


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


# -- the automaton


def places(texts: Sequence[Context], context: Context) -> list[tuple[int, int]]:
    """Where `context` ends: (text, place in it)."""
    size = len(context)
    return [
        (number, end)
        for number, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if text[end - size : end] == context
    ]


def counted(texts: Sequence[Context], context: Context) -> dict[int, int]:
    """How often each token followed."""
    found: dict[int, int] = {}
    for number, end in places(texts, context):
        if end < len(texts[number]):
            token = texts[number][end]
            found[token] = found.get(token, 0) + 1
    return found


def longest(texts: Sequence[Context], text: Context, occurrences: int) -> int:
    """Length of the longest end of `text` that stands in so many places."""
    sizes = range(len(text), 0, -1)
    fitting = (s for s in sizes if len(places(texts, text[len(text) - s :])) >= occurrences)
    return next(fitting, 0)


def random_text(rng: random.Random, length: int, kinds: int) -> Context:
    return tuple(rng.randrange(kinds) for _ in range(length))


@pytest.mark.parametrize("kinds", [2, 3, 6])
def test_the_end_and_what_followed_it_agree_with_looking_everywhere(kinds: int) -> None:
    rng = random.Random(f"seed 1, {kinds}")
    for _ in range(6):
        text, grown = random_text(rng, MAX_COUNTED, kinds), Suffixes()
        for end in range(1, len(text) + 1):
            grown.append(text[end - 1])
            so_far = text[:end]
            match = grown.end()
            assert match[1] == longest([so_far], so_far, 2)
            if match != NOWHERE:
                followers = grown.followers(match)
                wanted = counted([so_far], so_far[end - match[1] :])
                assert {token: count for count, _, token in followers} == wanted
                assert followers == sorted(followers, reverse=True)


def test_of_equal_counts_the_latest_comes_first() -> None:
    text = Suffixes((1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2))
    assert [token for _, _, token in text.followers(text.end())] == [9, 8, 7]
    text.extend((7, 1, 2))
    assert [token for _, _, token in text.followers(text.shorter(text.end()))] == [7, 9, 8]


def test_a_match_is_carried_on_as_far_as_it_goes() -> None:
    rng = random.Random(2)
    for _ in range(12):
        text, other = random_text(rng, 25, 3), random_text(rng, 25, 3)
        held, match = Suffixes(text), NOWHERE
        for end in range(1, len(other) + 1):
            match = held.after(match, other[end - 1])
            assert match[1] == longest([text], other[:end], 1)
            known = other[end - match[1] : end]
            assert {token: n for n, _, token in held.followers(match)} == counted([text], known)


def test_shorter_contexts_are_those_that_stand_in_more_places() -> None:
    rng = random.Random(3)
    for _ in range(12):
        text = random_text(rng, 30, 2)
        held = Suffixes(text)
        match, length = held.end(), len(text)
        while match != NOWHERE:
            number = len(places([text], text[len(text) - match[1] :]))
            assert number > len(places([text], text[len(text) - length :]))
            assert match[1] == longest([text], text, number)
            match, length = held.shorter(match), match[1]


def test_texts_that_were_parted_are_counted_together_and_matched_apart() -> None:
    rng = random.Random(4)
    for _ in range(12):
        texts = [random_text(rng, rng.randrange(1, 9), 2) for _ in range(4)]
        held = Suffixes()
        for text in texts:
            held.extend(text)
            held.part()
        assert len(held) == sum(map(len, texts))
        sought, match = random_text(rng, 25, 2), NOWHERE
        for end in range(1, len(sought) + 1):
            match = held.after(match, sought[end - 1])
            assert match[1] == longest(texts, sought[:end], 1)
            known = sought[end - match[1] : end]
            assert {token: n for n, _, token in held.followers(match)} == counted(texts, known)


def test_only_the_end_of_the_text_was_never_followed() -> None:
    text = Suffixes((1, 2, 3))
    assert not text.is_followed(text.after(NOWHERE, 3))
    assert text.is_followed(text.after(NOWHERE, 2))
    assert text.after(text.after(NOWHERE, 2), 9) == NOWHERE


@pytest.mark.slow
def test_one_token_repeated_for_ever_costs_no_more_than_its_bound() -> None:
    """A walk over all contexts at each token would take minutes for 50,000 tokens."""
    text, started = Suffixes(), thread_time()
    text.extend([4] * 50_000)
    assert thread_time() - started < 10.0  # a fraction of a second of processor time
    count, _, token = text.followers(text.end())[0]
    assert (count, token) == (1, 4) and text.end()[1] == 49_999
