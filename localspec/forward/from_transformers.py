"""Takes the weights of a loaded transformers model over into the native decoder.

Contract: `take_over` reads a module of a family it knows (one pre-normed block of attention and a
gated feed-forward after the other), builds the decoder and, when told so, empties the module
layer by layer, so that no more than one layer is held twice. A family, an activation or a
setting it does not know is refused with the reason, and the transformers path stays. Nothing of
the mathematics is guessed: rotations are computed by the module's own code.

Not here: the forward (decoder), loading files (weights).

`tune` tries whether single rows are better served by a second, plain copy of the weights. Plain
decoding is one row a step and lives off the memory's bandwidth; checking a draft is several rows
and wants the packed layout. Which wins for one row depends on the processor and on whether the
model fits its cache, so a pass of one row through all packed layers is timed in either form, and
plain copies are kept where that pass is clearly faster and the memory is there. CPU only; a second
or so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from localspec.errors import ModelError
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Block, Decoder, Weights
from localspec.forward.linear import PackedLinear, fused
from localspec.forward.norm import RootMeanSquareNorm


@dataclass(frozen=True)
class _Family:
    """How one family lays out a block. has_joined_products: query, key and value, and gate and
    up, are one layer each already."""

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
    """A decoder with the module's weights over `cache`. Raises ModelError where it cannot be one.

    is_emptied: the module gives its layers up and cannot run afterwards.
    """
    family = _family(module)
    config = module.config
    cos, sin = _rotation_tables(module, cache)
    _require_whole_heads(config, cache, cos)
    blocks = tuple(
        _block(layer, family, config.rms_norm_eps, is_emptied) for layer in module.model.layers
    )
    head = fused([module.lm_head])
    embedding = module.model.embed_tokens.weight.detach()  # [V, d]
    weights = Weights(
        embedding=embedding,
        blocks=blocks,
        final_norm=_norm(module.model.norm, config.rms_norm_eps),
        head=head,
        cos=cos,
        sin=sin,
        num_heads=config.num_attention_heads,
        num_kv_heads=cache.shape.num_kv_heads,
        head_dim=cache.shape.head_dim,
    )
    return Decoder(weights, cache)


def _family(module: Any) -> _Family:
    """Raises ModelError unless every block is of a shape that is known to the last setting."""
    config = module.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise _unsuited(f"{config.model_type} is no family it knows")
    if config.hidden_act != "silu":
        raise _unsuited(f"its activation is {config.hidden_act}, not silu")
    rotation = (config.rope_parameters or {}).get("rope_type", "default")
    if rotation not in ROTATIONS:
        raise _unsuited(f"its positions are turned by {rotation}, which changes with the length")
    norms = {type(layer.input_layernorm).__name__ for layer in module.model.layers}
    norms |= {type(module.model.norm).__name__}
    if not norms <= set(NORM_CLASSES):
        raise _unsuited(f"its norm is {', '.join(sorted(norms))}")
    return family


def _require_whole_heads(config: Any, cache: KVCache, cos: torch.Tensor) -> None:
    if cos.shape[-1] != cache.shape.head_dim:
        raise _unsuited("only a part of each head is turned by position")
    if config.num_attention_heads % cache.shape.num_kv_heads:
        raise _unsuited("its query heads do not divide among its key heads")


@torch.inference_mode()
def _rotation_tables(module: Any, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of every position, [capacity, head_dim], by the module's own code."""
    positions = torch.arange(cache.shape.capacity, device=module.device)[None]
    like = torch.empty(1, dtype=module.dtype, device=module.device)
    cos, sin = module.model.rotary_emb(like, positions)  # [1, capacity, turned]
    sin = sin[0].clone()
    # Half a head's roll brings (x1, x2) to (x2, x1); the rotation wants (-x2, x1).
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
        _empty([*qkv, *gate_up, attention.o_proj, feed_forward.down_proj])
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
    """Let go of the module's weights; those that are used as they are live on in the decoder."""
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


def _unsuited(reason: str) -> ModelError:
    return ModelError(f"The native decoder does not take this model: {reason}.")


MARGIN = 1.05
PASSES = 5
MOST_SECONDS = 2.0  # for either form


@torch.inference_mode()
def tune(
    decoder: Decoder, spare_bytes: int | None, clock: Callable[[], float] = perf_counter
) -> bool:
    """Keep plain weights for single rows if that pays; whether it did. spare_bytes: memory that
    may be used for them, None for as much as they need. clock: seconds, monotonic."""
    layers = [each for each in decoder.linears() if isinstance(each, PackedLinear)]
    needed = sum(layer.weight_bytes for layer in layers)
    if not layers or (spare_bytes is not None and needed > spare_bytes):
        return False
    plain = [_plain(layer, decoder) for layer in layers]
    packed_s = _pass_seconds(layers, clock)
    _keep(layers, plain)
    pays = packed_s > MARGIN * _pass_seconds(layers, clock)
    if not pays:
        _keep(layers, [None] * len(layers))
    return pays


def _plain(layer: PackedLinear, decoder: Decoder) -> torch.Tensor:
    """The layer's weight as [out, in]; an output head tied to the embedding shares its table."""
    weight: torch.Tensor = layer.dense().weight
    table = decoder.weights.embedding
    if layer is decoder.weights.head and torch.equal(weight, table):
        return table
    return weight.detach()


def _keep(layers: Sequence[PackedLinear], plain: Sequence[torch.Tensor | None]) -> None:
    for layer, weight in zip(layers, plain, strict=True):
        layer.rows_alone = weight


def _pass_seconds(layers: Sequence[PackedLinear], clock: Callable[[], float]) -> float:
    sizes = {layer.in_features for layer in layers}
    rows = {size: torch.ones(1, size, dtype=layers[0].dtype) for size in sizes}
    times, begun = list[float](), clock()
    for _ in range(PASSES + 1):  # the first warms up
        started = clock()
        for layer in layers:
            layer(rows[layer.in_features])
        times.append(clock() - started)
        if clock() - begun > MOST_SECONDS and len(times) > 1:
            break
    return median(times[1:])
