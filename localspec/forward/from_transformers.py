"""Moves the weights of a loaded transformers module into the native decoder.

Contract: `take_over` reads a module of a family it knows, builds the decoder and, on request,
empties the module layer by layer, so that no more than one layer is held twice. In what a family
differs is said by formats.native, the rest by the module's own config. A family, an activation or a
setting that is not known is refused with the reason; the transformers path then stays. The
rotations are computed by the module's own code.

Not here: the forward (decoder), what a layer holds (block), reading files (weights), layouts of a
weight (weight_layout).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from localspec.core.errors import ModelError
from localspec.formats.native import CAPS, LAYOUTS, Layout, why_not_native
from localspec.forward.block import (
    Activation,
    Block,
    Experts,
    FeedForward,
    GatedFeedForward,
    Norm,
    PlainFeedForward,
    Scale,
    Weights,
    WholeNorm,
    halves_swapped,
    pairs_swapped,
)
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.grouped import Int4Linear
from localspec.forward.layer_files import return_cached
from localspec.forward.model import window_of
from localspec.forward.nf4 import Nf4Embedding
from localspec.forward.norm import LayerNorm, RootMeanSquareNorm
from localspec.forward.weight_layout import Linear, ModuleLinear, fused, packed

Read = TypeVar("Read")
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),  # the same, in other kernels
    "relu2": lambda rows: F.relu(rows).square(),
}
HEAD_NORMS = ("use_qk_norm", "qk_layernorm")  # settings for norms of query and key heads
ROTATIONS = ("default", "linear", "llama3", "yarn")  # the others change with the length
NORM_CLASSES = frozenset(f"{name}RMSNorm" for name in (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "Phi3", "Glm", "Glm4", "Granite",
    "Olmo2", "Olmo3", "Olmoe", "Gemma", "Gemma3", "Exaone4", "Mixtral", "SeedOss", "Ernie4_5",
    "Helium", "Cwm", "Ministral", "Ministral3", "Mellum", "FlexOlmo", "Arcee", "Qwen2VL",
    "Qwen2_5_VL", "Qwen3VLText", "Qwen3VLMoeText", "GraniteMoeHybrid",
)) | {"CohereLayerNorm", "Cohere2LayerNorm", "LayerNorm", "NemotronLayerNorm1P"}  # fmt: skip


def take_over(
    module: Any,
    cache: KVCache,
    is_emptied: bool = False,
    lent: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> Decoder:
    """A decoder with the module's weights over `cache`. is_emptied: take the weights out of the
    module, which cannot run afterwards. lent: opens what gives a part its weights while it is read.
    Raises ModelError for a module that is not known."""
    config, decoder = module.config.get_text_config(), module.get_decoder()
    family, activation = _family(config, decoder, cache)
    kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ("full_attention",)))
    table: Any = decoder.embed_tokens
    embedding: Any = table if isinstance(table, Nf4Embedding) else table.weight.detach()
    cos, sin = _rotation_tables(decoder, embedding.dtype, cache, kinds, family.is_interleaved)
    reader = _Reader(family, config, activation, cache.shape.capacity, kinds, is_emptied)

    def read(part: nn.Module, reading: Callable[[Any], Read]) -> Read:
        with lent(part):
            made = reading(part)
        if is_emptied:  # fused weights need larger blocks than those that were freed
            return_cached(cache.device)
        return made

    head = module.get_output_embeddings()
    is_tied = getattr(head, "weight", None) is getattr(table, "weight", table)
    # The head first: it is the largest weight, and for a while held twice.
    own_head = packed(embedding, None) if is_tied else read(head, lambda head: fused([head]))
    blocks = tuple(read(layer, reader.block) for layer in decoder.layers)
    factor = getattr(table, "embed_scale", None)  # Gemma's, rounded as it is there
    scale = getattr(config, "embedding_multiplier", 1.0)
    weights = Weights(
        embedding=embedding,
        blocks=blocks,
        final_norm=read(getattr(decoder, family.final_norm), reader.norm),
        head=own_head,
        cos=cos,
        sin=sin,
        num_heads=config.num_attention_heads,
        num_kv_heads=cache.shape.num_kv_heads,
        head_dim=cache.shape.head_dim,
        swapped=pairs_swapped if family.is_interleaved else halves_swapped,
        embedding_scale=scale if factor is None else float(factor.to(embedding.dtype)),
        query_scale=float(decoder.layers[0].self_attn.scaling) * cache.shape.head_dim**0.5,
        logit_scale=getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0),
    )
    return Decoder(weights, cache)


def _family(config: Any, decoder: Any, cache: KVCache) -> tuple[Layout, Activation]:
    """Raises ModelError unless every setting of the blocks is known."""
    family = LAYOUTS.get(config.model_type)
    if family is None:
        reason = why_not_native(config.to_dict(), decoder.state_dict())
        raise ModelError(f"The native decoder does not take this model, because {reason}.")
    name = str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None))
    if name not in ACTIVATIONS:
        raise _unsuited(f"its activation is {name}, not {' or '.join(ACTIVATIONS)}")
    has_head_norms = any(getattr(config, name, False) for name in HEAD_NORMS)
    if has_head_norms and family.head_norms is None:
        raise _unsuited("its query and key heads have norms of their own")
    if getattr(config, "use_parallel_residual", False):
        raise _unsuited("both parts of a block read the same rows")
    if any(getattr(layer, "block_sparse_moe", None) is not None for layer in decoder.layers):
        raise _unsuited("it has experts beside a part that every token goes through")
    if decoder.rotary_emb is None:
        raise _unsuited("it has no positions")
    unscaled = _length_unscaled(config)
    if unscaled is not None and unscaled < cache.shape.capacity:
        raise _unsuited(
            f"it scales its queries beyond {unscaled} tokens; a --context of that many "
            "runs natively"
        )
    for cap in CAPS:
        if getattr(config, cap, None):
            raise _unsuited(f"its {cap} is {getattr(config, cap)}")
    if config.num_attention_heads % cache.shape.num_kv_heads:
        raise _unsuited("its query heads do not divide among its key heads")
    given = config.rope_parameters or {}
    rotations = [each for each in given.values() if isinstance(each, dict)] or [given]
    for each in rotations:
        rotation = each.get("rope_type", "default")
        if rotation not in ROTATIONS and not _is_short(config, each, cache.shape.capacity):
            raise _unsuited(f"its rotation is {rotation}, which changes with the length")
    modules = [part for layer in decoder.layers for part in layer.modules()]
    norms = {type(each).__name__ for each in (*modules, getattr(decoder, family.final_norm))}
    unknown = sorted(name for name in norms if "Norm" in name and name not in NORM_CLASSES)
    if unknown:
        raise _unsuited(f"its norm is {', '.join(unknown)}")
    return family, ACTIVATIONS[name]


def _length_unscaled(config: Any) -> int | None:
    """Up to which length queries are as they are, None for every one (Ministral 3 scales them)."""
    rotation = config.rope_parameters or {}
    scales = rotation.get("llama_4_scaling_beta")
    return int(rotation["original_max_position_embeddings"]) if scales else None


def _is_short(config: Any, rotation: Mapping[str, Any], capacity: int) -> bool:
    """Whether a rotation that changes beyond a length never does within the context."""
    original = getattr(config, "original_max_position_embeddings", None)
    original = original or rotation.get("original_max_position_embeddings") or 0
    return rotation["rope_type"] == "longrope" and capacity <= int(original)


@torch.inference_mode()
def _rotation_tables(
    decoder: Any,
    dtype: torch.dtype,
    cache: KVCache,
    kinds: Sequence[str],
    is_interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of every position, [capacity, kinds, rotated], by the module's own
    code."""
    positions = torch.arange(cache.shape.capacity, device=cache.device)[None]
    like = torch.empty(1, dtype=dtype, device=cache.device)
    rotation = decoder.rotary_emb
    is_apart = "layer_type" in inspect.signature(rotation.forward).parameters
    tables = list[tuple[torch.Tensor, torch.Tensor]]()
    for kind in kinds if is_apart else kinds[:1]:
        cos, sin = rotation(like, positions, *((kind,) if is_apart else ()))  # [1, capacity, r]
        cos, sin = cos[0], sin[0].clone()
        half = sin.shape[-1] // 2
        if torch.equal(cos[:, ::2], cos[:, 1::2]):  # by pairs already, as Cohere computes them
            pairs = (each.unflatten(1, (half, 2)) for each in (cos, sin))
            cos, sin = (each.transpose(1, 2).flatten(1) for each in pairs)
        # The swap turns (x1, x2) into (x2, x1); the rotation needs (-x2, x1).
        sin[:, :half].neg_()
        if is_interleaved:
            halves = (each.unflatten(1, (2, half)) for each in (cos, sin))
            cos, sin = (each.transpose(1, 2).flatten(1) for each in halves)
        tables.append((cos, sin))
    cosines, sines = zip(*tables, strict=True)
    return torch.stack(cosines, 1), torch.stack(sines, 1)


