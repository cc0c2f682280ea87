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
may be known on the device alone. These give passes (forward.passes): heads of several sequences
with the same weights run as one.

Not here: the networks and their folders (eagle, mtp), which tokens to draft (drafters).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from localspec.forward.attention import cached_attention, each_its_own
from localspec.forward.cache import WIDEST, KVShape, native_cache
from localspec.forward.decoder import joined
from localspec.forward.features import LAST, Features
from localspec.forward.heads.ends import Embed, Tokens, output_of_target
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
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import DraftVocabulary, OutputHead
from localspec.forward.passes import Pass, Product
from localspec.forward.upload import indices
from localspec.weights.linear import bytes_of

DRAFT_SLOTS = 256  # for rows of a draft, beyond the text
NO_NAME = -1  # of a slot that holds a row of a draft
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
class HeadParts:
    """A head ready to run, whatever format it came in. layers: whose hidden states it reads.
    frequencies: of its rotation, [head_dim / 2]. body_bytes: of weights beyond those of the target
    and of the output head."""

    layers: tuple[int, ...]
    network: Network
    output: OutputHead
    embed: Embed
    frequencies: torch.Tensor
    rope_scale: float
    dtype: torch.dtype
    body_bytes: int

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
            output=output_of_target(target),
            embed=target.embed,
            frequencies=plain_frequencies(shape.layer.head_dim, shape.rope_base, target.device),
            rope_scale=1.0,
            dtype=next(iter(tensors.values())).dtype,
            body_bytes=sum(part.weight_bytes for part in parts.values()),
        )

    def narrowed(self, vocabulary: DraftVocabulary) -> HeadParts:
        """Return the same head that names the tokens of a vocabulary alone."""
        output = vocabulary.narrowed(self.output, self.frequencies.device)
        return replace(self, output=output)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights beyond the target's."""
        return self.body_bytes + self.output.own_bytes

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
    def output(self) -> OutputHead:
        return self._parts.output

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
        self.cache.rollback(min(self.cache.length, num_pairs))  # a reading may have been left
        self._num_pairs = min(self._num_pairs, num_pairs)

    @property
    def sharing_key(self) -> Hashable:
        """Return what heads whose rows may run as one have in common."""
        return id(self._parts)

    def start(self, tokens: Sequence[int], features: Features) -> Pass:
        """Give the output that a draft after `tokens` starts from, [1, d]: that of the last pair,
        which is read again where it is held already."""
        self.forget(min(self.reuse(tokens), len(tokens) - 2))
        return self.read(tokens, features)

    def read(self, tokens: Sequence[int], features: Features) -> Pass:
        """Append the missing pairs of `tokens`, the last but one of which the target has read, and
        give the last pair's output, [1, d]. `reuse` came before, and one pair is missing."""
        start, end = self.cache.length, len(tokens) - 1
        assert start == self._num_pairs, "rows of a draft were left behind"
        assert start < end, "there is no pair to read"
        is_long = end - start > WIDEST  # more than a round has accepted
        pairs, places = tokens[start + 1 : end + 1], slice(start, end)
        return HeadRows(self, pairs, features, places, is_reading=is_long)

    def extend(self, token: int | torch.Tensor, rows: torch.Tensor) -> Pass:
        """Append the next row of a chain: the output before it [1, d] -> its own, [1, d]. token: a
        tensor is [1]."""
        length = self.cache.length
        tokens = token if isinstance(token, torch.Tensor) else [token]
        return HeadRows(self, tokens, rows, slice(length, length + 1))

    @torch.inference_mode()
    def branch(
        self,
        tokens: Tokens,
        rows: torch.Tensor,
        places: Sequence[int],
        blocked: torch.Tensor | None,
    ) -> Pass:
        """Append rows of a tree: tokens, their parents' outputs [n, d], their positions.

        blocked: [n, m] bool on the device, which of the last m rows, these n the last among them,
        a row does not see; None where every row sees all. Gives their outputs, [n, d].
        """
        mask = None
        if blocked is not None:
            scores = torch.zeros(blocked.shape, dtype=self.cache.dtype, device=rows.device)
            scores.masked_fill_(blocked, float("-inf"))
            ahead = self.cache.length + len(rows) - blocked.shape[1]
            mask = F.pad(scores, (ahead, 0))[None, None]  # [1, 1, n, all]
        return HeadRows(self, tokens, rows, indices(places, rows.device), mask)

    def logits(self, rows: torch.Tensor) -> Pass:
        """Outputs [n, d] -> [n, V] fp32."""
        return Product(("logits", self.sharing_key), self._logits_of, rows)

    @torch.inference_mode()
    def _logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        return self._parts.output(self._parts.network.leave(rows))


