"""Writes a model folder as one GGUF file, inside the environment that has `gguf`.

    python convert_gguf.py FOLDER OUT f32|bf16|q8_0|q4_0

Contract: families whose blocks llama.cpp calls llama, qwen2 and qwen3, weights in safetensors;
anything else ends with exit code 2 and one sentence on stdout. Matrices are written in the
precision asked for, vectors in f32; beside q4_0, embedding and output head are q8_0, for the
library of the format writes none of the kinds that llama.cpp's own tool takes for them. The file
has no vocabulary: prompts and replies are ids.

Source: llama.cpp expects the two halves of each rotary head of a Llama's queries and keys
interleaved; Qwen's stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

# transformers' model_type -> llama.cpp's architecture
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
PLAIN_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

STORED = {"F16": "<f2", "F32": "<f4"}


class Unsupported(Exception):
    """This folder cannot be written as GGUF here."""


def convert(folder: Path, out: Path, precision: str) -> None:
    gguf: Any = import_module("gguf")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = architecture_of(config)
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    writer = gguf.GGUFWriter(out, architecture)
    _add_shape(writer, config, heads, key_heads)
    kinds = gguf.GGMLQuantizationType
    for name, values in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if architecture == "llama":
            values = permuted(name, values, heads, key_heads)
        if precision == "f32" or values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        kind = kinds[kind_of(name, precision)]
        is_whole = kind == kinds.BF16
        written = as_bf16(values).view(np.uint8) if is_whole else gguf.quantize(values, kind)
        writer.add_tensor(gguf_name(name), written, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(name: str, precision: str) -> str:
    """In which format a matrix is written, by the name in gguf."""
    is_in_block = name.startswith("model.layers.")
    return precision.upper() if is_in_block or precision != "q4_0" else "Q8_0"


def architecture_of(config: dict[str, Any]) -> str:
    """llama.cpp's name for the family. Raises Unsupported."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise Unsupported(f"llama.cpp weights are written for {known}, and this is {family}.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise Unsupported("llama.cpp weights are written for plain rotary positions only.")
    return ARCHITECTURES[family]


def _add_shape(writer: Any, config: dict[str, Any], heads: int, key_heads: int) -> None:
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor. Raises Unsupported."""
    stem, _, kind = name.rpartition(".")
    if stem in PLAIN_NAMES:
        return f"{PLAIN_NAMES[stem]}.{kind}"
    parts = stem.split(".", 3)  # model.layers.N.rest
    if parts[:2] != ["model", "layers"] or parts[-1] not in LAYER_NAMES:
        raise Unsupported(f"The tensor {name} has no counterpart in llama.cpp.")
    return f"blk.{parts[2]}.{LAYER_NAMES[parts[3]]}.{kind}"


def permuted(name: str, values: Any, heads: int, key_heads: int) -> Any:
    """Queries and keys with the halves of each head interleaved; the rest untouched."""
    is_query, is_key = ".q_proj." in name, ".k_proj." in name
    if not (is_query or is_key):
        return values
    count = heads if is_query else key_heads
    halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of the folder's safetensors files, in fp32."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + header_length + start)
                yield name, as_fp32(file.read(end - start), entry)


def as_fp32(data: bytes, entry: dict[str, Any]) -> Any:
    """The bytes of one safetensors entry as an array. Raises Unsupported."""
    if entry["dtype"] == "BF16":
        # bf16 is the upper half of fp32.
        flat = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif entry["dtype"] in STORED:
        flat = np.frombuffer(data, STORED[entry["dtype"]]).astype(np.float32)
    else:
        raise Unsupported(f"Weights of type {entry['dtype']} are not written as GGUF.")
    return flat.reshape(entry["shape"])


def as_bf16(values: Any) -> Any:
    """fp32 -> the bits of the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except Unsupported as error:
        print(error)
        sys.exit(2)