@dataclass(frozen=True)
class _Reader:
    """Reads the layers of one module."""

    family: Layout
    config: Any
    activation: Activation
    capacity: int
    kinds: Sequence[str]
    is_emptied: bool

    def block(self, layer: Any) -> Block:
        attention, family = layer.self_attn, self.family
        joined = [attention.qkv_proj] if family.is_qkv_joined else None
        qkv = joined or [attention.q_proj, attention.k_proj, attention.v_proj]
        return Block(
            attention_norm=self._norm_of(layer, family.attention_norm),
            qkv=self._taken(qkv),
            head_norm=self._head_norm(attention),
            output=self._taken([getattr(attention, family.output)]),
            feed_forward_norm=self._norm_of(layer, family.feed_forward_norm),
            feed_forward=self._feed_forward(getattr(layer, family.feed_forward)),
            after_attention=self._after(layer, family.after_attention),
            after_feed_forward=self._after(layer, family.after_feed_forward),
            rotation=self._table(attention) if self._is_rotated(attention) else None,
            window=self._window(attention.layer_idx),
            is_parallel=family.is_parallel,
        )

    def norm(self, module: Any) -> Norm:
        if self.family.has_layer_norms:
            eps = getattr(module, "eps", None) or module.variance_epsilon
            return LayerNorm(self._weight(module), eps, getattr(module, "bias", None))
        return RootMeanSquareNorm(self._weight(module), self.config.rms_norm_eps)

    def _weight(self, module: Any) -> torch.Tensor:
        weight: torch.Tensor = module.weight.detach()
        return weight.clone() if not self.family.norm_offset else self.family.norm_offset + weight

    def _norm_of(self, layer: Any, name: str | None) -> Norm | None:
        return None if name is None else self.norm(getattr(layer, name))

    def _after(self, layer: Any, name: str | None) -> Norm | None:
        factor = getattr(self.config, "residual_multiplier", 1.0)
        return self._norm_of(layer, name) if factor == 1.0 else Scale(factor)

    def _head_norm(self, attention: Any) -> Norm | None:
        """The norms of query and key heads as one."""
        if self.family.head_norms is None:
            return None
        num_heads, eps = self.config.num_attention_heads, self.config.rms_norm_eps
        if self.family.head_norms == "whole":
            return WholeNorm(self.norm(attention.q_norm), self.norm(attention.k_norm), num_heads)
        size, num_kv_heads = attention.head_dim, self.config.num_key_value_heads
        queries = self._weight(attention.q_norm).expand(num_heads, size)
        keys = self._weight(attention.k_norm).expand(num_kv_heads, size)
        return RootMeanSquareNorm(torch.cat((queries, keys)), eps)

    def _feed_forward(self, module: Any) -> FeedForward:
        if hasattr(module, "experts"):
            return self._experts(module)
        if self.family.plain_feed_forward is not None:
            up, down = (getattr(module, name) for name in self.family.plain_feed_forward)
            return PlainFeedForward(self._taken([up]), self._taken([down]), self.activation)
        joined = self.family.is_gate_up_joined and [getattr(module, self.family.gate_up)]
        gate_up = self._taken(joined or [module.gate_proj, module.up_proj])
        down = self._taken([getattr(module, self.family.down)])
        return GatedFeedForward(gate_up, down, self.activation)

    def _experts(self, module: Any) -> Experts:
        """Of Qwen3's kind: [experts, 2 f, d] and [experts, d, f]. Mixtral's shares always add up
        to 1."""
        router, held = module.gate, module.experts
        pairs = zip(held.gate_up_proj.detach(), held.down_proj.detach(), strict=True)
        experts = tuple(
            GatedFeedForward(packed(gate_up, None), packed(down, None), self.activation)
            for gate_up, down in pairs
        )
        if self.is_emptied:
            _drop(held, "gate_up_proj", "down_proj")
        weight = router.weight.detach()
        is_normalised = getattr(router, "norm_topk_prob", True)
        return Experts(packed(weight, None), experts, router.top_k, is_normalised)

    def _is_rotated(self, attention: Any) -> bool:
        if self.family.rotates_windows and window_of(self.config) is not None:
            return self._sees_window(attention.layer_idx)
        return bool(getattr(attention, "use_rope", True))  # transformers' own, SmolLM3

    def _table(self, attention: Any) -> int:
        kinds = getattr(self.config, "layer_types", None)
        has_several = isinstance(next(iter(self.config.rope_parameters.values()), None), dict)
        return self.kinds.index(kinds[attention.layer_idx]) if kinds and has_several else 0

    def _window(self, layer: int) -> int | None:
        window = window_of(self.config)
        is_cut = window is not None and window < self.capacity
        return window if is_cut and self._sees_window(layer) else None

    def _sees_window(self, layer: int) -> bool:
        kinds = getattr(self.config, "layer_types", None)
        return kinds is None or kinds[layer] == "sliding_attention"

    def _taken(self, layers: list[Any]) -> Linear:
        made = fused(layers)
        is_used = isinstance(made, ModuleLinear) and made.modules[0] is layers[0]
        for layer in layers if self.is_emptied and not is_used else ():
            _drop(layer, *(layer.TENSORS if isinstance(layer, Int4Linear) else ("weight",)))
        return made


def _drop(module: Any, *names: str) -> None:
    """What is used unchanged stays alive in the decoder."""
    for name in names:
        weight = getattr(module, name)
        setattr(module, name, nn.Parameter(weight.data.new_empty(0), requires_grad=False))


def _unsuited(reason: str) -> ModelError:
    return ModelError(f"The native decoder does not take this model: {reason}.")
