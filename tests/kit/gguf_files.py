"""Small GGUF files for tests, written by the gguf package from tiny models.

`write_gguf` lays a module out as llama.cpp's converter does: the package's own names, the order of
the rows of queries and keys, vocabulary and settings. `noise_in` gives values of a kind that the
package cannot quantise to (the K kinds), as random blocks with scales of a sensible size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # of the fp16 scales in a block

Kind = GGMLQuantizationType


INTERLEAVED = (
    "llama",
    "granite",
    "smollm3",
    "mistral3",
    "arcee",
)  # the families whose rows llama.cpp moves
ARCHITECTURES = {name: place for place, name in MODEL_ARCH_NAMES.items()}


def published(module: Any) -> dict[str, torch.Tensor]:
    """A module's weights by the names of published files: those of experts apart, no tied head."""
    found = dict[str, torch.Tensor]()
    for name, tensor in module.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        elif name != "lm_head.weight" or not module.config.tie_word_embeddings:
            found[name] = tensor
    return found


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
    others: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """Write a module's weights; returns what the file's values stand for, by transformers' names,
    as the package's own `dequantize` computes it. describe: adds the vocabulary and more. others:
    the kinds of layers of another kind. What several layers share is quantised once."""
    config = module.config
    writer = GGUFWriter(file, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotation = config.rope_parameters
    writer.add_rope_freq_base(rotation.get("full_attention", rotation)["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    describe(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    dense = dict[str, torch.Tensor]()
    stored = dict[int, tuple[Any, Kind, torch.Tensor]]()
    names = get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for name, tensor in published(module).items():
        layer = name.split(".")[-2]
        is_moved = family in INTERLEAVED and layer in heads
        shift = 1.0 if family in ("gemma2", "gemma3") and layer.endswith("norm") else 0.0
        if tensor.data_ptr() not in stored:
            values = interleaved(tensor, heads[layer]) if is_moved else tensor + shift
            raw, found = _stored(values.numpy(), others.get(layer, kind), len(dense))
            back = torch.from_numpy(np.array(dequantize(raw, found))).view(tensor.shape)
            back = _apart(back, heads[layer]) if is_moved else back - shift
            stored[tensor.data_ptr()] = (raw, found, back)
        raw, found, dense[name] = stored[tensor.data_ptr()]
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None, name
        writer.add_tensor(called, raw, raw_dtype=found)
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


WORDS = {chr(33 + place): place for place in range(64)}
VOCABULARY = vocabulary_of({"model": {"vocab": WORDS, "merges": []}, "added_tokens": []}, "gpt-2")
