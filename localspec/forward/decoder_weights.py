"""The weights of a whole decoder: embedding, blocks, tables of angles and the output head."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from localspec.forward.block import Attention, Block, Norm
from localspec.forward.mixer import Swap, Table, halves_swapped
from localspec.forward.output_head import OutputHead
from localspec.forward.per_layer_inputs import PerLayerInputs
from localspec.weights.linear import Linear, PlainLinear, bytes_of
from localspec.weights.nf4 import Nf4Embedding


@dataclass(frozen=True)
class Weights:
    """A whole model. embedding: [V, d], or one in NF4. tables: cosines and sines of every position,
    [capacity, rotated] each, of the first `rotated` numbers of each head; a sine has the sign of
    the rotation, so that `swapped` is all that is left to do. logit_cap: the bound that logits tend
    to, None for none. head_ids: the tokens of the head's outputs, see OutputHead."""

    embedding: torch.Tensor | Nf4Embedding
    blocks: tuple[Block, ...]
    final_norm: Norm
    head: Linear
    tables: tuple[Table, ...]
    swapped: Swap = halves_swapped
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    per_layer_inputs: PerLayerInputs | None = None
    head_ids: torch.Tensor | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every product of a step, the output head last."""
        inputs = () if self.per_layer_inputs is None else (self.per_layer_inputs.projection,)
        return (*inputs, *(linear for block in self.blocks for linear in block.linears), self.head)

    @property
    def weight_bytes(self) -> int:
        tables = self.embedding.nbytes
        tables += sum(part.nbytes for table in self.tables for part in table)
        blocks = sum(block.weight_bytes for block in self.blocks)
        own = self.head.weight if isinstance(self.head, PlainLinear) else self.head
        is_tied = own is getattr(self.embedding, "layer", self.embedding)
        head = 0 if is_tied else self.head.weight_bytes
        inputs = 0 if self.per_layer_inputs is None else self.per_layer_inputs.device_bytes
        head += bytes_of(self.head_ids)
        return tables + blocks + self.final_norm.weight_bytes + head + inputs

    @cached_property
    def output(self) -> OutputHead:
        """How normalised rows become logits."""
        size = self.embedding.shape[0]
        return OutputHead(self.head, size, self.head_ids, self.logit_scale, self.logit_cap)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers that read keys and values, in order."""
        mixers = (block.mixer for block in self.blocks)
        return tuple(mixer for mixer in mixers if isinstance(mixer, Attention))

    @property
    def windows(self) -> frozenset[int | None]:
        """How far back its layers see."""
        return frozenset(attention.window for attention in self.attentions)

    @property
    def first_reader(self) -> int:
        """The first of the last layers that read keys and values of others alone; the number of
        layers where there are none. Only rows whose logits are wanted need these layers."""
        mixers = [block.mixer for block in self.blocks]
        readers = [isinstance(mixer, Attention) and mixer.source is not None for mixer in mixers]
        return len(readers) - readers[::-1].index(False)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Of each attention, which of the layers that have keys and values it reads."""
        sources = [attention.source for attention in self.attentions]
        own = [layer for layer, source in enumerate(sources) if source is None]
        return tuple(
            own.index(layer if source is None else source) for layer, source in enumerate(sources)
        )

    @property
    def reads_host(self) -> bool:
        is_waiting = any(block.feed_forward.reads_host for block in self.blocks)
        return is_waiting or any(linear.reads_host for linear in self.linears)

    def tables_at(self, positions: slice | torch.Tensor) -> tuple[Table, ...]:
        """Return the tables of some positions, [n, 1, rotated] each."""
        return tuple((_at(cos, positions), _at(sin, positions)) for cos, sin in self.tables)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.embedding
        rows = table.rows(ids) if isinstance(table, Nf4Embedding) else F.embedding(ids, table)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale  # [n, d]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalised rows [n, d] -> [n, V], in their own precision."""
        return self.output.logits(rows)


def _at(table: torch.Tensor, positions: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(positions, slice):
        return table[positions, None]
    return table.index_select(0, positions)[:, None]
