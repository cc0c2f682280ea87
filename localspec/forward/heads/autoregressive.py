"""Heads that draft on their own outputs: what EAGLE and multi-token prediction have in common.

Contract: a row stands for a pair of neighbouring tokens, the target's hidden states of token i and
the embedding of token i + 1. Its output predicts token i + 2, and takes the place of the hidden
states where the target has not been yet. `Network` is this function over parts that training and
drafting supply alike; `HeadParts` is a head as read from a folder.

`AutoregressiveHead` is one head with the pairs of one text. Slot i of its cache is pair i and bears
the name of token i + 1: `reuse` keeps the pairs that belong to a text by their longest common
prefix, `read` appends those that are missing from the target's own states. Rows of a draft come
after them by `extend` or `branch`, from outputs of the head; the next `reuse` or `forget` erases
them, so that no pair of a text is made of guesses. So their slots bear no names, and their tokens
may be known on the device alone.

Not here: the networks and their folders (eagle, mtp), which tokens to draft (drafters).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from localspec.forward.attention import cached_attention
from localspec.forward.cache import KVShape, native_cache
from localspec.forward.features import LAST, Features
from localspec.forward.heads.layer import (
    DecoderLayer,
    HeadLayer,
    LayerShape,
    Rotation,
    RowFunction,
    packed_parts,
    plain_frequencies,
)
from localspec.forward.mixer import LayerAttend
from localspec.forward.model import PREFILL_CHUNK, LanguageModel
from localspec.forward.upload import indices
from localspec.weights.linear import bytes_of

DRAFT_SLOTS = 256  # for rows of a draft, beyond the text
NO_NAME = -1  # of a slot that holds a row of a draft
Tokens = Sequence[int] | torch.Tensor  # ids; a tensor lies on the device
Embed = Callable[[Tokens], torch.Tensor]
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class HeadShape:
    """A head with one decoder layer. layers: whose hidden states it reads."""

    layer: LayerShape
    layers: tuple[int, ...] = (LAST,)
    rope_base: float = 10000.0


class Network(ABC):
    """A head's function, over whatever computes its parts."""

    def __init__(self, layer: HeadLayer, parts: Mapping[str, RowFunction]) -> None:
        self.parts = parts
        self.layer = layer

    def enter(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hidden states of the layers read, [..., d] each -> the rows of the first step, [..., d];
        the only ones where one layer is read."""
        return features[0]

    def step(
        self,
        rows: torch.Tensor,
        embedded: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: LayerAttend,
    ) -> torch.Tensor:
        """rows, embedded: [..., d], cos and sin [..., 1, head_dim] -> the rows of the next step,
        [..., d]."""

        def layer(mixed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
            return self.layer(mixed, stream, cos, sin, attend)

        return self.transform(rows, embedded, layer)

    @abstractmethod
    def transform(self, rows: torch.Tensor, embedded: torch.Tensor, layer: Layer) -> torch.Tensor:
        """As `step`. layer: what queries, keys and values are made of, [..., in], and the stream,
        [..., d] -> the stream after the decoder layer, [..., d]."""

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        """What the output head reads, [..., d]."""
        return rows


@dataclass(frozen=True)
class OutputHead:
    """How a head's rows become logits over the target's tokens. product: [n, d] -> [n, Vd].
    ids: [Vd], the target's id of each, None where they are the same."""

    product: RowFunction
    vocab_size: int
    ids: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, d] -> [n, V] fp32; -inf for tokens that the head does not know."""
        logits = self.product(rows).float()
        if self.ids is None:
            return logits
        everything = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        return everything.index_copy_(1, self.ids, logits)


@dataclass(frozen=True)
class HeadParts:
    """A head ready to run, whatever format it came in. layers: whose hidden states it reads.
    frequencies: of its rotation, [head_dim / 2]. weight_bytes: beyond the target's own."""

    layers: tuple[int, ...]
    network: Network
    output: OutputHead
    embed: Embed
    frequencies: torch.Tensor
    rope_scale: float
    dtype: torch.dtype
    weight_bytes: int

    @classmethod
    def sharing(
        cls,
        target: LanguageModel,
        shape: HeadShape,
        network: type[Network],
        tensors: Mapping[str, torch.Tensor],
    ) -> HeadParts:
        """With the target's embedding and output head. tensors: in one precision, on its device."""
        parts = packed_parts(tensors, shape.layer.norm_epsilon)
        return cls(
            layers=shape.layers,
            network=network(DecoderLayer(shape.layer, parts), parts),
            output=OutputHead(target.head, target.vocab_size),
            embed=target.embed,
            frequencies=plain_frequencies(shape.layer.head_dim, shape.rope_base, target.device),
            rope_scale=1.0,
            dtype=next(iter(tensors.values())).dtype,
            weight_bytes=sum(part.weight_bytes for part in parts.values()),
        )

    @property
    def held_bytes(self) -> int:
        return self.weight_bytes + bytes_of(self.frequencies, self.output.ids)


