"""Drafted text becomes target tokens: at seams, in the middle of words and of characters."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from localspec.drafters import cross_tokenizer as module_under_test
from localspec.drafters.cross_tokenizer import LONG_WORD, DraftText, Retokeniser
from localspec.drafters.vocabularies import (
    LONGEST_TAIL,
    SharedTokens,
    Vocabulary,
    last_seam,
    last_word,
)
from tests.kit.tiny import CPU
from tests.kit.tokenizers_at_hand import (
    COARSE,
    FINE,
    REAL,
    REAL_PAIRS,
    TEXTS,
    byte_fallback,
    decoded,
    real,
    trained,
)


def retokeniser(targets: Vocabulary, before: str = "", pending: bytes = b"") -> Retokeniser:
    return Retokeniser(targets, targets.token_bytes, before, pending)


def encoded(found: Retokeniser, *pieces: str | bytes) -> list[int]:
    for piece in pieces:
        assert found.add(piece.encode() if isinstance(piece, str) else piece, 0.5)
    return [each.token for each in found.encoded()]


def whole(found: Retokeniser) -> list[int]:
    return [each.token for each in found.whole()]


@pytest.mark.parametrize("targets", [trained(FINE), trained(COARSE), byte_fallback()])
def test_text_is_encoded_in_the_targets_own_tokens(targets: Vocabulary) -> None:
    for text in TEXTS:
        words = text.split(" ")
        for place in range(1, len(words)):
            before, after = " ".join(words[:place]), " " + " ".join(words[place:])
            found = retokeniser(targets, before)
            assert encoded(found, *after) == targets.encode(after)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_the_text_before_decides_how_the_first_word_is_cut(name: str, shared_data: Path) -> None:
    targets = real(shared_data / "tokenizers" / name)
    for text in TEXTS:
        ids, table = targets.encode(text), targets.token_bytes
        for place in range(0, len(ids), 3):
            before = b"".join(table[i] or b"" for i in ids[:place])
            known = before.decode(errors="ignore")
            pending = before[len(known.encode()) :]
            if before != known.encode() + pending:
                continue  # invalid in the middle: there is none in these texts
            found = retokeniser(targets, known, pending)
            rest = text.encode()[len(known.encode()) :]
            assert encoded(found, rest) == ids[place:]


def test_a_word_that_the_target_cut_in_two_goes_on_by_itself() -> None:
    targets = trained(COARSE)
    assert len(targets.encode(" jumps")) == 1
    found = retokeniser(targets, " ju")
    assert encoded(found, "mps", " over") == [*targets.encode("mps"), *targets.encode(" over")]


def test_a_character_that_the_target_began_is_finished() -> None:
    targets = trained(COARSE)
    tokens = targets.encode("🦖 x")
    table = targets.token_bytes
    begun = table[tokens[0]] or b""
    assert 0 < len(begun) < 4
    found = retokeniser(targets, "", begun)
    assert encoded(found, "🦖".encode()[:1]) == []
    assert encoded(found, "🦖".encode()[1:], " x") == tokens[1:]
    assert [each.end for each in found.encoded()][-1] == len("🦖 x".encode())


def test_another_character_than_the_target_began_is_none() -> None:
    found = retokeniser(trained(COARSE), "", "🦖".encode()[:2])
    assert found.add("🦖".encode()[:1], 0.5)
    assert not found.add(b"\xa0", 0.5)
    assert not retokeniser(trained(COARSE), "", "🦖".encode()[:2]).add(b" and", 0.5)


def test_half_a_character_at_the_end_is_not_encoded_yet() -> None:
    targets = trained(COARSE)
    found = retokeniser(targets)
    assert encoded(found, " fox", "🦖".encode()[:2]) == targets.encode(" fox")


def test_bytes_that_are_no_text_end_what_is_encoded() -> None:
    targets = trained(COARSE)
    assert encoded(retokeniser(targets), " fox", b"\xff", " jumps") == targets.encode(" fox")


# -- whole tokens ----------------------------------------------------------------------------


def test_a_word_said_in_pieces_is_whole_when_the_next_begins() -> None:
    targets = trained(COARSE)
    found = retokeniser(targets)
    said = ((" ju", [" ju"]), ("m", []), ("ps", []), (" over", [" jumps", " over"]))
    for piece, words in said:  # its first piece looks like a word until the second comes
        encoded(found, piece)
        assert whole(found) == [token for word in words for token in targets.encode(word)]


def test_a_word_said_at_once_is_whole() -> None:
    targets = trained(COARSE)
    found = retokeniser(targets)
    encoded(found, " jumps")
    assert whole(found) == targets.encode(" jumps")


def test_a_word_that_goes_on_is_not_whole_any_more() -> None:
    found = retokeniser(trained(COARSE))
    encoded(found, " jump", "s")
    assert whole(found) == []


def test_a_word_without_end_counts_all_but_its_last_token() -> None:
    found = retokeniser(trained(FINE))
    tokens = encoded(found, *("xq" for _ in range(LONG_WORD)))
    assert whole(found) == tokens[:-1]


def test_confidence_is_that_of_all_pieces_that_begin_in_a_token() -> None:
    targets = trained(COARSE)
    found = retokeniser(targets)
    for piece, confidence in ((" ju", 0.5), ("mps", 0.4), (" over", 0.9), (" the fox", 0.8)):
        found.add(piece.encode(), confidence)
    tokens = found.encoded()
    assert [decoded(targets, [each.token]) for each in tokens] == [
        " jumps",
        " over",
        " the",
        " fox",
    ]
    assert [each.confidence for each in tokens] == pytest.approx([0.2, 0.9, 0.8, 1.0])


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("", 0), ("word", 0), ("two words", 3), ("two  ", 3), ("f(x", 2), ("f(", 1), ("x = ", 3),
        ("end.\n", 4), ("ein Maß", 3), ("中文没", 6), ("a😀", 1),
    ],
)  # fmt: skip
def test_the_last_word_is_found(text: str, start: int) -> None:
    assert last_word(text) == start


SMALL = {"fine": trained(FINE), "coarse": trained(COARSE), "fallback": byte_fallback()}
PAIRS = [(own, targets) for own in SMALL for targets in SMALL if own != targets]
UNSPACED = "".join(chr(0x4E00 + 7 * place % 5000) for place in range(400))


class Counted(Vocabulary):
    """A vocabulary that notes how much text it encodes."""

    def __init__(self, inner: Vocabulary) -> None:
        self._inner = inner
        self.num_characters = 0
        self.longest = 0
        self.token_bytes, self.specials = inner.token_bytes, inner.specials
        self.opening = inner.opening

    def encode(self, text: str) -> list[int]:
        self.num_characters += len(text)
        self.longest = max(self.longest, len(text))
        return self._inner.encode(text)


def between(own: Vocabulary, targets: Vocabulary) -> DraftText:
    sizes = (len(own.token_bytes), len(targets.token_bytes))
    shared = SharedTokens.between(own, sizes[0], targets, sizes[1], CPU)
    return DraftText(own, targets.token_bytes, shared.specials)


def grown(text_of_draft: DraftText, ids: list[int], seed: int) -> DraftText:
    """Follows `ids` one to three at a time, as rounds of decoding bring them."""
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < len(ids):
        tokens += ids[len(tokens) : len(tokens) + rng.randint(1, 3)]
        text_of_draft.follow(tokens)
    return text_of_draft


def check_grown_is_whole(own: Vocabulary, targets: Vocabulary) -> None:
    text_of_draft = between(own, targets)
    for seed, text in enumerate((*TEXTS, " ".join(TEXTS))):
        ids = targets.encode(text)
        assert grown(text_of_draft, ids, seed).ids == [*own.opening, *own.encode(text)]


@pytest.mark.parametrize(("own", "targets"), PAIRS)
def test_growing_text_is_encoded_as_the_whole(own: str, targets: str) -> None:
    check_grown_is_whole(SMALL[own], SMALL[targets])


@pytest.mark.slow
@pytest.mark.parametrize(("own", "targets"), REAL_PAIRS)
def test_growing_text_is_encoded_as_the_whole_by_real_tokenizers(
    own: str, targets: str, shared_data: Path
) -> None:
    folder = shared_data / "tokenizers"
    check_grown_is_whole(real(folder / own), real(folder / targets))


def test_what_a_round_encodes_does_not_grow_with_the_conversation() -> None:
    targets, text = trained(COARSE), " ".join(TEXTS[:2])
    cost = []
    for repeats in (2, 40):
        own = Counted(trained(FINE))
        text_of_draft, tokens = between(own, targets), targets.encode(text * repeats)
        text_of_draft.follow(tokens)  # the prompt, whole
        own.num_characters = own.longest = 0
        for token in targets.encode(text):
            tokens.append(token)
            text_of_draft.follow(tokens)
        cost.append((own.num_characters, own.longest))
    assert cost[0] == cost[1] and cost[0][1] < 40


def test_text_without_spaces_is_cut_by_force_and_little_is_lost() -> None:
    own, targets = Counted(trained(FINE)), trained(COARSE)
    text_of_draft = grown(between(own, targets), targets.encode(UNSPACED), 1)
    assert own.longest < 4 * LONGEST_TAIL
    assert decoded(own, text_of_draft.ids) == UNSPACED
    whole = own.encode(UNSPACED)
    same = len(set(_spans(own, text_of_draft.ids)) & set(_spans(own, whole)))
    assert same / len(whole) > 0.9


def _spans(vocabulary: Vocabulary, ids: list[int]) -> list[tuple[int, int]]:
    place, found = 0, []
    for index in ids:
        size = len(vocabulary.token_bytes[index] or b"")
        found.append((place, place + size))
        place += size
    return found


def test_a_seam_that_is_none_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the end of the text so far taken for a seam."""
    monkeypatch.setattr(module_under_test, "last_seam", lambda raw, starts: len(starts) - 1)
    with pytest.raises(AssertionError):
        check_grown_is_whole(trained(COARSE), trained(FINE))