@dataclass(frozen=True)
class HeadRows(Pass):
    """Rows that are appended to the cache of a head; gives their outputs, [n, d].

    rows: the outputs before them, [n, d]. Pairs of the text are made of the target's states
    instead, and give the output of the last one alone, [1, d]. places: their positions. mask: added
    to the scores, [1, 1, n, all]; None for a chain."""

    head: AutoregressiveHead
    tokens: Tokens
    rows: torch.Tensor | Features
    places: slice | torch.Tensor
    mask: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def sharing_key(self) -> Hashable:
        return self.head.sharing_key

    def forward(self) -> torch.Tensor:
        """See Pass."""
        return _run([self])[0]

    def together(self, parts: Sequence[HeadRows]) -> list[torch.Tensor]:
        """See Pass."""
        return _run(parts)

    def cut(self, most_rows: int) -> tuple[Pass, Pass] | None:
        """See Pass."""
        if len(self.tokens) <= most_rows or not isinstance(self.places, slice):
            return None
        start, end = self.places.start, self.places.stop
        middle = start + most_rows
        piece = replace(self, tokens=self.tokens[:most_rows], places=slice(start, middle))
        return piece, replace(self, tokens=self.tokens[most_rows:], places=slice(middle, end))

    def entering(self) -> torch.Tensor:
        """Return the outputs before the rows, [n, d]."""
        if isinstance(self.rows, torch.Tensor):
            return self.rows
        assert isinstance(self.places, slice), "pairs of a text follow each other"
        features, place = self.rows, self.places
        states = [features.rows(layer, place.start, place.stop) for layer in self.head.layers]
        return self.head._parts.network.enter(states)

    def names(self) -> Sequence[int]:
        """Return what the slots of the rows are called."""
        is_text = not isinstance(self.rows, torch.Tensor)
        return [*self.tokens] if is_text else [NO_NAME] * len(self.tokens)


@torch.inference_mode()
def _run(rows: Sequence[HeadRows]) -> list[torch.Tensor]:
    """Run rows of heads that share their weights, each with a cache of its own."""
    parts, heads = rows[0].head._parts, [part.head for part in rows]
    ends = list(accumulate(part.num_rows for part in rows))
    places = [slice(start, end) for start, end in pairwise((0, *ends))]
    with ExitStack() as caches:
        starts = [
            caches.enter_context(head.cache.append(part.names()))
            for head, part in zip(heads, rows, strict=True)
        ]
        attends = [
            cached_attention(head.cache, start, part.num_rows, head._heads, mask=part.mask)
            for head, part, start in zip(heads, rows, starts, strict=True)
        ]
        tables = [head._rotation.at(part.places) for head, part in zip(heads, rows, strict=True)]
        cos, sin = joined([cos for cos, _ in tables]), joined([sin for _, sin in tables])
        entering = joined([part.entering() for part in rows])
        embedded = parts.embed(_joined_tokens(rows))  # [n, d]
        attend = partial(each_its_own(attends, places), 0)
        made = parts.network.step(entering, embedded, cos, sin, attend)
    outputs = [made[place] for place in places]
    for at, part in enumerate(rows):
        if not isinstance(part.rows, torch.Tensor):
            part.head._num_pairs = part.head.cache.length
            outputs[at] = outputs[at][-1:]
    return outputs


def _joined_tokens(rows: Sequence[HeadRows]) -> Tokens:
    """Return the tokens of all rows, on the host as long as it knows them."""
    first, *others = rows
    if not others:
        return first.tokens
    device = first.head._parts.frequencies.device
    return torch.cat([indices(part.tokens, device) for part in rows])
