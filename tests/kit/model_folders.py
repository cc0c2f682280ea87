"""Whole model folders in small: weights, config, tokenizer, chat template."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from math import prod
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


def save_header(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """A whole .safetensors file of weights in bf16 that are all zero and take no room on the
    disk: for whoever counts them."""
    entries, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + end)


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of a Llama with a tied head, by its config.json."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv_width = width * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (kv_width, width),
             "self_attn.v_proj": (kv_width, width), "self_attn.o_proj": (width, width),
             "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
             "mlp.down_proj": (width, inner), "input_layernorm": (width,),
             "post_attention_layernorm": (width,)}  # fmt: skip
    outer = {"model.embed_tokens.weight": (config["vocab_size"], width),
             "model.norm.weight": (width,)}  # fmt: skip
    layers = [f"model.layers.{number}." for number in range(config["num_hidden_layers"])]
    return outer | {f"{name}{part}.weight": layer[part] for name in layers for part in layer}
