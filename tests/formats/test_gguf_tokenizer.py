"""A tokenizer read from a GGUF file gives the ids of the tokenizer that was written into it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from localspec.core.errors import ModelError
from localspec.formats.gguf_file import GGUFHeader
from localspec.formats.gguf_tokenizer import GPT2, LLAMA3, QWEN2, tokenizer_of

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TRAINED_ON = [
    "Speculative decoding lets a small draft model guess a few tokens ahead.",
    "def speedup(alpha: float) -> float:\n    return 1 / (1 - alpha)  # 3.14159\n",
    "I'm sure you'll see: WE'RE 12345 strong, naïve café, 日本語 😀👍🏽\n\n\t\ttabs",
]
TEXTS = [
    *TRAINED_ON,
    "",
    " leading and trailing ",
    "a  b   c\n\n\nd\r\n",
    "2024-01-01 and 987654321",
    "<s>hi</s> there<|im_end|>\n<think> x </think>",
    "e\u0301 composed, \u00a0 no-break, \x00 nothing",
    "👨‍👩‍👧 and ﬁ ligature",
]


def byte_level(*expressions: str, is_composed: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE())
    splits: list[Any] = [pre_tokenizers.Split(_regex(each), "isolated") for each in expressions]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    if is_composed:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TRAINED_ON,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=SPECIAL,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    made.add_tokens(["<think>", "</think>"])
    return made


def _regex(text: str) -> Any:
    from tokenizers import Regex

    return Regex(text)


def sentencepiece() -> Tokenizer:
    space = "\u2581"
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replaced = normalizers.Replace(" ", space)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(space), replaced])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    hexadecimal = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        TRAINED_ON[:2],
        trainers.BpeTrainer(
            vocab_size=450, special_tokens=[*SPECIAL, *hexadecimal], show_progress=False
        ),
    )
    state = json.loads(made.to_str())  # bytes are words, but no control tokens
    state["added_tokens"] = [each for each in state["added_tokens"] if each["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(state))


def header_of(tokenizer: Tokenizer, **settings: Any) -> GGUFHeader:
    """As a converter writes the tokenizer, with rows of an embedding that have no word."""
    state = json.loads(tokenizer.to_str())
    added = {each["id"]: each["special"] for each in state["added_tokens"]}
    size = tokenizer.get_vocab_size()
    words = [tokenizer.id_to_token(place) for place in range(size)]
    kinds = [{True: 3, False: 4}[added[i]] if i in added else 1 for i in range(size)]
    own = {"tokens": [*words, "[PAD9]"], "token_type": [*kinds, 5], **settings}
    if own["model"] == "gpt2":
        merges = state["model"]["merges"]
        own["merges"] = [" ".join(each) for each in merges]
    else:
        ranks = {
            "".join(pair): rank
            for rank, pair in reversed(list(enumerate(state["model"]["merges"])))
        }
        own["scores"] = [-float(ranks.get(word, 0)) for word in own["tokens"]]
    return GGUFHeader(Path("tiny.gguf"), {f"tokenizer.ggml.{k}": v for k, v in own.items()}, ())


def read(header: GGUFHeader) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_of(header)))


@pytest.mark.parametrize(
    ("written", "settings"),
    [
        (byte_level(GPT2), {"model": "gpt2", "pre": "gpt-2"}),
        (byte_level(r"\p{N}", GPT2), {"model": "gpt2", "pre": "smollm"}),
        (byte_level(QWEN2, is_composed=True), {"model": "gpt2", "pre": "qwen2"}),
        (sentencepiece(), {"model": "llama"}),
    ],
    ids=["gpt-2", "smollm", "qwen2", "llama"],
)
def test_ids_and_text_are_those_of_the_written_tokenizer(
    written: Tokenizer, settings: dict[str, Any]
) -> None:
    found = read(header_of(written, **settings))
    for text in TEXTS:
        wanted = written.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == wanted, text
        for skipped in (True, False):
            given = written.decode(wanted, skip_special_tokens=skipped)
            assert found.decode(wanted, skip_special_tokens=skipped) == given, text
    assert found.get_vocab() == written.get_vocab()


def test_a_word_of_llama_3_is_taken_whole_even_where_merges_do_not_lead_to_it() -> None:
    written = byte_level(LLAMA3)
    state = json.loads(written.to_str())
    state["model"]["ignore_merges"] = True
    state["model"]["merges"] = []
    whole = Tokenizer.from_str(json.dumps(state))
    found = read(header_of(whole, model="gpt2", pre="llama-bpe"))
    word = max((each for each in whole.get_vocab() if each.isalpha() and each.isascii()), key=len)
    assert found.encode(word).ids == [whole.token_to_id(word)]


def test_mistral_s_control_tokens_are_followed_by_the_one_space_of_the_chat_format() -> None:
    """As mistral-common writes it: <s>[INST]▁Hello[/INST]."""
    header = header_of(sentencepiece(), model="llama")
    words = header.settings["tokenizer.ggml.tokens"]
    places = [words.index("<|im_end|>"), words.index("</s>")]
    for place, word in zip(places, ("[INST]", "[/INST]"), strict=True):
        words[place] = word
    found = read(header)
    tokens = found.encode("<s>[INST] let[/INST] let").tokens
    assert "".join(tokens) == "<s>[INST]▁let[/INST]▁let"
    assert "".join(found.encode("let us").tokens) == "▁let▁us"


def test_end_of_a_turn_is_a_control_token_whatever_type_the_file_gives_it() -> None:
    header = header_of(byte_level(QWEN2), model="gpt2", pre="qwen2")
    place = header.settings["tokenizer.ggml.tokens"].index("<|im_end|>")
    header.settings["tokenizer.ggml.token_type"][place] = 1  # an ordinary word
    found = read(header)
    assert found.encode("a<|im_end|>").ids[-1] == place
    assert found.decode([place]) == ""


def test_a_token_that_begins_a_text_is_added_where_the_file_says_so() -> None:
    header = header_of(sentencepiece(), model="llama", bos_token_id=1)
    assert read(header).encode("hello").ids[0] == 1
    header = header_of(sentencepiece(), model="llama", bos_token_id=1, add_bos_token=False)
    assert read(header).encode("hello").ids[0] != 1


@pytest.mark.parametrize(
    ("split", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)]
)
def test_a_file_that_does_not_say_how_a_text_begins_means_what_llama_cpp_takes(
    split: str, begins: bool
) -> None:
    header = header_of(byte_level(LLAMA3), model="gpt2", pre=split, bos_token_id=1)
    assert (read(header).encode("hello").ids[0] == 1) is begins


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"model": "gpt2", "pre": "viking"}, "splits text in the way 'viking'"),
        ({"model": "bert"}, "has a tokenizer of the kind bert"),
        ({"model": "llama", "scores": None}, "does not say which of its words are merged first"),
    ],
)
def test_what_would_give_other_ids_is_refused(settings: dict[str, Any], fault: str) -> None:
    words = {"tokens": ["<unk>", "a"], "token_type": [2, 1], **settings}
    header = GGUFHeader(Path("tiny.gguf"), {f"tokenizer.ggml.{k}": v for k, v in words.items()}, ())
    with pytest.raises(ModelError, match=fault):
        tokenizer_of(header)
