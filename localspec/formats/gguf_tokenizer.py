"""A GGUF file's vocabulary as the tokenizer.json that the model was published with.

Contract: `tokenizer_of` gives the JSON of the `tokenizers` library for the kinds "gpt2" (byte-level
BPE) and "llama" (SentencePiece BPE); the ids of any text are those of the published tokenizer. A
vocabulary that splits text in a way that is not known here is refused: it would give other ids and
the model would only answer worse, unseen.

Source: llama.cpp's llama-vocab.cpp (the regular expressions by `tokenizer.ggml.pre`) and the
published tokenizer.json files of the families; compared with those in tests and by hand. Mistral's
spaces: docs.mistral.ai, "Tokenization templates".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.gguf_file import GGUFHeader
from localspec.formats.noted_settings import NotedSettings

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # ggml's types of a token
SPACE = "\u2581"  # SentencePiece's

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(after: str, digits: str) -> str:
    """Splits words before a capital. after: what may end a word. digits: a number, or its part."""
    return (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{after}|{_BEFORE}{_UPPER}+{_LOWER}*{after}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


TEKKEN = _by_case("", r"\p{N}")
GPT4O = _by_case(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
# By `tokenizer.ggml.pre`: the expressions that split text, one after the other.
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (GPT2,),
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "refact": (r"\p{N}", GPT2),  # Granite's
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "smaug-bpe": (LLAMA3,),
    "falcon3": (LLAMA3,),
    "dbrx": (LLAMA3,),  # Phi 4's and OLMo 2's
    "glm4": (LLAMA3,),
    "chatglm-bpe": (LLAMA3,),
    "gpt-4o": (GPT4O,),  # of Phi 4 mini
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
    "tekken": (TEKKEN,),
}
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is put into Unicode's composed form (NFC) first
# A word of the vocabulary is not merged, and a text begins with a token of its own where the file
# does not say otherwise.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")

# Where this is a control token (Mistral's third vocabulary), no space is put behind such tokens:
# the chat format has one of its own there.
FIRST_ONLY = "[INST]"
KEEPING_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # of Phi 3, whose other control tokens do not
# Ends of a turn. Some converters left them as ordinary words, which a model writes all the same;
# llama.cpp takes them as control tokens too.
ENDS_OF_A_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_utterance>",
)

Maker = Callable[[GGUFHeader, Mapping[str, Any], list[str]], tuple[dict[str, Any], dict[str, Any]]]


def tokenizer_of(header: GGUFHeader) -> dict[str, Any]:
    """The tokenizer.json of a file that was read with its vocabulary. Raises ModelError."""
    own = NotedSettings(header.settings, "tokenizer.ggml.")
    kind, words = str(own.get("model")), own.get("tokens")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in makers or not isinstance(words, list):
        raise _unsuited(header, f"has a tokenizer of the kind {kind}")
    try:
        return _tokenizer(header, own, words, kind, makers[kind])
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ModelError(
            f"The vocabulary in {header.file.name} is damaged ({error!r}). Fetch the file again."
        ) from error


def _tokenizer(
    header: GGUFHeader, own: Mapping[str, Any], words: list[str], kind: str, make: Maker
) -> dict[str, Any]:
    model, rest = make(header, own, words)
    # Rows without a word of their own ("[PAD151665]") are in no published tokenizer.
    kinds = own.get("token_type") or ()
    for word, its_kind in zip(words, kinds, strict=False):
        if its_kind == UNUSED:
            model["vocab"].pop(word, None)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(own, words, strips=(header.family, kind) == ("phi3", "llama")),
        "post_processor": _beginning(own, words, kind),
        "model": model,
        **rest,
    }


def says_no_split(header: GGUFHeader) -> bool:
    """True if text is split by an expression that the file does not name, as files before May 2024
    do not. Most models split it otherwise than by the expression that is then taken."""
    settings = header.settings
    return settings.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in settings


def _byte_level(
    header: GGUFHeader, own: Mapping[str, Any], words: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    name = str(own.get("pre", "default"))
    if name not in SPLITS:
        raise _unsuited(header, f"splits text in the way {name!r}")
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in SPLITS[name]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    merges = [merge.split(" ", 1) for merge in own.get("merges") or ()]
    model = _bpe(words, merges, ignore_merges=name in WHOLE_WORDS)
    return model, {
        "normalizer": {"type": "NFC"} if name in COMPOSED else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**level, "use_regex": False}],
        },
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
    }


def _sentencepiece(
    header: GGUFHeader, own: Mapping[str, Any], words: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    kinds = own.get("token_type") or ()
    unknown = next(
        (word for word, kind in zip(words, kinds, strict=False) if kind == UNKNOWN), None
    )
    begins_with_space = bool(own.get("add_space_prefix", True))
    controls = {word for word, kind in zip(words, kinds, strict=False) if kind == CONTROL}
    begins_once = begins_with_space and FIRST_ONLY in controls
    begin = [{"type": "Prepend", "prepend": SPACE}] if begins_with_space else []
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []
    scores = own.get("scores")
    if not isinstance(scores, list) or len(scores) != len(words):
        raise _unsuited(header, "does not say which of its words are merged first")
    model = _bpe(words, merges_by_score(words, scores), byte_fallback=True, fuse_unk=True)
    decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    normalizer = {"type": "Sequence", "normalizers": [*begin, replaced]}
    first = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    return {**model, "unk_token": unknown}, {
        "normalizer": None if begins_once else normalizer,
        "pre_tokenizer": first if begins_once else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def merges_by_score(words: list[str], scores: list[float]) -> list[list[str]]:
    """The merges of a SentencePiece vocabulary: every pair of words that makes a word, the one of
    the highest score first, among equals the earlier pair."""
    places = {word: place for place, word in enumerate(words)}
    found = []
    for place, word in enumerate(words):
        pairs = [
            (places[word[:cut]], places[word[cut:]])
            for cut in range(1, len(word))
            if word[:cut] in places and word[cut:] in places
        ]
        found += [(-scores[place], place, left, right) for left, right in sorted(pairs)]
    found.sort(key=lambda each: each[0])
    return [[words[left], words[right]] for _, _, left, right in found]


def _bpe(words: list[str], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": {word: place for place, word in enumerate(words)},
        "merges": merges,
    }


def _added(own: Mapping[str, Any], words: list[str], strips: bool) -> list[dict[str, Any]]:
    """Tokens that are found in text before it is split: the control tokens, and words of the
    model's own such as "<think>", which are no control tokens. strips: whether they take the white
    space behind them, which no file says."""
    kinds = own.get("token_type") or ()
    plain = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return [
        {
            "id": place,
            "content": word,
            **plain,
            "rstrip": strips and word not in KEEPING_SPACE,
            "special": kind != USER_DEFINED,
        }
        for place, (word, kind) in enumerate(zip(words, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        or (kind != UNUSED and word in ENDS_OF_A_TURN)
        or (strips and word == "</s>")
    ]


def _beginning(own: Mapping[str, Any], words: list[str], kind: str) -> dict[str, Any] | None:
    """What puts the token that begins a text before it, where the model wants one."""
    place = own.get("bos_token_id")
    is_usual = kind == "llama" or own.get("pre") in WHOLE_WORDS
    if not own.get("add_bos_token", is_usual) or not isinstance(place, int):
        return None
    word = words[place]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": word, "type_id": 0}}, text]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {word: {"id": word, "ids": [place], "tokens": [word]}},
    }


def _unsuited(header: GGUFHeader, fault: str) -> ModelError:
    return ModelError(
        f"{header.file.name} {fault}, which is not known here: its text would be read wrongly. "
        "Fetch the model with .safetensors weights and a tokenizer.json instead."
    )
