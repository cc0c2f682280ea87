"""Vocabularies for tests: small ones trained on the spot, and the real ones beside the checkout.

Qwen's is put together from its older files and Mistral's from its SentencePiece model, so that no
test needs another library for them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from localspec.drafters.vocabularies import Vocabulary
from tools.demo_pair.tokenizer import train_tokenizer

FINE, COARSE = 320, 560  # sizes of trained vocabularies
REAL = ("gpt2", "smollm", "qwen1.5", "llama2", "mistral")
REAL_PAIRS = (  # every one of them drafts once and is drafted for once
    ("gpt2", "llama2"),
    ("llama2", "qwen1.5"),
    ("qwen1.5", "smollm"),
    ("smollm", "mistral"),
    ("mistral", "gpt2"),
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it doesn't. 'Twas the fox's 42nd jump!",
    "def area(width, height):\n    # square metres\n    return width * height\n\n\nprint(area(14))",
    "  Spaces   in    runs,\ttabs\t\tand \n\n\n   lines.   \r\n   ",
    "Grüße aus Köln: naïve cafés, 1 234,50 €; Привет, мир! Γειά σου κόσμε.",
    "中文没有空格，日本語もそうです。한국어는 띄어 씁니다。",
    "Emoji 😀😃 split over tokens: 👩‍👩‍👧‍👦, 🇩🇪, 👍🏽! ∑∞≠",
    'A reply: {"name": "Ada", "born": 1815, "tags": ["x", "y"]}\n1. First\n2. Second\n',
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECE_KINDS = {"unknown": 2, "control": 3}


@lru_cache
def trained(size: int) -> Vocabulary:
    """A byte-level BPE of our own kind; of another size it cuts text otherwise."""
    tokenizer = train_tokenizer(TEXTS * 3, size)
    assert tokenizer.get_vocab_size() == size, "the texts give fewer merges"
    return Vocabulary(json.loads(tokenizer.to_str()), f"trained-{size}")


@lru_cache
def byte_fallback() -> Vocabulary:
    """A small BPE of SentencePiece's kind: words from the texts, "▁" and bytes."""
    words = [" the", " fox", " in", "or", " jump", "er", " re", "turn", "ou", " a", " d", "  "]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = sorted({c for text in TEXTS for c in text if c.isascii() and c.isprintable()})
    pieces += [each.replace(" ", "▁") for each in characters]
    merges = list[list[str]]()
    for text in words:
        piece = text.replace(" ", "▁")
        for end in range(2, len(piece) + 1):
            if piece[:end] not in pieces:
                pieces.append(piece[:end])
                merges.append([piece[: end - 1], piece[end - 1]])
    return Vocabulary(spelled(pieces, merges, pieces[:3]), "byte-fallback")


def spelled(pieces: list[str], merges: list[list[str]], special: list[str]) -> dict[str, Any]:
    """The tokenizer.json of a SentencePiece BPE."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, space]
    return {
        "version": "1.0",
        "added_tokens": [added(pieces.index(text), text) for text in special],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": merges,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def decoded(vocabulary: Vocabulary, ids: list[int]) -> str:
    """The text of ids, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
    return b"".join(vocabulary.token_bytes[i] or b"" for i in ids).decode(errors="replace")


def added(index: int, text: str, is_special: bool = True) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, "special": is_special, **plain}


def real_state(folder: Path) -> dict[str, Any]:
    """The tokenizer.json of a real tokenizer, made where it is not published as one."""
    if (folder / "tokenizer.json").is_file():
        return dict(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    if (folder / "vocab.json").is_file():
        return _from_merges(folder)
    return _from_sentencepiece(next(folder.glob("*.model*")).read_bytes())


@lru_cache
def real(folder: Path) -> Vocabulary:
    return Vocabulary(real_state(folder), folder.name)


def _from_merges(folder: Path) -> dict[str, Any]:
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = config["added_tokens_decoder"].items()
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [split | {"invert": False}, level | {"use_regex": False}]
    return {
        "version": "1.0",
        "added_tokens": [added(int(index), entry["content"]) for index, entry in special],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }


def _from_sentencepiece(data: bytes) -> dict[str, Any]:
    found = [_piece(body) for number, body in _fields(data) if number == 1]
    ids = {text: index for index, (text, _, _) in enumerate(found)}
    scored = list[tuple[float, int, str, str]]()
    for text, score, kind in found:
        for place in range(1, len(text) if kind == 1 else 0):
            if text[:place] in ids and text[place:] in ids:
                scored.append((-score, place, text[:place], text[place:]))
    merges = [[left, right] for _, _, left, right in sorted(scored)]
    special = [text for text, _, kind in found if kind in PIECE_KINDS.values()]
    return spelled([text for text, _, _ in found], merges, special)


def _piece(body: bytes) -> tuple[str, float, int]:
    """Text, score and kind (1: normal) of one entry."""
    fields = dict(_fields(body))
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    return fields[1].decode(), score, int.from_bytes(fields.get(3, b"\x01"), "little")


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field of a protocol buffer message."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if key & 7 == 2:
            size, place = _varint(data, place)
        elif key & 7 == 0:
            _, end = _varint(data, place)
            size = end - place
        else:
            size = {1: 8, 5: 4}[key & 7]
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return value, place


def library(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer as it is published, less a padding that some are published with."""
    return Tokenizer.from_str(json.dumps(state | {"padding": None, "truncation": None}))
