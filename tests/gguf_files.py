"""Small GGUF files for tests, written by the gguf package from tiny models.

`write_gguf` lays a module out as llama.cpp's converter does: names, order of the rows of queries
and keys, vocabulary and settings. `noise_in` gives values of a kind that the package cannot
quantise to (the K kinds), as random blocks with scales of a sensible size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tools.peers.workers.convert_gguf import LAYER_NAMES, PLAIN_NAMES

SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # of the fp16 scales in a block

Kind = GGMLQuantizationType


def ggml_name(name: str) -> str:
    """transformers' name of a tensor -> ggml's."""
    stem, _, end = name.rpartition(".")
    if stem in PLAIN_NAMES:
        return f"{PLAIN_NAMES[stem]}.{end}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.{end}"


def interleaved(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The order in which llama.cpp keeps the rows of queries and keys (its `permute`)."""
    half = values.shape[0] // num_heads // 2
    rows = values.reshape(num_heads, 2, half, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def noise_in(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """Random blocks of a K kind, [rows, bytes]."""
    per_block, num_bytes = GGML_QUANT_SIZES[Kind[kind]]
    made = np.random.default_rng(seed)
    blocks = made.integers(0, 256, (shape[0] * shape[1] // per_block, num_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.0005).tobytes(), np.uint8)
    for place in SCALES_AT[kind]:
        blocks[:, place : place + 2] = scale
    return blocks.reshape(shape[0], -1)


def write_gguf(
    file: Path,
    module: Any,
    kind: str = "F32",
    family: str = "llama",
    describe: Callable[[GGUFWriter], None] = lambda writer: None,
) -> dict[str, torch.Tensor]:
    """Write a module's weights; returns what the file's values stand for, by transformers' names,
    as the package's own `dequantize` computes it. describe: adds the vocabulary and more."""
    config = module.config
    writer = GGUFWriter(file, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    describe(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    dense = dict[str, torch.Tensor]()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in module.state_dict().items():
        if name in tied:
            continue
        layer = name.split(".")[-2]
        is_moved = family == "llama" and layer in heads
        values = interleaved(tensor, heads[layer]) if is_moved else tensor
        raw, found = _stored(values.numpy(), kind, seed=len(dense))
        writer.add_tensor(ggml_name(name), raw, raw_dtype=found)
        back = torch.from_numpy(np.array(dequantize(raw, found))).view(tensor.shape)
        dense[name] = _apart(back, heads[layer]) if is_moved else back
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def _stored(values: np.ndarray[Any, Any], kind: str, seed: int) -> tuple[Any, Kind]:
    if values.ndim == 1 or kind == "F32":  # norms and biases are never quantised
        return values.astype(np.float32), Kind.F32
    if kind in SCALES_AT:
        return noise_in(kind, values.shape, seed), Kind[kind]
    return quantize(values.astype(np.float32), Kind[kind]), Kind[kind]


def _apart(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The inverse of `interleaved`, row by row."""
    places = interleaved(torch.arange(values.shape[0])[:, None], num_heads)[:, 0]
    made = torch.empty_like(values)
    made[places] = values
    return made


def vocabulary_of(
    found: Mapping[str, Any], split: str, template: str | None = None, ends: Sequence[int] = ()
) -> Callable[[GGUFWriter], None]:
    """found: of tokenizer.json. split: `tokenizer.ggml.pre`."""
    words = {place: word for word, place in found["model"]["vocab"].items()}
    added = {each["id"]: each for each in found["added_tokens"]}
    words |= {place: each["content"] for place, each in added.items()}
    kinds = [
        (3 if added[place]["special"] else 4) if place in added else 1 for place in sorted(words)
    ]
    merges = [m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]]

    def describe(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split)
        writer.add_token_list([words[place] for place in sorted(words)])
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        if template is not None:
            writer.add_chat_template(template)
        for name, place in zip(("eos", "eot"), ends, strict=False):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", place)

    return describe
