"""Vocabularies keep every byte, or are refused in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from localspec.core.errors import ModelError
from localspec.drafters.vocabularies import (
    SAMPLES,
    SharedTokens,
    Vocabulary,
    foreign,
    load_vocabulary,
    require_ids_within,
    starts_of,
)
from tests.kit.foreign_tiny import WordVocabulary, word
from tests.kit.tiny import CPU, tiny_llama, with_cache
from tests.kit.tokenizers_at_hand import (
    COARSE,
    FINE,
    REAL,
    TEXTS,
    added,
    byte_fallback,
    decoded,
    library,
    real,
    real_state,
    trained,
)
from tools.demo_pair.tokenizer import save_tokenizer, train_tokenizer

ODD_TEXTS = (*TEXTS, *SAMPLES, "", " ", "\n", "a", " \n ", "e\u0301 is not \u00e9", "\u00a0 x")


def check_bytes(vocabulary: Vocabulary) -> None:
    table = vocabulary.token_bytes
    for text in ODD_TEXTS:
        ids = vocabulary.encode(text)
        assert b"".join(table[i] or b"" for i in ids) == text.encode()
        assert decoded(vocabulary, ids) == text
        starts = starts_of(ids, table)
        assert starts is not None and starts[-1] == len(text.encode())


@pytest.mark.parametrize("vocabulary", [trained(FINE), trained(COARSE), byte_fallback()])
def test_text_comes_back_byte_for_byte(vocabulary: Vocabulary) -> None:
    check_bytes(vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_text_comes_back_byte_for_byte_from_real_tokenizers(name: str, shared_data: Path) -> None:
    check_bytes(real(shared_data / "tokenizers" / name))


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_cut_text_as_published(name: str, shared_data: Path) -> None:
    """Inside a text: what the published one does to the beginning is left out."""
    folder = shared_data / "tokenizers" / name
    published, vocabulary = library(real_state(folder)), real(folder)
    for text in TEXTS:
        whole = published.encode(f"x {text}", add_special_tokens=False).ids
        assert vocabulary.encode(f" x {text}")[-10:] == list(whole)[-10:]


def test_the_bytes_of_an_emoji_split_over_tokens_are_known() -> None:
    vocabulary = trained(FINE)
    ids = vocabulary.encode("🦖")  # in none of the texts it was trained on
    table = vocabulary.token_bytes
    assert [table[i] for i in ids] == [b"\xf0\x9f", b"\xa6", b"\x96"]
    assert decoded(vocabulary, ids[:2]) == "\ufffd"
    fallback = byte_fallback()
    assert [fallback.token_bytes[i] for i in fallback.encode("é")] == [b"\xc3", b"\xa9"]


def test_what_looks_like_a_special_token_stays_text() -> None:
    for vocabulary, text in ((trained(FINE), "<|im_start|>"), (byte_fallback(), "</s>")):
        special = vocabulary.specials[text]
        assert special not in vocabulary.encode(f"a {text} b")
        assert vocabulary.token_bytes[special] is None
        assert decoded(vocabulary, [special]) == ""


@pytest.mark.slow
def test_what_a_model_expects_before_any_text_is_known(shared_data: Path) -> None:
    assert real(shared_data / "tokenizers" / "llama2").opening == [1]
    assert real(shared_data / "tokenizers" / "gpt2").opening == []
    assert trained(FINE).opening == []


def test_a_text_token_that_was_added_has_its_bytes() -> None:
    state = json.loads(library(_byte_level().state).to_str())
    state["added_tokens"].append(added(len(state["model"]["vocab"]), "<think>", is_special=False))
    vocabulary = Vocabulary(state, "thinking")
    (index,) = vocabulary.encode("<think>")
    assert vocabulary.token_bytes[index] == b"<think>"


def test_a_leading_space_that_the_tokenizer_adds_is_switched_off() -> None:
    for step in (
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    ):
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
        model = {"type": "BPE", "vocab": {p: i for i, p in enumerate(pieces)}}
        model |= {"merges": [["▁", "a"]], "unk_token": "<unk>", "byte_fallback": True}
        state = _state_of(model | {"fuse_unk": True}, pre_tokenizer=step)
        vocabulary = Vocabulary(state, "metaspace")
        assert vocabulary.encode("a a") == [pieces.index("a"), pieces.index("▁a")]


# -- refused -----------------------------------------------------------------------------------


class _Made:
    """A byte-level BPE whose steps a test may replace."""

    def __init__(self) -> None:
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
        core.train_from_iterator(TEXTS, trainer)
        self.state: dict[str, Any] = json.loads(core.to_str())


def _byte_level() -> _Made:
    return _Made()


def _state_of(model: dict[str, Any], **steps: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], **empty, "model": model, **steps}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (normalizers.Lowercase(), "reads .*H.* gives back .*h"),
        (normalizers.StripAccents(), "gives back"),
        (normalizers.NFKC(), "gives back"),
        (normalizers.Strip(), "gives back"),
        (normalizers.Replace("  ", " "), "gives back"),
    ],
)
def test_a_tokenizer_that_changes_text_is_refused(step: Any, words: str) -> None:
    made = _byte_level().state
    made["normalizer"] = json.loads(step.__getstate__())
    with pytest.raises(ModelError, match=rf"changer does not keep text byte for byte.*{words}"):
        Vocabulary(made, "changer")


def test_composing_characters_is_switched_off_not_refused() -> None:
    made = _byte_level().state
    made["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    check_bytes(Vocabulary(made, "composing"))


def test_an_added_token_that_eats_spaces_is_refused() -> None:
    made = _byte_level().state
    eater = added(len(made["model"]["vocab"]), "<think>", is_special=False)
    made["added_tokens"].append(eater | {"lstrip": True})
    with pytest.raises(ModelError, match="greedy does not keep text"):
        Vocabulary(made, "greedy")


def test_a_tokenizer_without_a_byte_is_refused() -> None:
    made = _byte_level().state
    vocabulary = made["model"]["vocab"]
    del vocabulary["Ã"]  # the byte 0xC3, with which é begins
    made["model"]["merges"] = [pair for pair in made["model"]["merges"] if "Ã" not in "".join(pair)]
    made["model"]["vocab"] = {t: i for i, t in enumerate(t for t in vocabulary if "Ã" not in t)}
    with pytest.raises(ModelError, match="no token for the byte 0xC3"):
        Vocabulary(made, "gap")


def test_a_tokenizer_that_is_not_made_of_bytes_is_refused() -> None:
    model = {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    extra = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    with pytest.raises(ModelError, match="words is not made of bytes"):
        Vocabulary(_state_of(model | extra), "words")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no tokenizer.json"),
        ("{", "cannot be read"),
        ("[]", "not laid out as a tokenizer"),
        ('{"model": {"type": "BPE"}}', "cannot be read"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_a_plain_error(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=words):
        load_vocabulary(tmp_path)


def test_a_draft_with_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    for name, size in (("target", 500), ("draft", 400)):
        save_tokenizer(train_tokenizer(TEXTS, size), tmp_path / name, 128)
    fitting = with_cache(tiny_llama(vocab_size=400))
    found = foreign(tmp_path / "target", tmp_path / "draft", fitting)
    assert found.model is fitting
    assert (len(found.own.token_bytes), len(found.targets.token_bytes)) == (400, 500)
    small = with_cache(tiny_llama(vocab_size=399))
    with pytest.raises(ModelError, match="draft has tokens up to id 399, but the model knows 399"):
        foreign(tmp_path / "target", tmp_path / "draft", small)
    require_ids_within(found.own, 400, "draft")


@pytest.mark.slow
def test_a_special_token_without_a_row_is_no_fault(shared_data: Path) -> None:
    """A padding token is often added after the last row; here SmolLM's is taken to be one."""
    vocabulary = real(shared_data / "tokenizers" / "smollm")
    assert vocabulary.specials["[PAD]"] == 49152
    require_ids_within(vocabulary, 49152, "smollm")
    shared = SharedTokens.between(vocabulary, 49152, vocabulary, 49152, CPU)
    assert 49152 not in shared.specials