class AutoregressiveHead:
    """One head, one text at a time. capacity: tokens of the target's context."""

    reads_last_row = False

    def __init__(self, parts: HeadParts, capacity: int) -> None:
        slots, device = capacity + DRAFT_SLOTS, parts.frequencies.device
        self._parts, self._heads = parts, parts.network.layer.heads
        shape = KVShape(1, self._heads.num_kv_heads, self._heads.head_dim, slots)
        self._rotation = Rotation.of(parts.frequencies, slots, parts.dtype, parts.rope_scale)
        self._first = -1  # the text's first token, which no slot bears the name of
        self._num_pairs = 0  # slots beyond these hold rows of a draft
        self.cache = native_cache(shape, parts.dtype, device)

    @property
    def layers(self) -> tuple[int, ...]:
        return self._parts.layers

    @property
    def memory_bytes(self) -> int:
        return self._parts.held_bytes + self._rotation.table_bytes + self.cache.kv_bytes

    @property
    def kv_bytes(self) -> int:
        return self.cache.kv_bytes

    @property
    def room(self) -> int:
        """Rows that still fit."""
        return self.cache.shape.capacity - self.cache.length

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep the pairs that belong to `tokens` alone; returns how many."""
        # Rows of a draft may bear the right names, but they are made of guesses.
        self.forget(0 if self._first != tokens[0] else self._num_pairs)
        self._first = tokens[0]
        self._num_pairs = self.cache.reuse(tokens[1:])
        return self._num_pairs

    def forget(self, num_pairs: int) -> None:
        """Erase everything after so many pairs."""
        self.cache.rollback(num_pairs)
        self._num_pairs = min(self._num_pairs, num_pairs)

    def start(self, tokens: Sequence[int], features: Features) -> torch.Tensor:
        """The output that a draft after `tokens` starts from, [1, d]: that of the last pair, which
        is read again where it is held already."""
        self.forget(min(self.reuse(tokens), len(tokens) - 2))
        return self.read(tokens, features)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], features: Features) -> torch.Tensor:
        """Append the missing pairs of `tokens`, the last but one of which the target has read;
        returns the last pair's output, [1, d]. `reuse` came before, and one pair is missing."""
        num_pairs = len(tokens) - 1
        assert self.cache.length == self._num_pairs, "rows of a draft were left behind"
        assert self.cache.length < num_pairs, "there is no pair to read"
        for start in range(self.cache.length, num_pairs, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, num_pairs)
            rows = [features.rows(layer, start, end) for layer in self.layers]  # [n, d] each
            first = self._parts.network.enter(rows)
            made = self._run(tokens[start + 1 : end + 1], first, slice(start, end))
        self._num_pairs = num_pairs
        return made[-1:]

    @torch.inference_mode()
    def extend(self, token: int | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Append the next row of a chain: the output before it [1, d] -> its own, [1, d]. token: a
        tensor is [1]."""
        length = self.cache.length
        tokens = token if isinstance(token, torch.Tensor) else [token]
        return self._run(tokens, rows, slice(length, length + 1))

    @torch.inference_mode()
    def branch(
        self,
        tokens: Tokens,
        rows: torch.Tensor,
        places: Sequence[int],
        blocked: torch.Tensor | None,
    ) -> torch.Tensor:
        """Append rows of a tree: tokens, their parents' outputs [n, d], their positions.

        blocked: [n, m] bool on the device, which of the last m rows, these n the last among them,
        a row does not see; None where every row sees all. Returns their outputs, [n, d].
        """
        mask = None
        if blocked is not None:
            scores = torch.zeros(blocked.shape, dtype=self.cache.dtype, device=rows.device)
            scores.masked_fill_(blocked, float("-inf"))
            ahead = self.cache.length + len(rows) - blocked.shape[1]
            mask = F.pad(scores, (ahead, 0))[None, None]  # [1, 1, n, all]
        return self._run(tokens, rows, indices(places, rows.device), mask)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs [n, d] -> [n, V] fp32."""
        return self._parts.output(self._parts.network.leave(rows))

    def _run(
        self,
        tokens: Tokens,
        rows: torch.Tensor,
        places: slice | torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """mask: added to the scores, [1, 1, n, all]; None for a chain."""
        cos, sin = self._rotation.at(places)
        count = len(tokens)
        names = [NO_NAME] * count if isinstance(tokens, torch.Tensor) else tokens
        with self.cache.append(names) as start:
            cached = cached_attention(self.cache, start, count, self._heads, mask=mask)
            embedded = self._parts.embed(tokens)  # [n, d]
            return self._parts.network.step(rows, embedded, cos, sin, partial(cached, 0))
