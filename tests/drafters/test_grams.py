"""The pool of n-grams: what it remembers, in which order, and how much of it."""

from __future__ import annotations

import pytest

from localspec.drafters import grams
from localspec.drafters.grams import MAX_FOLLOWERS, Pool


def test_a_text_is_read_into_contexts_of_one_and_two_tokens() -> None:
    pool = Pool()
    pool.read([1, 2, 3, 1, 2, 4])
    assert list(pool.followers((2,))) == [4, 3], "most recent first"
    assert list(pool.followers((1, 2))) == [4, 3]
    assert list(pool.followers((3, 1))) == [2]
    assert list(pool.followers((4,))) == []


def test_what_is_seen_again_comes_first_and_stands_once() -> None:
    pool = Pool()
    for token in (5, 6, 7, 5):
        pool.add((1,), token)
    assert list(pool.followers((1,))) == [5, 7, 6]


def test_the_oldest_followers_and_contexts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    for token in range(MAX_FOLLOWERS + 3):
        pool.add((1,), token)
    assert len(pool.followers((1,))) == MAX_FOLLOWERS
    assert pool.followers((1,))[0] == MAX_FOLLOWERS + 2
    monkeypatch.setattr(grams, "MAX_CONTEXTS", 3)
    for context in (1, 2, 3, 1, 4):
        pool.add((context,), 9)
    assert [bool(pool.followers((context,))) for context in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]


def test_a_growing_text_is_read_once_and_another_from_where_it_differs() -> None:
    pool, text = Pool(), [1, 2]
    pool.read(text)
    pool.add((1,), 8)
    text.append(3)
    pool.read(text)
    assert list(pool.followers((1,))) == [8, 2], "1, 2 was not read again"
    pool.read([1, 2, 4])
    assert list(pool.followers((2,))) == [4, 3] and list(pool.followers((1,))) == [8, 2]


def test_of_a_long_text_the_newest_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grams, "MAX_READ", 3)
    pool = Pool()
    pool.read([1, 2, 3, 4, 5, 6])
    assert list(pool.followers((3,))) == [4] and list(pool.followers((2,))) == []
