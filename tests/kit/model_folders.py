"""Whole model folders in small: weights, config, tokenizer, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

VOCAB_SIZE = 264
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """One token for each byte, and three control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*names, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(names)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=names[0])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))


def save_model(folder: Path, module: Any) -> Path:
    """A folder that can be loaded; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    module.config.save_pretrained(str(folder))
    tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    save_tokenizer(folder)
    return folder