@pytest.mark.slow
def test_older_tokenizer_files_are_read_too(shared_data: Path, tmp_path: Path) -> None:
    """SmolLM is published both ways."""
    source = shared_data / "tokenizers" / "smollm"
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(source / name, tmp_path / name)
    older, newer = load_vocabulary(tmp_path), real(source)
    check_bytes(older)
    assert older.token_bytes == newer.token_bytes and older.specials == newer.specials


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
    return SharedTokens.between(own, len(own.token_bytes), targets, len(targets.token_bytes), CPU)


def small() -> tuple[Vocabulary, Vocabulary]:
    own = WordVocabulary({word(0): 0, word(2): 1, word(3): 2, word(1) * 2: 3}, {"<e>": 4, "<x>": 5})
    return own, WordVocabulary({word(i): i for i in range(4)}, {"<e>": 5, "<y>": 4})


def test_shared_tokens_are_those_of_the_same_bytes_and_names() -> None:
    shared = between(*small())
    assert shared.own_of == {0: 0, 2: 1, 3: 2, 5: 4}
    assert shared.specials == {5: 4}


def test_ids_beyond_a_models_rows_are_no_tokens() -> None:
    own, targets = small()
    assert SharedTokens.between(own, 2, targets, 3, CPU).own_of == {0: 0, 2: 1}
    assert SharedTokens.between(own, 4, targets, 6, CPU).specials == {}


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
    pieces = [i for i, piece in enumerate(fallback.token_bytes) if piece == b"a"]
    assert len(pieces) == 2
    shared = between(own, fallback)
    (written,) = fallback.encode("a")
    assert [i for i in pieces if i in shared.own_of] == [written]
    assert between(fallback, own).own_of[own.encode("a")[0]] == written


def test_a_vocabulary_shares_all_with_itself() -> None:
    own = trained(FINE)
    assert between(own, own).own_of == {index: index for index in range(FINE)}


@pytest.mark.slow
@pytest.mark.parametrize("pair", COVERAGE)
def test_real_pairs_share_as_much_as_was_measured(pair: tuple[str, str], shared_data: Path) -> None:
    own, targets = (real(shared_data / "tokenizers" / name) for name in pair)
    shared = between(own, targets)
    theirs, table = targets.token_bytes, own.token_bytes
    assert all(theirs[there] == table[here] for there, here in shared.own_of.items() if table[here])
    for part, vocabulary in zip(COVERAGE[pair], (own, targets), strict=True):
        assert len(shared.own_of) / len(vocabulary.token_bytes) == pytest.approx(part, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_every_byte_is_shared_with_a_real_vocabulary(name: str, shared_data: Path) -> None:
    """So a draft can say anything; only rarely in as few tokens."""
    vocabulary = real(shared_data / "tokenizers" / name)
    shared = between(trained(FINE), vocabulary)
    pieces = {vocabulary.token_bytes[index] for index in shared.own_of}
    assert {bytes([byte]) for byte in range(0x20, 0x7F)} <= pieces
