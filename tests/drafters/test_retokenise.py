"""Drafted text becomes target tokens: at seams, in the middle of words and of characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.drafters.retokenise import LONG_WORD, Retelling, last_word
from localspec.drafters.vocabularies import TokenizerVocabulary
from tests.drafters.tokenizers_at_hand import (
    COARSE,
    FINE,
    REAL,
    TEXTS,
    byte_fallback,
    real,
    trained,
)


def retelling(targets: TokenizerVocabulary, before: str = "", pending: bytes = b"") -> Retelling:
    return Retelling(targets, targets.token_bytes(), before, pending)


def tell(found: Retelling, *pieces: str | bytes) -> list[int]:
    for piece in pieces:
        assert found.add(piece.encode() if isinstance(piece, str) else piece, 0.5)
    return [each.token for each in found.told()]


def whole(found: Retelling) -> list[int]:
    return [each.token for each in found.whole()]


@pytest.mark.parametrize("targets", [trained(FINE), trained(COARSE), byte_fallback()])
def test_text_is_told_in_the_targets_own_tokens(targets: TokenizerVocabulary) -> None:
    for text in TEXTS:
        words = text.split(" ")
        for place in range(1, len(words)):
            before, after = " ".join(words[:place]), " " + " ".join(words[place:])
            found = retelling(targets, before)
            assert tell(found, *after) == targets.encode(after)


@pytest.mark.parametrize("name", REAL)
def test_the_text_before_decides_how_the_first_word_is_cut(name: str, shared_data: Path) -> None:
    targets = real(shared_data / "tokenizers" / name)
    for text in TEXTS:
        ids, table = targets.encode(text), targets.token_bytes()
        for place in range(0, len(ids), 3):
            before = b"".join(table[i] or b"" for i in ids[:place])
            known = before.decode(errors="ignore")
            pending = before[len(known.encode()) :]
            if before != known.encode() + pending:
                continue  # invalid in the middle: there is none in these texts
            found = retelling(targets, known, pending)
            rest = text.encode()[len(known.encode()) :]
            assert tell(found, rest) == ids[place:]


def test_a_word_that_the_target_cut_in_two_goes_on_by_itself() -> None:
    targets = trained(COARSE)
    assert len(targets.encode(" jumps")) == 1
    found = retelling(targets, " ju")
    assert tell(found, "mps", " over") == [*targets.encode("mps"), *targets.encode(" over")]


def test_a_character_that_the_target_began_is_finished() -> None:
    targets = trained(COARSE)
    tokens = targets.encode("🦖 x")
    table = targets.token_bytes()
    begun = table[tokens[0]] or b""
    assert 0 < len(begun) < 4
    found = retelling(targets, "", begun)
    assert tell(found, "🦖".encode()[:1]) == []
    assert tell(found, "🦖".encode()[1:], " x") == tokens[1:]
    assert [each.end for each in found.told()][-1] == len("🦖 x".encode())


def test_another_character_than_the_target_began_is_none() -> None:
    found = retelling(trained(COARSE), "", "🦖".encode()[:2])
    assert found.add("🦖".encode()[:1], 0.5)
    assert not found.add(b"\xa0", 0.5)
    assert not retelling(trained(COARSE), "", "🦖".encode()[:2]).add(b" and", 0.5)


def test_half_a_character_at_the_end_is_not_told_yet() -> None:
    targets = trained(COARSE)
    found = retelling(targets)
    assert tell(found, " fox", "🦖".encode()[:2]) == targets.encode(" fox")


def test_bytes_that_are_no_text_end_what_is_told() -> None:
    targets = trained(COARSE)
    assert tell(retelling(targets), " fox", b"\xff", " jumps") == targets.encode(" fox")


# -- whole tokens ----------------------------------------------------------------------------


def test_a_word_said_in_pieces_is_whole_when_the_next_begins() -> None:
    targets = trained(COARSE)
    found = retelling(targets)
    said = ((" ju", [" ju"]), ("m", []), ("ps", []), (" over", [" jumps", " over"]))
    for piece, words in said:  # its first piece looks like a word until the second comes
        tell(found, piece)
        assert whole(found) == [token for word in words for token in targets.encode(word)]


def test_a_word_said_at_once_is_whole() -> None:
    targets = trained(COARSE)
    found = retelling(targets)
    tell(found, " jumps")
    assert whole(found) == targets.encode(" jumps")


def test_a_word_that_goes_on_is_not_whole_any_more() -> None:
    found = retelling(trained(COARSE))
    tell(found, " jump", "s")
    assert whole(found) == []


def test_a_word_without_end_counts_all_but_its_last_token() -> None:
    found = retelling(trained(FINE))
    told = tell(found, *("xq" for _ in range(LONG_WORD)))
    assert whole(found) == told[:-1]


def test_confidence_is_that_of_all_pieces_that_begin_in_a_token() -> None:
    targets = trained(COARSE)
    found = retelling(targets)
    for piece, confidence in ((" ju", 0.5), ("mps", 0.4), (" over", 0.9), (" the fox", 0.8)):
        found.add(piece.encode(), confidence)
    told = found.told()
    assert [targets.decode([each.token]) for each in told] == [" jumps", " over", " the", " fox"]
    assert [each.confidence for each in told] == pytest.approx([0.2, 0.9, 0.8, 1.0])


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("", 0), ("word", 0), ("two words", 3), ("two  ", 3), ("f(x", 2), ("f(", 1), ("x = ", 3),
        ("end.\n", 4), ("ein Maß", 3), ("中文没", 6), ("a😀", 1),
    ],
)  # fmt: skip
def test_the_last_word_is_found(text: str, start: int) -> None:
    assert last_word(text) == start
