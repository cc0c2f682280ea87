"""One decoder layer of a head: the same function while it is trained and while it drafts.

Contract: `DecoderLayer` is Llama's layer without its first norm, or Qwen3's where its parts have
norms of queries and keys. The rows that queries, keys and values are made of and the stream they
are added to are given apart, for heads differ in how they make both from a hidden state and an
embedding. Its products and norms are callables by name: torch's modules in training
(`trainable_parts`), packed layers when drafting (`packed_parts`). `BlockLayer` is a layer of the
native decoder as a head runs it. `llama_layout` names the tensors of a published layer.

Not here: how a head makes its rows (eagle, mtp), attention in training (training.unrolled).
Source: Touvron et al. 2023 (arXiv 2302.13971); rotation, arXiv 2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from localspec.forward.block import Attention, Block
from localspec.forward.heads.files import HeadSettings, Shapes, TensorLayout
from localspec.forward.mixer import LayerAttend, halves_swapped
from localspec.forward.norm import RootMeanSquareNorm
from localspec.forward.row_attention import Heads
from localspec.weights.dense import dense_linear
from localspec.weights.linear import Linear

RowFunction = Callable[[torch.Tensor], torch.Tensor]  # [..., in] -> [..., out]


class HeadLayer(Protocol):
    """The decoder layer of a head. `heads` says what its cache holds."""

    @property
    def heads(self) -> Heads: ...

    @property
    def reads_host(self) -> bool:
        """Whether its forward waits for the device, which no graph can hold."""
        ...

    def __call__(
        self,
        mixed: torch.Tensor,
        stream: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: LayerAttend,
    ) -> torch.Tensor:
        """mixed [..., in], which queries, keys and values are made of, stream [..., d], which they
        are added to, cos and sin [..., 1, rotated] -> stream [..., d]."""
        ...


@dataclass(frozen=True)
class LayerShape:
    """input_size: width of the rows that queries, keys and values are made of."""

    hidden_size: int
    input_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float

    @classmethod
    def own(cls, settings: HeadSettings, hidden_size: int) -> LayerShape:
        """As our own format says it. Raises ModelError."""
        return cls(
            hidden_size,
            hidden_size,
            settings.whole("ffn_size"),
            settings.whole("num_heads"),
            settings.whole("num_kv_heads"),
            settings.whole("head_dim"),
            settings.fraction("norm_epsilon"),
        )._checked(settings)

    @classmethod
    def published(cls, config: HeadSettings, hidden_size: int, input_size: int) -> LayerShape:
        """As the config of a Llama says it. Raises ModelError."""
        config.require("hidden_act", "silu")
        num_heads = config.whole("num_attention_heads")
        return cls(
            hidden_size,
            input_size,
            config.whole("intermediate_size"),
            num_heads,
            config.whole("num_key_value_heads", num_heads),
            config.whole("head_dim", hidden_size // num_heads),
            config.fraction("rms_norm_eps", 1e-6),
        )._checked(config)

    def _checked(self, settings: HeadSettings) -> LayerShape:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise settings.unfit(
                f"its {self.num_heads} attention heads of {self.head_dim} do not divide among "
                f"{self.num_kv_heads} key heads, or into two halves"
            )
        return self

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def shapes(self) -> Shapes:
        """The layer's tensors. Queries stand before keys, keys before values, gate before up."""
        return {
            "qkv.weight": (self.query_size + 2 * self.key_size, self.input_size),
            "output.weight": (self.hidden_size, self.query_size),
            "feed_forward_norm.weight": (self.hidden_size,),
            "gate_up.weight": (2 * self.ffn_size, self.hidden_size),
            "down.weight": (self.hidden_size, self.ffn_size),
        }


def require_whole_context(config: HeadSettings, context_length: int) -> None:
    """Raises ModelError for a layer that sees less than the context. Settings as in transformers:
    Mistral names a window and no kinds of layers, Qwen has a switch."""
    window, kinds = config.values.get("sliding_window"), config.values.get("layer_types")
    has_window = config.values.get("use_sliding_window", True)
    if isinstance(kinds, list) and kinds:
        has_window = "sliding_attention" in kinds
    if has_window and isinstance(window, int) and window < context_length:
        raise config.unfit(
            f"its layer sees a sliding window of {window} tokens, and the context is "
            f"{context_length}. With --context {window} it can be used"
        )


def llama_layout(layer: LayerShape, has_bias: bool) -> TensorLayout:
    """The same tensors under the names of transformers' Llama and Qwen2. has_bias: of queries, keys
    and values."""
    width, ffn_size = layer.hidden_size, layer.ffn_size
    sides = {"q": layer.query_size, "k": layer.key_size, "v": layer.key_size}
    projections = {f"self_attn.{side}_proj": size for side, size in sides.items()}
    layout: TensorLayout = {
        "qkv.weight": {f"{p}.weight": (size, layer.input_size) for p, size in projections.items()},
        "output.weight": {"self_attn.o_proj.weight": (width, layer.query_size)},
        "feed_forward_norm.weight": {"post_attention_layernorm.weight": (width,)},
        "gate_up.weight": {f"mlp.{p}_proj.weight": (ffn_size, width) for p in ("gate", "up")},
        "down.weight": {"mlp.down_proj.weight": (width, ffn_size)},
    }
    biases: TensorLayout = {"qkv.bias": {f"{p}.bias": (size,) for p, size in projections.items()}}
    return layout | biases if has_bias else layout


