"""Tokenizers that are trained in a moment: of a few sentences, and of the demo pair's dialogues."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = (
    "The café is open, naïve zoë — “quotes” and tabs\tand  spaces.",
    "def f(x):\n    return x ** 2  # ²\n\n\n",
    "日本語のテキスト、中文也行。 한국어",
    "👩‍👩‍👧 family and 🇫🇷 flags",
    "  leading, trailing  \n",
    "e\u0301 combining and \u00e9 composed",
    "1,234.56 + 7 = ? < > | <| |> [INST",
    "",
)


def tiny_tokenizer(vocabulary_size: int = 600) -> Any:
    """Return a byte-level tokenizer with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*SENTENCES, "im_start im_end user assistant system"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def dialogue_tokenizer() -> Tokenizer:
    """Return a tokenizer of 420 entries, learnt from generated dialogues."""
    from tools.demo_pair import dialogues
    from tools.demo_pair.tokenizer import train_tokenizer

    rng = Random(7)
    texts = [m["content"] for _ in range(200) for m in dialogues.generate(rng).messages()]
    return train_tokenizer(texts, 420)
