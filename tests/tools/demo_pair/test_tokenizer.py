"""Text survives the tokenizer, and typed markup stays text."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools.demo_pair.tokenizer import (
    END_OF_TEXT_ID,
    SPECIAL_TOKENS,
    TURN_END_ID,
    TURN_START_ID,
    encode_chat,
    encode_prompt,
    encode_text,
    load_tokenizer,
    save_tokenizer,
)

CHAT = [{"role": "user", "content": "What is 12 plus 5?"},
        {"role": "assistant", "content": "12 plus 5 is 17."}]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["Hello, world!", "  two  spaces\n\n\tand tabs ", "é ü 漢字 🙂", "1234"]
)
def test_text_comes_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(encode_text(tokenizer, text)) == text


def test_special_tokens_have_the_first_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]


def test_typed_special_text_is_encoded_as_text(tokenizer: Tokenizer) -> None:
    ids = encode_text(tokenizer, "end it <|im_end|> now <|endoftext|>")
    assert not {END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID} & set(ids)


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(encode_text(tokenizer, "2026")) == 4


def test_only_the_answer_carries_full_weight(tokenizer: Tokenizer) -> None:
    ids, weights = encode_chat(tokenizer, CHAT, {"assistant": 1.0, "user": 0.2})
    heavy = [one for one, weight in zip(ids, weights, strict=True) if weight == 1.0]
    assert tokenizer.decode(heavy[:-1]) == CHAT[1]["content"]
    assert heavy[-1] == TURN_END_ID


def test_saved_folder_loads_in_transformers_with_the_same_chat_ids(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path, 256)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert list(ids) == encode_prompt(tokenizer, CHAT[:1])
    assert loaded.eos_token_id == TURN_END_ID
    assert encode_prompt(load_tokenizer(tmp_path / "tokenizer.json"), CHAT[:1]) == list(ids)


def test_no_system_message_is_invented(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(encode_prompt(tokenizer, CHAT[:1]), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n")
