"""EAGLE's head as a function: one decoder layer that goes on from the target's features.

Contract: a row stands for the pair (feature of token i, embedding of token i + 1) and its output
predicts token i + 2; that output also takes the feature's place where the target has not been
yet. `Network` is this function in three forms, over parts that training and drafting supply alike;
`Speech` makes logits of it. `EagleParts` is a head that was read, in whatever format.

Not here: the pairs of a text (eagle_pairs), folders (eagle_files, eagle_published), which tokens
are worth a row (drafters.eagle).
Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from localspec.forward.heads.layer import Attend, DecoderLayer, LayerShape, Rows, Shapes

KIND = "eagle"


@dataclass(frozen=True)
class EagleShape:
    """A head of our own format. layers: whose hidden states it reads."""

    layers: tuple[int, ...]
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_base: float

    def layer(self) -> LayerShape:
        return LayerShape(
            self.hidden_size,
            self.hidden_size,
            self.ffn_size,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.norm_epsilon,
        )

    def shapes(self) -> Shapes:
        width, norms = (
            self.hidden_size,
            ("embedding_norm", "hidden_norm", "input_norm", "final_norm"),
        )
        products: Shapes = {
            "fuse.weight": (width, len(self.layers) * width),
            "mix.weight": (width, 2 * width),
        }
        return products | {f"{norm}.weight": (width,) for norm in norms} | self.layer().shapes()

    def settings(self) -> dict[str, Any]:
        return asdict(self) | {"layers": list(self.layers)}


@dataclass(frozen=True)
class FirstForm:
    """EAGLE-1 and 2: embedding and feature fused into the layer's input; the feature is what the
    target's head reads, and so is the output."""

    fuse: Rows
    layer: DecoderLayer

    def enter(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        return features[0]

    def step(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        rows = self.fuse(torch.cat((embedded, hidden), dim=-1))
        return self.layer(rows, rows, cos, sin, attend)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@dataclass(frozen=True)
class ThirdForm:
    """EAGLE-3: features of three layers are fused to one hidden state, which the layer's stream
    carries; embedding and hidden state, each normalised, make its queries, keys and values."""

    fuse: Rows
    embedding_norm: Rows
    hidden_norm: Rows
    layer: DecoderLayer
    final_norm: Rows

    @classmethod
    def of(cls, shape: LayerShape, parts: Mapping[str, Rows]) -> ThirdForm:
        return cls(
            parts["fuse"],
            parts["embedding_norm"],
            parts["hidden_norm"],
            DecoderLayer.of(shape, parts),
            parts["final_norm"],
        )

    def enter(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """One [..., d] for each layer read -> [..., d]."""
        return self.fuse(torch.cat(tuple(features), dim=-1))

    def step(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """hidden, embedded: [..., d] -> what is the next row's hidden state, [..., d]."""
        mixed = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        return self.layer(mixed, hidden, cos, sin, attend)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """What an output head reads, [..., d]."""
        return self.final_norm(hidden)


@dataclass(frozen=True)
class OwnForm:
    """Ours: features of several layers are fused as in EAGLE-3, then hidden state and embedding,
    each normalised, are mixed into the layer's stream as in EAGLE-1, whose feed-forward part thus
    sees both at once. With few minutes of training that learns faster than EAGLE-3's layer."""

    fuse: Rows
    embedding_norm: Rows
    hidden_norm: Rows
    mix: Rows
    input_norm: Rows
    layer: DecoderLayer
    final_norm: Rows

    @classmethod
    def of(cls, shape: LayerShape, parts: Mapping[str, Rows]) -> OwnForm:
        names = ("fuse", "embedding_norm", "hidden_norm", "mix", "input_norm", "final_norm")
        return cls(layer=DecoderLayer.of(shape, parts), **{name: parts[name] for name in names})

    def enter(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """One [..., d] for each layer read -> [..., d]."""
        return self.fuse(torch.cat(tuple(features), dim=-1))

    def step(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """hidden, embedded: [..., d] -> what is the next row's hidden state, [..., d]."""
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        rows = self.mix(both)
        return self.layer(self.input_norm(rows), rows, cos, sin, attend)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the target's head reads, [..., d]."""
        return self.final_norm(hidden)


Network = FirstForm | ThirdForm | OwnForm


@dataclass(frozen=True)
class Speech:
    """How a head's rows become logits over the target's tokens. logits: [n, d] -> [n, Vd] fp32.
    ids: [Vd], the target's id of each, None where they are the same."""

    logits: Rows
    vocab_size: int
    ids: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, d] -> [n, V] fp32; what the head cannot say is -inf."""
        said = self.logits(rows).float()
        if self.ids is None:
            return said
        everything = said.new_full((said.shape[0], self.vocab_size), float("-inf"))
        return everything.index_copy_(1, self.ids, said)


@dataclass(frozen=True)
class EagleParts:
    """A head ready to run, whatever format it came in. layers: whose hidden states it reads.
    frequencies: of its rotation, [head_dim / 2]. weight_bytes: beyond the target's own."""

    layers: tuple[int, ...]
    network: Network
    speech: Speech
    embed: Callable[[Sequence[int]], torch.Tensor]
    frequencies: torch.Tensor
    rope_scale: float
    dtype: torch.dtype
    weight_bytes: int

    @property
    def held_bytes(self) -> int:
        held = self.weight_bytes + self.frequencies.numel() * self.frequencies.element_size()
        ids = self.speech.ids
        return held if ids is None else held + ids.numel() * ids.element_size()
