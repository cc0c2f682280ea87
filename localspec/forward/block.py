"""The parts of a decoder, as data: what its layers hold and in what they differ.

Contract: a `Block` is attention and a feed-forward part, each added to what goes through the model.
All in which families differ stands here as a value: norms before a part, after it or both; norms
of query and key heads; which table rotates a layer and how many numbers of a head; how far back a
layer sees; scales; experts. The decoder has one path for all of them.

Not here: the forward (decoder), making blocks of files (builder).
Source: Llama (arXiv 2302.13971), Gemma 3 (arXiv 2503.19786), OLMo 2 (arXiv 2501.00656), Qwen3
(arXiv 2505.09388), Command R7B (Cohere 2), and the modelling files of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from localspec.forward.activations import Activation
from localspec.forward.mixer import LayerAttend, Mixer, Swap, Table
from localspec.forward.per_layer_inputs import PerLayerGate
from localspec.forward.picks import Picks
from localspec.forward.router import Router, no_copy
from localspec.forward.row_attention import Heads
from localspec.weights.dense import fewest_rows
from localspec.weights.linear import Linear, bytes_of


class Norm(Protocol):
    """Rows, or heads of rows, to as many."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class HeadNorm(Norm, Protocol):
    """A norm of heads where they stand."""

    def norm_(self, rows: torch.Tensor) -> None:
        """Write the result to the rows themselves."""
        ...


class Scale:
    """Multiplies every row: what Granite does where others have a norm."""

    weight_bytes = 0

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.factor


class WholeNorm:
    """Norms of all query heads as one row, and of all key heads: [n, heads + kv_heads, head_dim] to
    the same."""

    def __init__(self, queries: Norm, keys: Norm, num_heads: int) -> None:
        self._queries, self._keys, self._num_heads = queries, keys, num_heads
        self.weight_bytes = queries.weight_bytes + keys.weight_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        queries, keys = rows[:, : self._num_heads], rows[:, self._num_heads :]
        normed = (self._queries(queries.flatten(1)), self._keys(keys.flatten(1)))
        return torch.cat(normed, dim=-1).view(rows.shape)

    def norm_(self, rows: torch.Tensor) -> None:
        """See HeadNorm."""
        rows.copy_(self(rows))


class FeedForward(Protocol):
    """The second part of a block: [n, d] to [n, d]."""

    @property
    def linears(self) -> tuple[Linear, ...]: ...

    @property
    def reads_host(self) -> bool:
        """Whether its forward waits for the device, which no graph can hold."""
        ...

    def with_linears(self, change: Callable[[Linear], Linear]) -> FeedForward: ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...


