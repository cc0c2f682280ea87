"""A Llama in plain torch that can be trained.

Contract: RMSNorm, rotary positions (half rotation), causal attention, SwiGLU, tied embeddings, no
biases: the same function as transformers' LlamaForCausalLM, with fused projections for speed.
`export` maps the names. Its cache serves prompts of one length only (sampling).

localspec.forward.decoder cannot take its place: it runs one sequence under inference mode over
packed weights, so nothing can be differentiated through it. transformers' own model has separate
projections and cannot leave out single layers.
Source: Touvron et al. 2023 (arXiv 2302.13971).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder. head_size is hidden_size / num_heads."""

    vocabulary_size: int
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    context_length: int = 4096
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


LayerCache = tuple[Tensor, Tensor]


def rotary_tables(
    shape: ModelShape, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for positions. positions: [n]. Result: [n, head_size] each."""
    half = torch.arange(0, shape.head_size, 2, device=positions.device, dtype=torch.float32)
    frequencies = shape.rope_base ** (-half / shape.head_size)
    angles = positions.float()[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)  # [n, head_size]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn queries or keys by their position. x: [B, heads, n, head_size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Block(nn.Module):
    """One layer: attention and SwiGLU, each behind a norm and added to the stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.attention_norm = nn.RMSNorm(hidden, eps=shape.norm_epsilon)
        self.ffn_norm = nn.RMSNorm(hidden, eps=shape.norm_epsilon)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * shape.ffn_size, bias=False)
        self.down = nn.Linear(shape.ffn_size, hidden, bias=False)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """Run the layer. x: [B, n, H]; past: keys, values [B, heads, m, head_size] so far."""
        mixed, cache = self.attend(self.attention_norm(x), tables, past)
        x = x + mixed
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up), cache

    def attend(
        self, x: Tensor, tables: tuple[Tensor, Tensor], past: LayerCache | None
    ) -> tuple[Tensor, LayerCache]:
        """Mix positions causally; with a past, x must be a single position."""
        batch, length, hidden = x.shape
        split = self.qkv(x).view(batch, length, 3, self.shape.num_heads, self.shape.head_size)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # [B, heads, n, head_size]
        q, k = rotate(q, *tables), rotate(k, *tables)
        if past is not None:
            assert length == 1, (
                "a past needs one position at a time: is_causal would misplace the mask"
            )
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, hidden)), (k, v)


class Decoder(nn.Module):
    """Embedding, blocks, final norm; the head is the embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)

    def initialise(self, seed: int) -> None:
        """Draw small normal weights; projections back into the stream are scaled by depth."""
        generator = torch.Generator().manual_seed(seed)
        scale = (2 * self.shape.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            deviation = 0.02 * (scale if name.endswith(("out.weight", "down.weight")) else 1.0)
            with torch.no_grad():
                drawn = torch.randn(parameter.shape, generator=generator) * deviation
                parameter.copy_(drawn.to(parameter.device, parameter.dtype))

    def hidden(
        self, tokens: Tensor, past: list[LayerCache] | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Return final hidden states [B, n, H] and the cache. tokens: [B, n]."""
        start = 0 if past is None else past[0][0].shape[2]
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        tables = rotary_tables(self.shape, positions, x.dtype)
        caches = []
        for place, block in enumerate(self.blocks):
            x, cache = block(x, tables, None if past is None else past[place])
            caches.append(cache)
        return self.norm(x), caches

    def hidden_with_exit(
        self, tokens: Tensor, exit_layers: int, skipped: frozenset[int]
    ) -> tuple[Tensor, Tensor]:
        """Return final hidden states and those after the first `exit_layers` layers, [B, n, H]
        each, both behind the final norm. tokens: [B, n]. skipped: layers left out of this pass."""
        tables = rotary_tables(
            self.shape,
            torch.arange(tokens.shape[1], device=tokens.device),
            self.embedding.weight.dtype,
        )
        x = left = self.embedding(tokens)
        for place, block in enumerate(self.blocks):
            if place not in skipped:
                x, _ = block(x, tables)
            if place + 1 == exit_layers:
                left = x
        return self.norm(x), self.norm(left)

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H]."""
        return functional.linear(hidden, self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits. tokens: [B, n]; result: [B, n, V]."""
        return self.head(self.hidden(tokens)[0])


def num_parameters(model: nn.Module) -> int:
    """Count the weights; tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
