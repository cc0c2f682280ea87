"""The weights of a published model by its config.json alone: Qwen3-Next, Qwen3.5-class, Gemma 4 and
gpt-oss.

`published_tensors` lists what the folder of such a model holds for text, with the MTP head of
Qwen3.5-class models, and without towers for images and sound. Of these families neither the number
of layers nor the width gives the number of weights, so each projection is listed.
Source: the modelling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from localspec.formats.attention import key_heads_of, layer_kinds

Tensor = tuple[str, tuple[int, ...]]
# Kinds of layers where config.json gives the distance between two layers of full attention.
DEFAULT_INTERVAL = 4


def is_listed(config: Mapping[str, Any]) -> bool:
    """True if `published_tensors` knows the family of a config.json."""
    return _family(config) in _FAMILIES


def published_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name, of a listed family.

    Raises KeyError, TypeError or ValueError for a config.json without a size."""
    text = {**config, **(config.get("text_config") or {})}
    return dict(_with_ends(text, _FAMILIES[_family(config)](text)))


def _family(config: Mapping[str, Any]) -> str:
    text = config.get("text_config") or config
    return str(text.get("model_type") or config.get("model_type")).removesuffix("_text")


def qwen_kinds(text: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, also where only the interval of full attention is given."""
    if kinds := layer_kinds(text):
        return kinds
    every = int(text.get("full_attention_interval") or DEFAULT_INTERVAL)
    count = int(text["num_hidden_layers"])
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]


def state_numbers(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of all gated delta nets' states: of the sums, and of the convolutions."""
    if "linear_key_head_dim" not in text:
        return 0, 0
    count = qwen_kinds(text).count("linear_attention")
    keys, values = _state_widths(text)
    columns = int(text["linear_conv_kernel_dim"]) - 1
    sums = values * int(text["linear_key_head_dim"])
    return count * sums, count * columns * (2 * keys + values)


def ingredient_bytes(text: Mapping[str, Any]) -> int:
    """Return what one token adds to all gated delta nets' states, in fp32: keys, corrections,
    decays and what the convolutions read."""
    if "linear_key_head_dim" not in text:
        return 0
    keys, values = _state_widths(text)
    heads = int(text["linear_num_value_heads"])
    return 4 * qwen_kinds(text).count("linear_attention") * (3 * keys + 2 * values + heads)


def _with_ends(text: Mapping[str, Any], inner: Iterator[Tensor]) -> Iterator[Tensor]:
    table = (int(text["vocab_size"]), int(text["hidden_size"]))
    yield "model.embed_tokens.weight", table
    yield from inner
    yield "model.norm.weight", table[1:]
    is_tied = str(text["model_type"]).startswith("gemma4")  # where nothing is said
    if not text.get("tie_word_embeddings", is_tied):
        yield "lm_head.weight", table


def _within(begin: str, tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    return ((f"{begin}{name}", shape) for name, shape in tensors)


def _gated(width: int, inner: int) -> Iterator[Tensor]:
    yield "gate_proj.weight", (inner, width)
    yield "up_proj.weight", (inner, width)
    yield "down_proj.weight", (width, inner)


def _norms(width: int, *names: str) -> Iterator[Tensor]:
    return ((f"{name}.weight", (width,)) for name in names)


# -- Qwen3.5, 3.6 and 3.8 -------------------------------------------------------------------------


def _qwen(text: Mapping[str, Any]) -> Iterator[Tensor]:
    width = int(text["hidden_size"])
    for layer, kind in enumerate(qwen_kinds(text)):
        yield from _within(f"model.layers.{layer}.", _qwen_layer(text, kind))
    for layer in range(int(text.get("mtp_num_hidden_layers") or 0)):
        yield from _within(f"mtp.layers.{layer}.", _qwen_layer(text, "full_attention"))
    if text.get("mtp_num_hidden_layers"):
        yield "mtp.fc.weight", (width, 2 * width)
        yield from _norms(width, "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")


def _qwen_layer(text: Mapping[str, Any], kind: str) -> Iterator[Tensor]:
    width = int(text["hidden_size"])
    yield from _norms(width, "input_layernorm", "post_attention_layernorm")
    if kind == "linear_attention":
        yield from _within("linear_attn.", _delta_net(text))
    else:
        heads, size = int(text["num_attention_heads"]), int(text["head_dim"])
        gate = 1 if text.get("attn_output_gate") is False else 2
        rows = int(text["num_key_value_heads"]) * size
        yield "self_attn.q_proj.weight", (gate * heads * size, width)
        yield "self_attn.k_proj.weight", (rows, width)
        yield "self_attn.v_proj.weight", (rows, width)
        yield "self_attn.o_proj.weight", (width, heads * size)
        yield from _norms(size, "self_attn.q_norm", "self_attn.k_norm")
    if text.get("num_experts"):
        yield from _within("mlp.", _qwen_experts(text))
    else:
        yield from _within("mlp.", _gated(width, int(text["intermediate_size"])))


def _state_widths(text: Mapping[str, Any]) -> tuple[int, int]:
    """Widths of all keys and of all values of a gated delta net."""
    keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
    return keys, int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])


