"""Writes a model folder as one GGUF file for llama.cpp.

Contract: families whose blocks llama.cpp calls llama, qwen2 and qwen3, weights in safetensors;
anything else is refused. Matrices are written in the precision asked for (f32, bf16, q8_0, q4_0),
vectors in f32; beside q4_0, embedding and output head are q8_0, for the library of the format
writes none of the kinds that llama.cpp's own tool takes for them. The file has no vocabulary:
prompts and replies are ids. Raises ModelError.

Source: llama.cpp expects the two halves of each rotary head of a Llama's queries and keys
interleaved; Qwen's stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from safetensors import safe_open
from torch import Tensor

from localspec.core.errors import ModelError
from localspec.formats.folder_files import check_folder, weight_files

LLAMA = gguf.MODEL_ARCH.LLAMA
ARCHITECTURES = {  # by transformers' model_type
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def convert(folder: Path, out: Path, precision: str) -> None:
    config = check_folder(folder).config
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[architecture])
    num_heads = config["num_attention_heads"]
    num_key_heads = config.get("num_key_value_heads") or num_heads
    _add_shape(writer, config, num_heads, num_key_heads)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                tensor = file.get_tensor(name)
                if architecture == LLAMA and (".q_proj." in name or ".k_proj." in name):
                    tensor = interleaved(tensor, num_heads if ".q_" in name else num_key_heads)
                _add(writer, names, name, tensor, precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, names: Any, name: str, tensor: Tensor, precision: str) -> None:
    written = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if written is None or not tensor.is_floating_point():
        raise ModelError(f"The tensor {name} ({tensor.dtype}) has no counterpart in llama.cpp.")
    kind = gguf.GGMLQuantizationType[kind_of(name, precision) if tensor.dim() > 1 else "F32"]
    values = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
    writer.add_tensor(written, values, raw_dtype=kind)


def kind_of(name: str, precision: str) -> str:
    """In which format a matrix is written, by the name in gguf."""
    is_in_block = name.startswith("model.layers.")
    return precision.upper() if is_in_block or precision != "q4_0" else "Q8_0"


def architecture_of(config: dict[str, Any]) -> Any:
    """llama.cpp's family. Raises ModelError."""
    family = config.get("model_type")
    if family not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"llama.cpp weights are written for {known}, and this is {family}.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError("llama.cpp weights are written for plain rotary positions only.")
    return ARCHITECTURES[family]


def _add_shape(writer: Any, config: dict[str, Any], num_heads: int, num_key_heads: int) -> None:
    head_size = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_key_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def interleaved(values: Tensor, num_heads: int) -> Tensor:
    """The rows of each head with its two halves interleaved."""
    halves = values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
