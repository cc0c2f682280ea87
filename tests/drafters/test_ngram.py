"""Lookup: which match is copied, how the index grows, and what it costs."""

from __future__ import annotations

import random
from time import perf_counter
from typing import Any

import pytest

from localspec.core import DraftPlan, SamplingParams, Sequence
from localspec.drafters.ngram import MAX_MATCH, MIN_MATCH, NgramDrafter, match_class

RNG: Any = None


def sequence_of(*tokens: int) -> Sequence:
    return Sequence(tokens, SamplingParams(), 1000, frozenset(), RNG)


def proposed(drafter: NgramDrafter, sequence: Sequence, count: int = 4) -> tuple[int, ...]:
    return drafter.propose(sequence, DraftPlan("ngram", count)).tokens


def naive(tokens: list[int], count: int) -> tuple[tuple[int, ...], str | None]:
    """The longest match, among equals the most recent, by looking everywhere."""
    best, length = -1, 0
    for position in range(1, len(tokens)):
        agree = 0
        while (
            agree < min(position, MAX_MATCH)
            and tokens[position - 1 - agree] == tokens[len(tokens) - 1 - agree]
        ):
            agree += 1
        if agree >= MIN_MATCH and agree >= length:
            best, length = position, agree
    if best < 0:
        return (), None
    text = list(tokens)
    for _ in range(count):
        text.append(text[best + len(text) - len(tokens)])
    return tuple(text[len(tokens) :]), match_class(length)


def test_the_longest_match_wins_and_among_equals_the_latest() -> None:
    long_first = sequence_of(7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2)
    assert proposed(NgramDrafter(), long_first, 1) == (50,)
    equals = sequence_of(7, 1, 2, 50, 8, 1, 2, 60, 9, 1, 2)
    assert proposed(NgramDrafter(), equals, 1) == (60,)


def test_random_texts_agree_with_looking_everywhere() -> None:
    rng = random.Random(7)
    for _ in range(150):
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        tokens, signal = naive(text, 5)
        drafter, sequence = NgramDrafter(), sequence_of(*text)
        assert proposed(drafter, sequence, 5) == tokens
        assert drafter.signal(sequence) == signal


def test_growing_text_equals_a_fresh_index_at_every_length() -> None:
    rng, drafter, sequence = random.Random(8), NgramDrafter(), sequence_of(1, 2)
    for _ in range(150):
        sequence.append([rng.randrange(4) for _ in range(rng.randrange(1, 4))])
        fresh = sequence_of(*sequence.tokens)
        assert proposed(drafter, sequence) == proposed(NgramDrafter(), fresh)
        assert drafter.signal(sequence) == NgramDrafter().signal(fresh)


def test_edits_and_other_conversations_leave_no_trace() -> None:
    rng, drafter = random.Random(9), NgramDrafter()
    text = [rng.randrange(4) for _ in range(30)]
    for _ in range(100):
        kept = rng.randrange(len(text) + 1)
        text = text[:kept] + [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
        text = text[-40:] if rng.random() < 0.2 else text
        sequence = sequence_of(*text)
        assert proposed(drafter, sequence) == proposed(NgramDrafter(), sequence_of(*text))


def test_another_text_of_the_same_length_is_not_mistaken_for_the_last() -> None:
    drafter = NgramDrafter()
    assert proposed(drafter, sequence_of(1, 2, 3, 1, 2), 1) == (3,)
    assert proposed(drafter, sequence_of(1, 2, 4, 1, 2), 1) == (4,)
    assert drafter.signal(sequence_of(1, 2, 4, 5, 6)) is None


@pytest.mark.parametrize("tokens", [(1,), (1, 2), (1, 2, 3, 4)])
def test_without_a_match_there_is_nothing_to_say(tokens: tuple[int, ...]) -> None:
    drafter, sequence = NgramDrafter(), sequence_of(*tokens)
    assert drafter.signal(sequence) is None
    assert proposed(drafter, sequence) == drafter.foresee(sequence) == ()


def test_a_copy_that_reaches_the_end_repeats_itself() -> None:
    assert proposed(NgramDrafter(), sequence_of(1, 2, 3, 1, 2, 3), 7) == (1, 2, 3, 1, 2, 3, 1)
    assert proposed(NgramDrafter(), sequence_of(5, 5, 5), 3) == (5, 5, 5)


def test_it_foresees_what_it_would_propose() -> None:
    drafter, sequence = NgramDrafter(), sequence_of(1, 2, 3, 9, 1, 2)
    assert drafter.foresee(sequence)[:4] == proposed(drafter, sequence)


@pytest.mark.parametrize(
    ("length", "name"), [(2, "2"), (3, "3-4"), (4, "3-4"), (8, "5-8"), (16, "9-16"), (24, "17+")]
)
def test_match_classes(length: int, name: str) -> None:
    assert match_class(length) == name


def test_one_pair_repeated_for_ever_costs_no_more_than_its_bound() -> None:
    """20000 equal tokens: 200 rounds in far less than a search of the whole text would take."""
    drafter, sequence = NgramDrafter(), sequence_of(*[4] * 20_000)
    drafter.signal(sequence)
    started = perf_counter()
    for _ in range(200):
        assert proposed(drafter, sequence, 2) == (4, 4)
        sequence.append([4])
    assert perf_counter() - started < 4.0
