"""A tokenizer of strangers that fails, hangs or multiplies a text becomes a sentence."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from localspec.core.errors import ModelError, RequestError
from localspec.formats import encoding
from localspec.formats.encoding import check_growth, encoded
from tests.kit.waiting import until

LONG = "a" * 80 + "b"  # longer than a text that is encoded at once


def tokenizer(**parts: Any) -> Tokenizer:
    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "?": 2}, merges=[], unk_token="?"))
    for name, part in parts.items():
        setattr(core, name, part)
    return core


def test_expression_that_backtracks_for_ever_is_a_sentence() -> None:
    hostile = tokenizer(pre_tokenizer=pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated"))
    with pytest.raises(RequestError, match=r"fails at this text \(.*retry-limit.*differently"):
        encoded(hostile, LONG)
    assert encoded(hostile, "ab").ids == [0, 1]


class Stuck:
    """An encoder that stands still at long texts until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        if len(texts[0]) > encoding.SHORT:
            self.go_on.wait(30.0)
        return [SimpleNamespace(ids=[0] * len(texts[0]))]


def test_text_that_takes_too_long_is_given_up_and_no_other_is_begun_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "LIMIT_S", 0.1)
    stuck: Any = Stuck()
    with pytest.raises(RequestError, match="takes more than 0 seconds for 81 characters"):
        encoded(stuck, LONG)
    with pytest.raises(RequestError, match="still works on an earlier text"):
        encoded(tokenizer(), LONG)
    assert len(encoded(stuck, "short").ids) == 5
    stuck.go_on.set()
    monkeypatch.setattr(encoding, "LIMIT_S", 30.0)
    until(lambda: not any(thread.name == "encode" for thread in threading.enumerate()))
    assert len(encoded(stuck, LONG).ids) == 81


def test_tokens_out_of_proportion_are_refused() -> None:
    swollen: Any = SimpleNamespace(
        encode_batch=lambda texts, add_special_tokens: [SimpleNamespace(ids=[0] * 10_000)]
    )
    with pytest.raises(RequestError, match="makes 10,000 tokens of 1 characters"):
        encoded(swollen, "a")


DOUBLED = [normalizers.Replace("a", "aa")] * 10
SENTENCEPIECE = normalizers.Sequence(
    [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"normalizer": normalizers.Sequence(DOUBLED)}, "makes a text up to 1,024 times as long"),
        (
            {"normalizer": normalizers.Sequence([normalizers.Sequence(DOUBLED), SENTENCEPIECE])},
            "makes a text up to 1,024 times as long",
        ),
        ({"normalizer": normalizers.Replace(Regex("x*"), "a" * 99)}, "100 times as long"),
        ({"decoder": decoders.Replace("a", "b" * 99)}, "99 times as long"),
        ({"decoder": decoders.Replace(Regex("(a|aa)+$"), "b")}, "decodes by regular expressions"),
    ],
    ids=["doubled", "nested", "expression", "decoder", "decoder's expression"],
)
def test_parts_that_multiply_a_text_are_refused_at_load(parts: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        check_growth(tokenizer(**parts))


def test_parts_of_published_tokenizers_are_taken() -> None:
    spaces = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    several = normalizers.Replace(Regex(" {2,}"), "\u2581")
    check_growth(tokenizer(normalizer=SENTENCEPIECE, decoder=spaces))
    check_growth(tokenizer(normalizer=normalizers.Sequence([several, normalizers.NFKC()])))
    check_growth(tokenizer(pre_tokenizer=pre_tokenizers.ByteLevel()))
