"""A byte-level tokenizer that is trained in a moment, with a ChatML template."""

from __future__ import annotations

from typing import Any

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