def test_a_seam_is_a_space_after_what_is_none() -> None:
    assert last_seam(b"one two three", [0, 3, 4, 7, 13]) == 3
    assert last_seam(b"one  two", [0, 3, 4, 8]) == 1
    assert last_seam("one\u00a0 two".encode(), [0, 3, 5, 9]) == 0
    assert last_seam(b"one", [0, 3]) == 0


def test_a_character_waits_for_its_last_byte() -> None:
    own, targets = trained(FINE), trained(COARSE)
    tokens = targets.encode("a 🦖")
    text_of_draft = between(own, targets)
    text_of_draft.follow(tokens[:-1])
    assert text_of_draft.ids == own.encode("a ")
    assert text_of_draft.pending and "🦖".encode().startswith(text_of_draft.pending)
    text_of_draft.follow(tokens)
    assert text_of_draft.ids == own.encode("a 🦖") and text_of_draft.pending == b""


def test_bytes_that_are_no_text_are_replaced() -> None:
    own, targets = trained(FINE), trained(COARSE)
    lone = targets.token_bytes.index(b"\xff")
    text_of_draft = between(own, targets)
    text_of_draft.follow([*targets.encode("a"), lone, *targets.encode(" b")])
    assert text_of_draft.ids == own.encode("a\ufffd b")