@dataclass(frozen=True)
class DecoderLayer:
    """The layer's function, over whatever computes its parts."""

    shape: LayerShape
    parts: Mapping[str, RowFunction]

    @property
    def heads(self) -> Heads:
        return Heads(self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim)

    @property
    def reads_host(self) -> bool:
        return any(getattr(part, "reads_host", False) for part in self.parts.values())

    def __call__(
        self,
        mixed: torch.Tensor,
        stream: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: LayerAttend,
    ) -> torch.Tensor:
        """See HeadLayer; cos and sin are as wide as a head."""
        heads, kv_heads, size = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        made = self.parts["qkv"](mixed)
        rows = made.view(*made.shape[:-1], -1, size)  # [..., heads + 2 kv_heads, head_dim]
        turned, values = torch.split(rows, [heads + kv_heads, kv_heads], dim=-2)
        if "query_norm" in self.parts:
            queries, keys = torch.split(turned, [heads, kv_heads], dim=-2)
            both = (self.parts["query_norm"](queries), self.parts["key_norm"](keys))
            turned = torch.cat(both, dim=-2)
        turned = turned * cos + torch.roll(turned, size // 2, -1) * sin
        queries, keys = torch.split(turned, [heads, kv_heads], dim=-2)
        seen = attend(queries, torch.cat((keys, values), dim=-2))
        stream = stream + self.parts["output"](seen)
        normed = self.parts["feed_forward_norm"](stream)
        gate, up = self.parts["gate_up"](normed).chunk(2, dim=-1)
        return stream + self.parts["down"](F.silu(gate) * up)


@dataclass(frozen=True)
class BlockLayer:
    """A layer of the native decoder, whose heads turn in halves. Its first norm is left to the head
    that runs it."""

    block: Block

    @property
    def heads(self) -> Heads:
        assert isinstance(self.block.mixer, Attention), "a head reads keys and values"
        return self.block.mixer.heads

    @property
    def reads_host(self) -> bool:
        is_waiting = any(linear.reads_host for linear in self.block.linears)
        return is_waiting or self.block.feed_forward.reads_host

    def __call__(
        self,
        mixed: torch.Tensor,
        stream: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: LayerAttend,
    ) -> torch.Tensor:
        """See HeadLayer; rows are [n, d]."""
        return self.block.add_to(mixed, stream, ((cos, sin),), halves_swapped, attend)


def trainable_parts(
    shapes: Shapes, norm_epsilon: float, generator: torch.Generator
) -> nn.ModuleDict:
    """A module for each weight of `shapes`, fp32: small normal products, norms of one."""
    made = nn.ModuleDict()
    for name, shape in shapes.items():
        part = name.removesuffix(".weight")
        if len(shape) == 1:
            made[part] = nn.RMSNorm(shape[0], eps=norm_epsilon)
            continue
        product = nn.Linear(shape[1], shape[0], bias=False)
        with torch.no_grad():
            product.weight.copy_(torch.randn(shape, generator=generator) * shape[1] ** -0.5)
        made[part] = product
    return made


def packed_parts(
    tensors: Mapping[str, torch.Tensor], norm_epsilon: float
) -> dict[str, Linear | RootMeanSquareNorm]:
    """The parts for drafting, from tensors `<part>.weight` and, of a product, `<part>.bias`."""
    made = dict[str, Linear | RootMeanSquareNorm]()
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight")
        if tensor.ndim == 2:
            made[part] = dense_linear(tensor, tensors.get(f"{part}.bias"))
        elif name.endswith(".weight"):
            made[part] = RootMeanSquareNorm(tensor, norm_epsilon)
    return made


@dataclass(frozen=True)
class Rotation:
    """cos and signed sin of every position, [capacity, head_dim]: all that is left of the rotation
    is a roll by half a head."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(
        cls, frequencies: torch.Tensor, capacity: int, dtype: torch.dtype, scale: float = 1.0
    ) -> Rotation:
        """frequencies: [head_dim / 2] fp32, on the device. scale: of long-context variants."""
        places = torch.arange(capacity, device=frequencies.device, dtype=torch.float32)
        angles = places[:, None] * frequencies  # [capacity, head_dim / 2]
        sin = torch.cat((-angles.sin(), angles.sin()), dim=-1) * scale
        cos = torch.cat((angles.cos(), angles.cos()), dim=-1) * scale
        return cls(cos.to(dtype), sin.to(dtype))

    @property
    def table_bytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def at(self, positions: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 1, head_dim] each, of n positions."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def plain_frequencies(head_dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Of an unscaled rotation: [head_dim / 2] fp32."""
    half = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    return torch.pow(base, -half / head_dim)
