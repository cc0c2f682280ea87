"""Small GGUF files for tests, written by the gguf package from tiny models.

`write_gguf` lays a module out as llama.cpp's converter does: the package's own names, the order of
the rows of queries and keys, vocabulary and settings. `noise_in` gives values of a kind that the
package cannot quantise to (the K kinds), as random blocks with scales of a sensible size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
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
# Families whose values llama.cpp changes beyond norms: only written in F32 here.
CHANGED = ("qwen35", "qwen35moe")
ARCHITECTURES = {name: place for place, name in MODEL_ARCH_NAMES.items()}


def published(module: Any) -> dict[str, torch.Tensor]:
    """A module's weights by the names of published files: those of experts apart, no tied head."""
    found = dict[str, torch.Tensor]()
    for name, tensor in module.state_dict().items():
        if module.config.model_type == "gpt_oss" and ".experts." in name:
            found |= _apart_by_columns(name, tensor)
        elif ".layers.experts." in re.sub(r"\.\d+\.", ".", name):  # Gemma 4's stay joined
            found[name] = tensor
        elif name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            stem = name.removesuffix("gate_up_proj")
            found |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        elif name != "lm_head.weight" or not module.config.tie_word_embeddings:
            found[name] = tensor
    return found


def _apart_by_columns(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of gpt-oss's experts, weights [experts, in, out] and biases, gate and up in turn."""
    kind = "bias" if name.endswith("_bias") else "weight"
    stem, tensor = name.removesuffix("_bias"), tensor if kind == "bias" else tensor.mT
    if stem.endswith("down_proj"):
        return {f"{stem}.{kind}": tensor.contiguous()}
    stem = stem.removesuffix("gate_up_proj")
    halves = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}
    return {f"{stem}{half}_proj.{kind}": part.contiguous() for half, part in halves.items()}


def interleaved(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The order in which llama.cpp keeps the rows of queries and keys (its `permute`)."""
    half = values.shape[0] // num_heads // 2
    rows = values.reshape(num_heads, 2, half, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)


def of_delta_net(config: Any, name: str, values: torch.Tensor) -> torch.Tensor:
    """What llama.cpp's converter makes of a tensor of Qwen3.5: value heads of all key heads by
    turns, norms with their 1, decays as they are used, a convolution of two axes."""
    part = name.rpartition("linear_attn.")[2]
    if part == name:
        return values + 1.0 if "norm" in name else values
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    keys = 2 * num_keys * config.linear_key_head_dim

    def by_turns(rows: torch.Tensor) -> torch.Tensor:
        heads = rows.reshape(num_keys, num_values // num_keys, -1, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)

    if part == "out_proj.weight":
        return by_turns(values.T).T
    if part == "conv1d.weight":
        values = values.squeeze(1)
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat((values[:keys], by_turns(values[keys:])))
    if part == "norm.weight":
        return values
    return -by_turns(values).exp() if part == "A_log" else by_turns(values)


def noise_in(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Random blocks of a K kind, [..., bytes]."""
    per_block, num_bytes = GGML_QUANT_SIZES[Kind[kind]]
    made = np.random.default_rng(seed)
    blocks = made.integers(0, 256, (prod(shape) // per_block, num_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.0005).tobytes(), np.uint8)
    for place in SCALES_AT[kind]:
        blocks[:, place : place + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    file: Path,
    module: Any,
    kind: str = "F32",
    family: str = "llama",
    describe: Callable[[GGUFWriter], None] = lambda writer: None,
    others: Mapping[str, str] = MappingProxyType({}),
    num_drafting: int = 0,
) -> dict[str, torch.Tensor]:
    """Write a module's weights; returns what the file's values stand for, by transformers' names,
    as the package's own `dequantize` computes it. describe: adds the vocabulary and more. others:
    the kinds of layers of another kind. num_drafting: blocks at the end that `describe` adds. What
    several layers share is quantised once."""
    config = module.config
    writer = GGUFWriter(file, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers + num_drafting)
    writer.add_head_count(config.num_attention_heads)
    if family == "gemma4":
        _write_layer_sizes(writer, module)
    else:
        writer.add_feed_forward_length(getattr(config, "intermediate_size", 0))
        writer.add_head_count_kv(config.num_key_value_heads)
        if getattr(config, "head_dim", None):
            writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotation = config.rope_parameters
    writer.add_rope_freq_base(rotation.get("full_attention", rotation)["rope_theta"])
    describe(writer)
    heads = dict[str, int]()
    if family in INTERLEAVED:
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
            values = of_delta_net(config, name, values) if family in CHANGED else values
            wanted = "F32" if name.endswith(".bias") else others.get(layer, kind)
            raw, found = _stored(values.numpy(), wanted, len(dense))
            if family in CHANGED:
                stored[tensor.data_ptr()] = (raw, found, tensor)
                raw, found, dense[name] = stored[tensor.data_ptr()]
                writer.add_tensor(_called(names, name), raw, raw_dtype=found)
                continue
            back = torch.from_numpy(np.array(dequantize(raw, found))).view(tensor.shape)
            back = _apart(back, heads[layer]) if is_moved else back - shift
            stored[tensor.data_ptr()] = (raw, found, back)
        raw, found, dense[name] = stored[tensor.data_ptr()]
        writer.add_tensor(_called(names, name), raw, raw_dtype=found)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


# Names that llama.cpp's converter gives by itself, by the end of transformers' names.
ENDS = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layers.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "layers.experts.down_proj": "ffn_down_exps.weight",
}


def _called(names: Any, name: str) -> str:
    layer = next((part for part in name.split(".") if part.isdecimal()), "")
    whole = name.replace(f".{layer}.", ".", 1)
    for end, ours in ENDS.items():
        if whole.endswith(f".{end}"):
            return f"blk.{layer}.{ours}"
    name = name.replace(".dt_bias", ".dt_proj.bias")
    called = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert called is not None, name
    return str(called)


def _write_layer_sizes(writer: GGUFWriter, module: Any) -> None:
    """Of Gemma 4, whose layers differ."""
    config, layers = module.config, module.model.layers
    kinds = [kind == "sliding_attention" for kind in config.layer_types]
    sizes = [(layer.self_attn.head_dim, layer.mlp.down_proj.in_features) for layer in layers]
    wide = max(size for size, _ in sizes)
    writer.add_feed_forward_length([width for _, width in sizes])
    own = [layer.self_attn for layer in layers if hasattr(layer.self_attn, "k_proj")]
    counts = [attention.k_proj.out_features // attention.head_dim for attention in own]
    heads = dict(zip(kinds, counts, strict=False))  # layers that read other keys come last
    writer.add_head_count_kv([heads[kind] for kind in kinds])
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    narrow = min(size for size, _ in sizes)
    writer.add_key_length_swa(narrow)
    writer.add_value_length_swa(narrow)
    writer.add_rope_dimension_count(wide)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(kinds)
    turned = wide // 8  # a quarter of all angles
    factors = np.array([1.0] * turned + [1e30] * (wide // 2 - turned), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


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
