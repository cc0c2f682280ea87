"""Two vocabularies share the tokens that stand for the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localspec.drafters.parts import Vocabulary
from localspec.drafters.shared_tokens import SharedTokens, special_pairs
from tests.drafters.foreign_tiny import WordVocabulary, word
from tests.drafters.tokenizers_at_hand import FINE, REAL, byte_fallback, real, trained
from tests.tiny import CPU

# Measured: share of the draft's and of the target's tokens that the other has.
COVERAGE = {
    ("gpt2", "smollm"): (0.74, 0.75),
    ("smollm", "qwen1.5"): (0.80, 0.26),
    ("qwen1.5", "llama2"): (0.17, 0.82),
    ("llama2", "gpt2"): (0.57, 0.36),
    ("llama2", "mistral"): (0.75, 0.74),
    ("mistral", "qwen1.5"): (0.89, 0.19),
}


def between(own: Vocabulary, targets: Vocabulary) -> SharedTokens:
    return SharedTokens.between(
        own, len(own.token_bytes()), targets, len(targets.token_bytes()), CPU
    )


def small() -> tuple[Vocabulary, Vocabulary]:
    own = WordVocabulary({word(0): 0, word(2): 1, word(3): 2, word(1) * 2: 3}, {"<e>": 4, "<x>": 5})
    return own, WordVocabulary({word(i): i for i in range(4)}, {"<e>": 5, "<y>": 4})


def test_shared_tokens_are_those_of_the_same_bytes_and_names() -> None:
    shared = between(*small())
    assert shared.own_of == {0: 0, 2: 1, 3: 2, 5: 4}
    assert special_pairs(*_sized(small())) == {5: 4}


def _sized(pair: tuple[Vocabulary, Vocabulary]) -> tuple[Vocabulary, int, Vocabulary, int]:
    return pair[0], 6, pair[1], 6


def test_ids_beyond_a_models_rows_are_no_tokens() -> None:
    own, targets = small()
    assert SharedTokens.between(own, 2, targets, 3, CPU).own_of == {0: 0, 2: 1}
    assert special_pairs(own, 4, targets, 6) == {}


def test_a_translated_row_has_the_drafts_logits_and_nothing_else() -> None:
    shared = between(*small())
    logits = torch.tensor([1.0, 2.0, 3.0, 9.0, 4.0, 9.0])
    nothing = float("-inf")
    wanted = torch.tensor([1.0, nothing, 2.0, 3.0, nothing, 4.0])
    assert torch.equal(shared.translated(logits), wanted)


def test_mass_is_the_probability_of_what_is_shared() -> None:
    shared = between(*small())
    logits = torch.tensor([1.0, 2.0, 3.0, 0.5, 4.0, -1.0])
    for temperature in (1.0, 0.3, 1e-4):
        probs = torch.softmax((logits - 4.0) / temperature, dim=-1)
        wanted = float(probs[[0, 1, 2, 4]].sum())
        assert shared.mass(logits, temperature) == pytest.approx(wanted)


def test_nothing_shared_is_no_fault() -> None:
    shared = between(WordVocabulary({"a": 0}), WordVocabulary({"b": 0}))
    assert shared.own_of == {} and shared.mass(torch.zeros(1), 1.0) == 0.0
    assert shared.translated(torch.zeros(1)).tolist() == [float("-inf")]


def test_of_several_ids_the_one_that_is_written_counts() -> None:
    """A character has an id of its own beside its byte's."""
    fallback, own = byte_fallback(), trained(FINE)
    pieces = [i for i, piece in enumerate(fallback.token_bytes()) if piece == b"a"]
    assert len(pieces) == 2
    shared = between(own, fallback)
    (written,) = fallback.encode("a")
    assert [i for i in pieces if i in shared.own_of] == [written]
    assert between(fallback, own).own_of[own.encode("a")[0]] == written


def test_a_vocabulary_shares_all_with_itself() -> None:
    own = trained(FINE)
    assert between(own, own).own_of == {index: index for index in range(FINE)}


@pytest.mark.parametrize("pair", COVERAGE)
def test_real_pairs_share_as_much_as_was_measured(pair: tuple[str, str], shared_data: Path) -> None:
    own, targets = (real(shared_data / "tokenizers" / name) for name in pair)
    shared = between(own, targets)
    theirs, table = targets.token_bytes(), own.token_bytes()
    assert all(theirs[there] == table[here] for there, here in shared.own_of.items() if table[here])
    for part, vocabulary in zip(COVERAGE[pair], (own, targets), strict=True):
        assert len(shared.own_of) / len(vocabulary.token_bytes()) == pytest.approx(part, abs=0.01)


@pytest.mark.parametrize("name", REAL)
def test_every_byte_is_shared_with_a_real_vocabulary(name: str, shared_data: Path) -> None:
    """So a draft can say anything; only rarely in as few tokens."""
    vocabulary = real(shared_data / "tokenizers" / name)
    shared = between(trained(FINE), vocabulary)
    pieces = {vocabulary.token_bytes()[index] for index in shared.own_of}
    assert {bytes([byte]) for byte in range(0x20, 0x7F)} <= pieces
