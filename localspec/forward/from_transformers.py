"""Moves the weights of a loaded transformers module into the native decoder.

Contract: `take_over` reads a module of a family it knows (pre-normed blocks of attention and gated
feed-forward, one after the other), builds the decoder and, on request, empties the module layer by
layer, so that no more than one layer is held twice. A family, an activation or a setting it does
not know is refused with the reason; the transformers path then stays. The rotations are computed by
the module's own code.

Not here: the forward (decoder), reading files (weights), layouts of a weight (weight_layout).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from localspec.errors import ModelError
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Block, Decoder, Weights
from localspec.forward.model import window_of
from localspec.forward.norm import RootMeanSquareNorm
from localspec.forward.weight_layout import ModuleLinear, fused, packed


@dataclass(frozen=True)
class _Family:
    """How a family lays out a block. has_joined_products: query, key and value are one layer
    already, and so are gate and up."""

    has_head_norms: bool = False
    has_joined_products: bool = False


FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(),
    "qwen3": _Family(has_head_norms=True),
    "smollm3": _Family(),
    "phi3": _Family(has_joined_products=True),
}
ROTATIONS = ("default", "linear", "llama3", "yarn")  # the others change with the length
NORM_CLASSES = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm",
                "SmolLM3RMSNorm", "Phi3RMSNorm")  # fmt: skip


def take_over(module: Any, cache: KVCache, is_emptied: bool = False) -> Decoder:
    """A decoder with the module's weights over `cache`. is_emptied: take the weights out of the
    module, which cannot run afterwards. Raises ModelError for a module that is not known."""
    family = _family(module, cache.shape.capacity)
    config = module.config
    cos, sin = _rotation_tables(module, cache)
    _require_whole_heads(config, cache, cos)
    blocks = tuple(
        _block(layer, family, config.rms_norm_eps, is_emptied) for layer in module.model.layers
    )
    embedding = module.model.embed_tokens.weight.detach()
    is_tied = module.lm_head.weight is module.model.embed_tokens.weight
    weights = Weights(
        embedding=embedding,
        blocks=blocks,
        final_norm=_norm(module.model.norm, config.rms_norm_eps),
        head=packed(embedding, None) if is_tied else fused([module.lm_head]),
        cos=cos,
        sin=sin,
        num_heads=config.num_attention_heads,
        num_kv_heads=cache.shape.num_kv_heads,
        head_dim=cache.shape.head_dim,
    )
    return Decoder(weights, cache)


def _family(module: Any, capacity: int) -> _Family:
    """Raises ModelError unless every setting of the blocks is known."""
    config = module.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise _unsuited(f"{config.model_type} is no family it knows")
    if config.hidden_act != "silu":
        raise _unsuited(f"its activation is {config.hidden_act}, not silu")
    window = window_of(config)
    if window is not None and window < capacity:
        raise _unsuited(
            f"its layers attend to a window of {window} positions, and the context is {capacity}; "
            f"with --context {window} or less it would"
        )
    rotation = (config.rope_parameters or {}).get("rope_type", "default")
    if rotation not in ROTATIONS:
        raise _unsuited(f"its rotation is {rotation}, which changes with the length")
    norms = {type(layer.input_layernorm).__name__ for layer in module.model.layers}
    norms |= {type(module.model.norm).__name__}
    if not norms <= set(NORM_CLASSES):
        raise _unsuited(f"its norm is {', '.join(sorted(norms))}")
    return family


def _require_whole_heads(config: Any, cache: KVCache, cos: torch.Tensor) -> None:
    if cos.shape[-1] != cache.shape.head_dim:
        raise _unsuited("only a part of each head is rotated by position")
    if config.num_attention_heads % cache.shape.num_kv_heads:
        raise _unsuited("its query heads do not divide among its key heads")


@torch.inference_mode()
def _rotation_tables(module: Any, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of every position, [capacity, head_dim], by the module's own code."""
    positions = torch.arange(cache.shape.capacity, device=module.device)[None]
    like = torch.empty(1, dtype=module.dtype, device=module.device)
    cos, sin = module.model.rotary_emb(like, positions)  # [1, capacity, turned]
    sin = sin[0].clone()
    # A roll by half a head turns (x1, x2) into (x2, x1); the rotation needs (-x2, x1).
    sin[:, : sin.shape[-1] // 2].neg_()
    return cos[0].contiguous(), sin.contiguous()


def _block(layer: Any, family: _Family, eps: float, is_emptied: bool) -> Block:
    attention, feed_forward = layer.self_attn, layer.mlp
    if family.has_joined_products:
        qkv, gate_up = [attention.qkv_proj], [feed_forward.gate_up_proj]
    else:
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        gate_up = [feed_forward.gate_proj, feed_forward.up_proj]
    made = Block(
        attention_norm=_norm(layer.input_layernorm, eps),
        qkv=fused(qkv),
        head_norm=_head_norm(attention, eps) if family.has_head_norms else None,
        output=fused([attention.o_proj]),
        feed_forward_norm=_norm(layer.post_attention_layernorm, eps),
        gate_up=fused(gate_up),
        down=fused([feed_forward.down_proj]),
        is_rotated=bool(getattr(attention, "use_rope", True)),  # transformers' own, SmolLM3
    )
    if is_emptied:
        sources = (qkv, [attention.o_proj], gate_up, [feed_forward.down_proj])
        for linear, layers in zip(made.linears, sources, strict=True):
            if not isinstance(linear, ModuleLinear):  # that one computes with the modules
                _empty(layers)
    return made


def _norm(module: Any, eps: float) -> RootMeanSquareNorm:
    return RootMeanSquareNorm(module.weight.detach().clone(), eps)


def _head_norm(attention: Any, eps: float) -> RootMeanSquareNorm:
    """The norms of query and key heads as one: [heads + kv_heads, head_dim]."""
    size = attention.head_dim
    num_heads = attention.q_proj.out_features // size
    num_kv_heads = attention.k_proj.out_features // size
    queries = attention.q_norm.weight.detach().expand(num_heads, size)
    keys = attention.k_norm.weight.detach().expand(num_kv_heads, size)
    return RootMeanSquareNorm(torch.cat((queries, keys)), eps)


def _empty(layers: list[Any]) -> None:
    """Drop the module's weights; those that are used unchanged stay alive in the decoder.

    On a GPU their memory goes back to the driver: torch would keep it, and fused weights need
    larger blocks than those that were freed."""
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.data.new_empty(0), requires_grad=False)
    if any(layer.weight.device.type == "cuda" for layer in layers):
        torch.cuda.empty_cache()


def _unsuited(reason: str) -> ModelError:
    return ModelError(f"The native decoder does not take this model: {reason}.")