def _delta_net(text: Mapping[str, Any]) -> Iterator[Tensor]:
    width, heads = int(text["hidden_size"]), int(text["linear_num_value_heads"])
    keys, values = _state_widths(text)
    if text["model_type"] == "qwen3_next":
        yield "in_proj_qkvz.weight", (2 * keys + 2 * values, width)
        yield "in_proj_ba.weight", (2 * heads, width)
    else:
        yield "in_proj_qkv.weight", (2 * keys + values, width)
        yield "in_proj_z.weight", (values, width)
        yield "in_proj_a.weight", (heads, width)
        yield "in_proj_b.weight", (heads, width)
    yield "conv1d.weight", (2 * keys + values, 1, int(text["linear_conv_kernel_dim"]))
    yield "A_log", (heads,)
    yield "dt_bias", (heads,)
    yield "norm.weight", (int(text["linear_value_head_dim"]),)
    yield "out_proj.weight", (width, values)


def _qwen_experts(text: Mapping[str, Any]) -> Iterator[Tensor]:
    width, count = int(text["hidden_size"]), int(text["num_experts"])
    inner = int(text["moe_intermediate_size"])
    yield "gate.weight", (count, width)
    yield "experts.gate_up_proj", (count, 2 * inner, width)
    yield "experts.down_proj", (count, width, inner)
    shared = int(text["shared_expert_intermediate_size"])
    yield from _within("shared_expert.", _gated(width, shared))
    yield "shared_expert_gate.weight", (1, width)


# -- Gemma 4 --------------------------------------------------------------------------------------


def _gemma(text: Mapping[str, Any]) -> Iterator[Tensor]:
    layers, width = int(text["num_hidden_layers"]), int(text["hidden_size"])
    if part := int(text.get("hidden_size_per_layer_input") or 0):
        vocabulary = int(text.get("vocab_size_per_layer_input") or text["vocab_size"])
        yield "model.embed_tokens_per_layer.weight", (vocabulary, layers * part)
        yield "model.per_layer_model_projection.weight", (layers * part, width)
        yield from _norms(part, "model.per_layer_projection_norm")
    for layer in range(layers):
        yield from _within(f"model.layers.{layer}.", _gemma_layer(text, layer))


def _gemma_layer(text: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    width, inner = int(text["hidden_size"]), int(text["intermediate_size"])
    is_shared = layer >= int(text["num_hidden_layers"]) - int(text.get("num_kv_shared_layers") or 0)
    yield "layer_scalar", (1,)
    yield from _norms(
        width, "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )  # fmt: skip
    yield from _within("self_attn.", _gemma_attention(text, layer, is_shared))
    inner *= 2 if is_shared and text.get("use_double_wide_mlp") else 1
    yield from _within("mlp.", _gated(width, inner))
    if text.get("enable_moe_block"):
        yield from _gemma_experts(text)
    if part := int(text.get("hidden_size_per_layer_input") or 0):
        yield "per_layer_input_gate.weight", (part, width)
        yield "per_layer_projection.weight", (width, part)
        yield from _norms(width, "post_per_layer_input_norm")


def _gemma_attention(text: Mapping[str, Any], layer: int, is_shared: bool) -> Iterator[Tensor]:
    width, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    is_global = text["layer_types"][layer] == "full_attention"
    num_key_heads, size = key_heads_of(text, layer)
    yield "q_proj.weight", (heads * size, width)
    yield "o_proj.weight", (width, heads * size)
    yield from _norms(size, "q_norm")
    if is_shared:
        return
    rows = num_key_heads * size
    yield from _norms(size, "k_norm")
    yield "k_proj.weight", (rows, width)
    if not (is_global and text.get("attention_k_eq_v")):
        yield "v_proj.weight", (rows, width)


def _gemma_experts(text: Mapping[str, Any]) -> Iterator[Tensor]:
    width, count = int(text["hidden_size"]), int(text["num_experts"])
    inner = int(text["moe_intermediate_size"])
    yield "router.scale", (width,)
    yield "router.per_expert_scale", (count,)
    yield "router.proj.weight", (count, width)
    yield "experts.gate_up_proj", (count, 2 * inner, width)
    yield "experts.down_proj", (count, width, inner)
    yield from _norms(
        width, "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
        "pre_feedforward_layernorm_2",
    )  # fmt: skip


# -- gpt-oss --------------------------------------------------------------------------------------


def _gpt_oss(text: Mapping[str, Any]) -> Iterator[Tensor]:
    for layer in range(int(text["num_hidden_layers"])):
        yield from _within(f"model.layers.{layer}.", _gpt_oss_layer(text))


def _gpt_oss_layer(text: Mapping[str, Any]) -> Iterator[Tensor]:
    width, size = int(text["hidden_size"]), int(text["head_dim"])
    heads, count = int(text["num_attention_heads"]), int(text["num_local_experts"])
    rows, inner = int(text["num_key_value_heads"]) * size, int(text["intermediate_size"])
    yield from _norms(width, "input_layernorm", "post_attention_layernorm")
    yield "self_attn.sinks", (heads,)
    parts = {"q": (heads * size, width), "k": (rows, width), "v": (rows, width)}
    for part, shape in {**parts, "o": (width, heads * size)}.items():
        yield f"self_attn.{part}_proj.weight", shape
        yield f"self_attn.{part}_proj.bias", shape[:1]
    yield "mlp.router.weight", (count, width)
    yield "mlp.router.bias", (count,)
    yield "mlp.experts.gate_up_proj", (count, width, 2 * inner)
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * inner)
    yield "mlp.experts.down_proj", (count, inner, width)
    yield "mlp.experts.down_proj_bias", (count, width)


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Tensor]]] = {
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_next": _qwen,
    "gemma4": _gemma,
    "gemma4_unified": _gemma,
    "gpt_oss": _gpt_oss,
}