def test_text_that_does_not_come_back_is_kept_as_it_is() -> None:
    """SentencePiece cannot tell its own space sign from a space."""
    own, targets = byte_fallback(), trained(COARSE)
    text_of_draft = grown(between(own, targets), targets.encode("one ▁ two and three"), 2)
    assert decoded(own, text_of_draft.ids) == "one   two and three"


# -- special tokens ------------------------------------------------------------------------------


def chat(vocabulary: Vocabulary) -> list[int]:
    start, end = vocabulary.specials["<|im_start|>"], vocabulary.specials["<|im_end|>"]
    return [start, *vocabulary.encode("user\nHi there"), end, *vocabulary.encode("\n"), start]


def test_markup_that_both_have_stands_in_its_place() -> None:
    own, targets = trained(FINE), trained(COARSE)
    text_of_draft = between(own, targets)
    assert grown(text_of_draft, chat(targets), 3).ids == chat(own)
    text_of_draft.follow(chat(targets))
    assert text_of_draft.ids == chat(own)


def test_markup_that_the_draft_lacks_is_left_out() -> None:
    own, targets = byte_fallback(), trained(COARSE)
    text_of_draft = grown(between(own, targets), chat(targets), 3)
    assert text_of_draft.ids == [*own.encode("user\nHi there"), *own.encode("\n")]


def test_ids_that_stand_for_nothing_are_left_out() -> None:
    own, targets = trained(FINE), trained(COARSE)
    text_of_draft = between(own, targets)
    text_of_draft.follow([*targets.encode("one"), COARSE, 10_000, *targets.encode(" two")])
    assert text_of_draft.ids == own.encode("one two")


def test_half_a_character_before_markup_is_replaced() -> None:
    own, targets = trained(FINE), trained(COARSE)
    end = targets.specials["<|im_end|>"]
    text_of_draft = between(own, targets)
    text_of_draft.follow([*targets.encode("🦖")[:-1], end])
    assert text_of_draft.ids == [*own.encode("\ufffd"), own.specials["<|im_end|>"]]


@pytest.mark.slow
def test_a_beginning_that_both_have_stands_once(shared_data: Path) -> None:
    llama, mistral = (real(shared_data / "tokenizers" / name) for name in ("llama2", "mistral"))
    text_of_draft = between(llama, mistral)
    text_of_draft.follow([mistral.specials["<s>"], *mistral.encode("One")])
    assert text_of_draft.ids == [1, *llama.encode("One")]
    text_of_draft.follow(mistral.encode("One"))
    assert text_of_draft.ids == [1, *llama.encode("One")]


# -- other sequences ---------------------------------------------------------------------------


def test_another_sequence_is_read_from_its_beginning() -> None:
    own, targets = trained(FINE), trained(COARSE)
    text_of_draft = between(own, targets)
    for text in ("One text. ", "Another", "One text. And more", ""):
        text_of_draft.follow(targets.encode(text))
        assert text_of_draft.ids == own.encode(text)


def test_how_often_tokens_agree_is_measured_on_the_text() -> None:
    same, other = between(trained(FINE), trained(FINE)), between(trained(280), trained(COARSE))
    assert same.aligned_share == 0.5
    for text_of_draft, targets in ((same, trained(FINE)), (other, trained(COARSE))):
        text_of_draft.follow(targets.encode(" ".join(TEXTS[:3])))  # all characters in one token
    assert same.aligned_share > 0.9
    assert other.aligned_share < 0.5
