"""A native decoder for models of Llama's shape: tokens in, logits out, nothing else per token.

Contract: the same as `model.CausalLM` (and its reference): `forward` appends n slots to the cache
and returns fp32 logits. One product for query, key and value, one for gate and up; keys and
values are written into the preallocated cache and read from it in place; several segments, each
with a cache of its own, share the products and are attended to one by one. `run` also returns
hidden states of the layers that are asked for. Rows that a draft by the first layers has begun
(cache.begun) are gone on with from where it left them, where they are a prefix of a chain.

Not here: the first layers as a model (partial_forward), taking weights over (from_transformers),
captured graphs (graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from localspec.forward.cache import Begun, KVCache
from localspec.forward.features import LAST, Features
from localspec.forward.linear import Linear
from localspec.forward.norm import RootMeanSquareNorm
from localspec.forward.tree import additive_mask, depths

# layer, queries [n, heads, head_dim], keys and values [n, 2 * kv_heads, head_dim]
# -> [n, heads * head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Block:
    """One layer. head_norm: [heads + kv_heads, head_dim] for queries and keys, where the family
    has one. is_rotated: whether positions are turned into its queries and keys."""

    attention_norm: RootMeanSquareNorm
    qkv: Linear
    head_norm: RootMeanSquareNorm | None
    output: Linear
    feed_forward_norm: RootMeanSquareNorm
    gate_up: Linear
    down: Linear
    is_rotated: bool = True

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.output, self.gate_up, self.down)

    @property
    def weight_bytes(self) -> int:
        norms = (self.attention_norm, self.head_norm, self.feed_forward_norm)
        held = sum(norm.weight_bytes for norm in norms if norm is not None)
        return held + sum(linear.weight_bytes for linear in self.linears)


@dataclass(frozen=True)
class Weights:
    """A whole model. embedding: [V, d]. cos, sin: [capacity, head_dim], the sign of the rotation
    in `sin`, so that one roll by half a head stands for it."""

    embedding: torch.Tensor
    blocks: tuple[Block, ...]
    final_norm: RootMeanSquareNorm
    head: Linear
    cos: torch.Tensor
    sin: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> int:
        tables = (self.embedding, self.cos, self.sin)
        held = sum(t.numel() * t.element_size() for t in tables) + self.final_norm.weight_bytes
        return held + self.head.weight_bytes + sum(block.weight_bytes for block in self.blocks)


@dataclass(frozen=True)
class Segment:
    """Tokens to append to one cache. parents: as in CausalLM.forward, None for a chain.
    num_logits: how many of the last tokens need logits, None for all."""

    cache: KVCache
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    num_logits: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Output:
    """logits: for each segment [num_logits, V] fp32. hidden: layer -> [all rows, d], the residual
    after it; layer -1 is what the head reads, normalised."""

    logits: tuple[torch.Tensor, ...]
    hidden: dict[int, torch.Tensor]


class Decoder:
    """Weights and one cache: a LanguageModel."""

    def __init__(self, weights: Weights, cache: KVCache) -> None:
        self.weights = weights
        self.cache = cache
        self.device = weights.embedding.device
        self.vocab_size = weights.embedding.shape[0]

    @property
    def weight_bytes(self) -> int:
        return self.weights.weight_bytes

    def follow(self, layers: Sequence[int]) -> Features:
        """Keep the hidden states of these layers beside the cache from now on."""
        held = self.cache.features
        if held is None:
            embedding = self.weights.embedding
            held = Features(
                self.cache.shape.capacity, embedding.shape[1], embedding.dtype, self.device
            )
            self.cache.features = held
        held.follow(layers)
        return held

    @torch.inference_mode()
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of normalised rows: [n, d] -> [n, V] fp32."""
        return self.weights.head(rows).float()

    def linears(self) -> tuple[Linear, ...]:
        """Every product of one step, the output head last."""
        blocks = (linear for block in self.weights.blocks for linear in block.linears)
        return (*blocks, self.weights.head)

    def with_linears(self, change: Callable[[Linear], Linear]) -> Decoder:
        """A decoder over the same cache with other linear layers; all else is shared."""
        blocks = tuple(
            replace(
                block,
                qkv=change(block.qkv),
                output=change(block.output),
                gate_up=change(block.gate_up),
                down=change(block.down),
            )
            for block in self.weights.blocks
        )
        return Decoder(replace(self.weights, blocks=blocks), self.cache)

    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        """See CausalLM.forward: [num_logits, V] fp32. Raises CacheError at the context's end."""
        return self.run([Segment(self.cache, tokens, parents, num_logits)]).logits[0]

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment], keep: Sequence[int] = ()) -> Output:
        """All segments in one pass. keep: layers whose hidden states are returned. The segments'
        caches must differ. Raises CacheError, with every cache as it was."""
        wanted = frozenset(keep).union(*(_followed(segment) for segment in segments))
        begun = self._begun(segments, wanted)  # opening the caches makes it void
        with ExitStack() as opened:
            starts = [opened.enter_context(s.cache.append(s.tokens)) for s in segments]
            ids = [token for segment in segments for token in segment.tokens]
            cos, sin = self._rotations(segments, starts)
            attend = self._attention(segments, starts)
            if begun is None:
                rows, hidden = self.layers(self.embed(ids), cos, sin, attend, wanted)
            else:
                rest = Segment(segments[0].cache, ids[begun.size :])
                below = self._attention([rest], [starts[0] + begun.size])
                rows, hidden = self._finish(begun, ids, cos, sin, (below, attend), wanted)
            logits = self._logits(rows, segments, hidden, LAST in wanted)
            _write_features(segments, starts, hidden)
        return Output(logits, hidden)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(ids, device=self.device)
        return F.embedding(index, self.weights.embedding)  # [n, d]

    def layers(
        self,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        keep: frozenset[int] = frozenset(),
        first: int = 0,
        end: int | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Through the blocks from `first` to before `end`, by default all: rows [n, d], cos and
        sin [n, 1, head_dim] -> [n, d] and what was to be kept. Tensors in, tensors out: the part
        that a graph captures."""
        hidden = dict[int, torch.Tensor]()
        for layer, block in enumerate(self.weights.blocks[first:end], first):
            queries, keys_values = self._projected(block, rows, cos, sin)
            rows = block.output.add_to(attend(layer, queries, keys_values), rows)
            gate, up = block.gate_up(block.feed_forward_norm(rows)).chunk(2, dim=-1)
            rows = block.down.add_to(F.silu(gate).mul_(up), rows)
            if layer in keep:
                hidden[layer] = rows
        return rows, hidden

    def _begun(self, segments: Sequence[Segment], wanted: frozenset[int]) -> Begun | None:
        """What a single chain may go on from."""
        chain = segments[0]
        if len(segments) > 1 or chain.parents is not None or chain.cache.begun is None:
            return None
        return chain.cache.begun.within(self.weights, chain.cache.length, chain.tokens, wanted)

    def _finish(
        self,
        begun: Begun,
        ids: Sequence[int],
        cos: torch.Tensor,
        sin: torch.Tensor,
        attends: tuple[Attend, Attend],
        wanted: frozenset[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As `layers`, of a chain of tokens that begins with the rows of `begun`: the lower blocks
        for the others, the upper ones for all. attends: of the others, and of all."""
        last, size = begun.depth - 1, begun.size
        rest = (self.embed(ids[size:]), cos[size:], sin[size:], attends[0])
        _, lower = self.layers(*rest, wanted | {last}, end=begun.depth)
        hidden = {layer: torch.cat((begun.hidden[layer], new)) for layer, new in lower.items()}
        rows, upper = self.layers(hidden[last], cos, sin, attends[1], wanted, first=begun.depth)
        return rows, {**hidden, **upper}

    def _projected(
        self, block: Block, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [n, heads, head_dim]; keys then values [n, 2 * kv_heads, head_dim]."""
        shape = self.weights
        qkv = block.qkv(block.attention_norm(rows)).view(rows.shape[0], -1, shape.head_dim)
        turned = qkv[:, : shape.num_heads + shape.num_kv_heads]  # queries and keys, a view
        if block.head_norm is not None:
            turned.copy_(block.head_norm(turned))
        if block.is_rotated:
            rolled = torch.roll(turned, shape.head_dim // 2, -1)
            turned.mul_(cos).addcmul_(rolled, sin)
        return qkv[:, : shape.num_heads], qkv[:, shape.num_heads :]

    def _rotations(
        self, segments: Sequence[Segment], starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every row's position, [n, 1, head_dim]."""
        cos, sin = self.weights.cos, self.weights.sin
        if len(segments) == 1 and segments[0].parents is None:
            span = slice(starts[0], starts[0] + segments[0].num_rows)
            return cos[span].unsqueeze(1), sin[span].unsqueeze(1)
        places = [
            start + depth
            for segment, start in zip(segments, starts, strict=True)
            for depth in (
                range(segment.num_rows) if segment.parents is None else depths(segment.parents)
            )
        ]
        index = torch.tensor(places, device=self.device)
        return cos[index].unsqueeze(1), sin[index].unsqueeze(1)

    def _attention(self, segments: Sequence[Segment], starts: Sequence[int]) -> Attend:
        """Attention over each segment's own cache."""
        groups = self.weights.num_heads // self.weights.num_kv_heads
        spans = [
            _Span(segment, start, groups) for segment, start in zip(segments, starts, strict=True)
        ]
        if len(spans) == 1:
            return spans[0].attend

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            parts, first = list[torch.Tensor](), 0
            for span in spans:
                rows = slice(first, first + span.num_rows)
                parts.append(span.attend(layer, queries[rows], keys_values[rows]))
                first += span.num_rows
            return torch.cat(parts)

        return attend

    def _logits(
        self,
        rows: torch.Tensor,
        segments: Sequence[Segment],
        hidden: dict[int, torch.Tensor],
        keeps_last: bool,
    ) -> tuple[torch.Tensor, ...]:
        counts = [s.num_rows if s.num_logits is None else s.num_logits for s in segments]
        if keeps_last:
            rows = hidden[LAST] = self.weights.final_norm(rows)
        wanted, first = list[torch.Tensor](), 0
        for segment, count in zip(segments, counts, strict=True):
            end = first + segment.num_rows
            wanted.append(rows[end - count : end])
            first = end
        chosen = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        normalised = chosen if keeps_last else self.weights.final_norm(chosen)
        logits = self.weights.head(normalised).float()
        return (logits,) if len(counts) == 1 else torch.split(logits, counts)


def _followed(segment: Segment) -> tuple[int, ...]:
    features = segment.cache.features
    return () if features is None else features.layers


def _write_features(
    segments: Sequence[Segment], starts: Sequence[int], hidden: dict[int, torch.Tensor]
) -> None:
    first = 0
    for segment, start in zip(segments, starts, strict=True):
        end = first + segment.num_rows
        if segment.cache.features is not None:
            rows = {layer: hidden[layer][first:end] for layer in _followed(segment)}
            segment.cache.features.write(start, rows)
        first = end


class _Span:
    """One segment's attention: writes its keys and values, reads its cache up to its end."""

    def __init__(self, segment: Segment, start: int, groups: int) -> None:
        self.num_rows = segment.num_rows
        self._cache = segment.cache
        self._start, self._end = start, start + segment.num_rows
        self._groups = groups
        mask = additive_mask(
            segment.num_rows, segment.parents, start, segment.cache.dtype, segment.cache.device
        )
        # Query heads of one key head stand as further rows, group by group.
        self._mask = None if mask is None else mask.repeat(1, 1, groups, 1)

    def attend(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.write(layer, self._start, self._end, keys_values)
        num_rows, heads, head_dim = queries.shape
        # [n, kv_heads, groups, dim] -> [1, kv_heads, groups * n, dim]
        grouped = queries.view(num_rows, -1, self._groups, head_dim).permute(1, 2, 0, 3)
        rows = grouped.reshape(1, heads // self._groups, self._groups * num_rows, head_dim)
        seen = F.scaled_dot_product_attention(
            rows.to(keys.dtype), keys, values, attn_mask=self._mask
        )
        out = seen.view(-1, self._groups, num_rows, head_dim).permute(2, 0, 1, 3)
        return out.reshape(num_rows, heads * head_dim).to(queries.dtype)
