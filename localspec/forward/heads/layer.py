"""One decoder layer of a head: the same function while it is trained and while it drafts.

Contract: `DecoderLayer` is Llama's layer without its first norm. What queries, keys and values are
made of and the stream they are added to are given apart, for heads differ in how they make both
from a hidden state and an embedding. Its products and norms are callables by name: torch's
modules in training (`trainable_parts`), packed layers when drafting (`packed_parts`). `attend`
decides what a row sees: `cached_attention` reads and writes a KVCache of one layer.

Not here: how a head makes its rows (eagle, mtp), attention in training (training.unrolled).
Source: Touvron et al. 2023 (arXiv 2302.13971); rotation, arXiv 2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from localspec.forward.cache import KVCache, KVShape, kv_dtype
from localspec.forward.norm import RootMeanSquareNorm
from localspec.forward.weight_layout import Linear, packed

Rows = Callable[[torch.Tensor], torch.Tensor]  # [..., in] -> [..., out]
# queries [..., heads, head_dim], keys and values [..., kv_heads, head_dim]
# -> [..., heads * head_dim]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class LayerShape:
    """input_size: width of what queries, keys and values are made of."""

    hidden_size: int
    input_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float

    def shapes(self) -> Shapes:
        """The layer's tensors. Queries stand before keys, keys before values, gate before up."""
        projected = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return {
            "qkv.weight": (projected, self.input_size),
            "output.weight": (self.hidden_size, self.num_heads * self.head_dim),
            "feed_forward_norm.weight": (self.hidden_size,),
            "gate_up.weight": (2 * self.ffn_size, self.hidden_size),
            "down.weight": (self.hidden_size, self.ffn_size),
        }


@dataclass(frozen=True)
class DecoderLayer:
    """The layer's function, over whatever computes its parts."""

    shape: LayerShape
    qkv: Rows
    output: Rows
    feed_forward_norm: Rows
    gate_up: Rows
    down: Rows

    @classmethod
    def of(cls, shape: LayerShape, parts: Mapping[str, Rows]) -> DecoderLayer:
        return cls(
            shape,
            parts["qkv"],
            parts["output"],
            parts["feed_forward_norm"],
            parts["gate_up"],
            parts["down"],
        )

    def __call__(
        self,
        mixed: torch.Tensor,
        stream: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """mixed [..., in], stream [..., d], cos and sin [..., 1, head_dim] -> stream [..., d]."""
        heads, kv_heads, size = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        made = self.qkv(mixed)
        rows = made.view(*made.shape[:-1], -1, size)  # [..., heads + 2 kv_heads, head_dim]
        turned, values = torch.split(rows, [heads + kv_heads, kv_heads], dim=-2)
        turned = turned * cos + torch.roll(turned, size // 2, -1) * sin
        queries, keys = torch.split(turned, [heads, kv_heads], dim=-2)
        stream = stream + self.output(attend(queries, keys, values))
        gate, up = self.gate_up(self.feed_forward_norm(stream)).chunk(2, dim=-1)
        return stream + self.down(F.silu(gate) * up)


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


def module_parts(modules: nn.ModuleDict) -> dict[str, Rows]:
    """The same as callables by name."""
    return dict(modules.items())


def packed_parts(
    tensors: Mapping[str, torch.Tensor], norm_epsilon: float
) -> dict[str, Linear | RootMeanSquareNorm]:
    """The parts for drafting, from tensors `<part>.weight` and, of a product, `<part>.bias`."""
    made = dict[str, Linear | RootMeanSquareNorm]()
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight")
        if tensor.ndim == 2:
            made[part] = packed(tensor, tensors.get(f"{part}.bias"))
        elif name.endswith(".weight"):
            made[part] = RootMeanSquareNorm(tensor, norm_epsilon)
    return made


@dataclass(frozen=True)
class Rotation:
    """cos and signed sin of every position, [capacity, head_dim]: one roll by half a head stands
    for the rotation."""

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
        return sum(table.numel() * table.element_size() for table in (self.cos, self.sin))

    def at(self, positions: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 1, head_dim] each, of n positions."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def plain_frequencies(head_dim: int, base: float, device: torch.device) -> torch.Tensor:
    """Of an unscaled rotation: [head_dim / 2] fp32."""
    half = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    return torch.pow(base, -half / head_dim)


def layer_cache(
    shape: LayerShape, capacity: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """An empty cache for one such layer."""
    held = KVShape(1, shape.num_kv_heads, shape.head_dim, capacity)
    return KVCache(held, kv_dtype(dtype, device), device)


def cached_attention(cache: KVCache, start: int, mask: torch.Tensor | None) -> Attend:
    """Attention of n rows over the cache's one layer, their keys and values written from slot
    `start` on. mask: added to the scores, [1, 1, n, start + n]; None where every row sees all."""

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows = torch.cat((keys, values), dim=1)  # [n, 2 kv_heads, head_dim]
        all_keys, all_values = cache.write(0, start, start + rows.shape[0], rows)
        seen = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None].to(all_keys.dtype),  # [1, heads, n, head_dim]
            all_keys,
            all_values,
            attn_mask=mask,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return seen[0].transpose(0, 1).flatten(1).to(queries.dtype)

    return attend