class Mixture(FeedForward, Protocol):
    """A feed-forward part of which a row goes through some experts only."""

    def mixed(self, rows: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of rows, [n, d]. routed: the rows as the router reads
        them."""
        ...


@dataclass(frozen=True)
class PlainFeedForward:
    """down(activation(up))."""

    up: Linear
    down: Linear
    activation: Activation
    reads_host = False

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.up, self.down)

    def with_linears(self, change: Callable[[Linear], Linear]) -> PlainFeedForward:
        return replace(self, up=change(self.up), down=change(self.down))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(self._inner(rows))

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.down.add_to(self._inner(rows), residual)

    def _inner(self, rows: torch.Tensor) -> torch.Tensor:
        return self.activation(self.up(rows))


@dataclass(frozen=True)
class GatedFeedForward(PlainFeedForward):
    """down(activation(gate) * up). up: gate and up as one product."""

    def _inner(self, rows: torch.Tensor) -> torch.Tensor:
        return self.activated(self.up(rows))

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return what `down` reads, [n, f]. gate_up: the product `up`, [n, 2 f]."""
        return gated(gate_up, self.activation)


@dataclass(frozen=True)
class ClampedFeedForward(GatedFeedForward):
    """down(activation(gate) * (up + 1)), gate at most `limit` and up at most so far from zero."""

    limit: float

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See GatedFeedForward."""
        return clamped(gate_up, self.activation, self.limit)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return what `down` reads, [n, f], of gate and up side by side, [n, 2 f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate).mul_(up)


def clamped(gate_up: torch.Tensor, activation: Activation, limit: float) -> torch.Tensor:
    """Return the same where gate and up have a limit, see ClampedFeedForward."""
    gate, up = gate_up.chunk(2, dim=-1)
    up = up.clamp(-limit, limit).add_(1.0)
    return activation(gate.clamp(max=limit)).mul_(up)


@dataclass(frozen=True)
class Experts:
    """A mixture: each row goes through the experts that the router chooses. An expert reads its
    weights once for all rows that chose it; a row's sum is in the experts' order, whatever other
    rows chose."""

    router: Router
    experts: tuple[GatedFeedForward, ...]
    reads_host = True

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.router.linear, *(linear for each in self.experts for linear in each.linears))

    def with_linears(self, change: Callable[[Linear], Linear]) -> Experts:
        """Raises ModelError: no copy of a mixture is made."""
        raise no_copy()

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mixed(rows, rows)

    @cached_property
    def _fewest_rows(self) -> int:
        """How many rows an expert reads at least on a processor."""
        return fewest_rows(linear for each in self.experts for linear in each.linears)

    def mixed(self, rows: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        """See Mixture."""
        shares, chosen = self.router(routed)
        least = self._fewest_rows if rows.device.type == "cpu" else 1
        picks = Picks.of(chosen, least)
        experts = [self.experts[number] for number in picks.experts]
        blocks = torch.split(rows.index_select(0, picks.rows), picks.sizes)
        gate_up = [expert.up(block) for expert, block in zip(experts, blocks, strict=True)]
        inner = torch.split(experts[0].activated(torch.cat(gate_up)), picks.sizes)
        results = [expert.down(block) for expert, block in zip(experts, inner, strict=True)]
        # torch's own sum over the experts has other bits where threads share it otherwise.
        weighted = torch.cat(results).index_select(0, picks.places)
        weighted *= shares.flatten().index_select(0, picks.ranks)[:, None]
        total, *others = torch.split(weighted, rows.shape[0])
        for part in others:
            total += part
        return total


@dataclass(frozen=True)
class Attention:
    """Queries, keys and values of one layer, and what is made of what they see.

    head_norm: of query and key heads, [n, heads + kv_heads, head_dim], and of those of values where
    `norms_values`. rotation: which of the tables turns queries and keys by their position, None for
    none. window: how many positions up to its own a token sees, None for all. query_scale: beside
    the root of head_dim. source: the earlier layer whose keys and values it reads; it then has none
    of its own. repeats_keys: values are its keys as the product gives them. sinks: a further score
    of each head, [heads] fp32, which takes its share of the softmax and adds nothing."""

    qkv: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_norm: HeadNorm | None = None
    rotation: int | None = 0
    window: int | None = None
    query_scale: float = 1.0
    norms_values: bool = False
    repeats_keys: bool = False
    source: int | None = None
    sinks: torch.Tensor | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.output)

    @property
    def weight_bytes(self) -> int:
        held = 0 if self.head_norm is None else self.head_norm.weight_bytes
        held += bytes_of(self.sinks)
        return held + sum(linear.weight_bytes for linear in self.linears)

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def with_linears(self, change: Callable[[Linear], Linear]) -> Attention:
        return replace(self, qkv=change(self.qkv), output=change(self.output))

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.window, self.rotation, self.source is None)

    def mix(
        self, rows: torch.Tensor, tables: Sequence[Table], swapped: Swap, attend: LayerAttend
    ) -> torch.Tensor:
        """Return what `output` reads, [n, heads * head_dim]. rows: [n, d]. attend: of this layer.
        swapped: see Weights."""
        qkv = self.qkv(rows).view(rows.shape[0], -1, self.head_dim)
        return attend(*self.turned(qkv, tables, swapped))

    def turned(
        self, qkv: torch.Tensor, tables: Sequence[Table], swapped: Swap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [n, heads, head_dim], and keys then values [n, 2 * kv_heads, head_dim], of
        which there are none where those of another layer are read.

        qkv: all of these heads before norms and rotation, written to. swapped: see Weights."""
        if self.repeats_keys:
            qkv = torch.cat((qkv, qkv[:, self.num_heads :]), 1)
        turned = qkv[:, : self.num_heads + self.num_kv_heads]  # queries and keys, a view
        if self.head_norm is not None:
            normed = qkv if self.norms_values else turned
            self.head_norm.norm_(normed)
        if self.rotation is not None:
            cos, sin = tables[self.rotation]
            turned = turned[..., : cos.shape[-1]]
            other = swapped(turned)
            turned.mul_(cos).addcmul_(other, sin)
        if self.query_scale != 1.0:
            qkv[:, : self.num_heads].mul_(self.query_scale)
        return qkv[:, : self.num_heads], qkv[:, self.num_heads :]


@dataclass(frozen=True)
class Block:
    """One layer. mixer: lets a token read those before it. Norms are None where the family has none
    there; `after_` ones are of what a part gives, before it is added. is_parallel: the feed-forward
    part reads the rows that attention read, not those with what attention gave. per_layer_gate: a
    third part, which reads inputs of this layer alone. scale: of the rows that leave the layer."""

    attention_norm: Norm | None
    mixer: Mixer
    feed_forward_norm: Norm | None
    feed_forward: FeedForward
    after_attention: Norm | None = None
    after_feed_forward: Norm | None = None
    is_parallel: bool = False
    per_layer_gate: PerLayerGate | None = None
    scale: float = 1.0

    @property
    def linears(self) -> tuple[Linear, ...]:
        gate = () if self.per_layer_gate is None else self.per_layer_gate.linears
        return (*self.mixer.linears, *self.feed_forward.linears, *gate)

    @property
    def weight_bytes(self) -> int:
        norms = (self.attention_norm, self.after_attention, self.feed_forward_norm,
                 self.after_feed_forward)  # fmt: skip
        held = sum(norm.weight_bytes for norm in norms if norm is not None)
        held += sum(linear.weight_bytes for linear in self.feed_forward.linears)
        held += 0 if self.per_layer_gate is None else self.per_layer_gate.weight_bytes
        return held + self.mixer.weight_bytes

    def __call__(
        self,
        rows: torch.Tensor,
        tables: Sequence[Table],
        swapped: Swap,
        attend: LayerAttend,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the rows that leave the layer, [n, d]. inputs: those of this layer alone, where
        it has any."""
        read = rows if self.attention_norm is None else self.attention_norm(rows)
        return self.add_to(read, rows, tables, swapped, attend, inputs)

    def add_to(
        self,
        read: torch.Tensor,
        rows: torch.Tensor,
        tables: Sequence[Table],
        swapped: Swap,
        attend: LayerAttend,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same, where attention reads `read`, [n, d], whatever norm it has."""
        before, seen = rows, self.mixer.mix(read, tables, swapped, attend)
        if self.after_attention is None:
            rows = self.mixer.output.add_to(seen, rows)
        else:
            rows = rows + self.after_attention(self.mixer.output(seen))
        read = before if self.is_parallel else rows
        if self.feed_forward_norm is not None:
            read = self.feed_forward_norm(read)
        if self.after_feed_forward is None:
            rows = self.feed_forward.add_to(read, rows)
        else:
            rows = rows + self.after_feed_forward(self.feed_forward(read))
        if self.per_layer_gate is not None:
            assert inputs is not None, "a layer with a gate has inputs"
            rows = self.per_layer_gate.add_to(rows, inputs)
        return rows if self.scale == 1.0 else rows * self.scale

    def with_linears(self, change: Callable[[Linear], Linear]) -> Block:
        gate = self.per_layer_gate
        return replace(
            self,
            mixer=self.mixer.with_linears(change),
            feed_forward=self.feed_forward.with_linears(change),
            per_layer_gate=None if gate is None else gate.with_linears(change),
        )
