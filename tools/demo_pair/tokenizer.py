"""The byte-level BPE tokenizer of the pair, its special tokens and its chat template.

Contract: `train_tokenizer` learns merges from an iterator of texts; `encode_chat` turns messages
into ids with a loss weight per token; `save_tokenizer` writes a folder that transformers'
AutoTokenizer loads. Text is always encoded as text: a typed "<|im_end|>" never becomes the special
token. Digits are single tokens. No system message is invented.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PAD)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID, PAD_ID = range(4)
SPLIT_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Message = dict[str, str]


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Learn merges so that the special tokens take ids 0 to 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read tokenizer.json; text that looks like a special token stays text."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], role_weights: dict[str, float]
) -> tuple[list[int], list[float]]:
    """Encode whole messages; the loss weight of each token follows the role that speaks it."""
    texts = [part for m in messages for part in (f"{m['role']}\n", m["content"].strip())] + ["\n"]
    encoded = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    newline = encoded.pop()
    ids: list[int] = []
    weights: list[float] = []
    for place, message in enumerate(messages):
        header, content = encoded[2 * place], encoded[2 * place + 1]
        ids += [TURN_START_ID, *header, *content, TURN_END_ID, *newline]
        weight = role_weights.get(message["role"], 0.0)
        weights += (
            [0.0] + [0.0] * len(header) + [weight] * (len(content) + 1) + [0.1] * len(newline)
        )
    return ids, weights


def encode_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Encode messages and open the assistant's turn."""
    ids, _ = encode_chat(tokenizer, messages, {})
    return [*ids, TURN_START_ID, *encode_text(tokenizer, "assistant\n")]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
