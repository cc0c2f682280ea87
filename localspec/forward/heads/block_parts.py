"""A block drafter's layers and parts, over whatever context they are run on.

A layer is a layer of the native decoder; rows of the context join the rows of a block where keys
and values are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from localspec.forward.attention import grouped_mask
from localspec.forward.block import Attention, Block, Norm
from localspec.forward.heads.block_layout import BlockLayout
from localspec.forward.heads.block_tail import BlockRows, ConfidenceHead, MarkovHead, Tail
from localspec.forward.heads.convolution import Convolution, convolved_mixer
from localspec.forward.heads.ends import Embed
from localspec.forward.mixer import LayerAttend, Mixer, Swap, Table
from localspec.forward.output_head import DraftVocabulary, OutputHead
from localspec.forward.tree import slot_mask
from localspec.forward.upload import indices
from localspec.weights.linear import Linear, bytes_of


@dataclass(frozen=True)
class JoinedMixer:
    """Attention of a block's rows, with rows of the context whose keys and values are new."""

    inner: Attention
    context: torch.Tensor

    @property
    def output(self) -> Linear:
        return self.inner.output

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.inner.linears

    @property
    def weight_bytes(self) -> int:
        return self.inner.weight_bytes

    @property
    def kind(self) -> tuple[object, ...]:
        return self.inner.kind

    def with_linears(self, change: Callable[[Linear], Linear]) -> Mixer:
        return replace(self, inner=self.inner.with_linears(change))

    def mix(
        self, rows: torch.Tensor, tables: Sequence[Table], swapped: Swap, attend: LayerAttend
    ) -> torch.Tensor:
        """See Mixer; tables are of the context's rows and of the block's, in this order."""
        return self.inner.mix(torch.cat((self.context, rows)), tables, swapped, attend)


@dataclass(frozen=True)
class DraftLayer:
    """A decoder layer, and the convolutions around its parts where it has any."""

    block: Block
    of_attention: Convolution | None = None

    @property
    def attention(self) -> Attention:
        assert isinstance(self.block.mixer, Attention), "a block drafter attends"
        return self.block.mixer

    @property
    def weight_bytes(self) -> int:
        held = self.block.weight_bytes
        if self.of_attention is not None:  # The base of the other one is as large.
            held += self.of_attention.weight_bytes + self.of_attention.base.nbytes
        return held

    def with_context(self, context: torch.Tensor) -> Block:
        """Return the layer as a function of a block's rows. context: new rows, [c, d]."""
        mixer: Mixer = JoinedMixer(self.attention, context)
        if self.of_attention is not None:
            mixer = convolved_mixer(mixer, self.of_attention)
        return replace(self.block, mixer=mixer)


@dataclass(frozen=True)
class BlockParts:
    """A block drafter as read from a folder. tables: cosines and sines of every position. fuse: of
    the states of all layers read, [d, layers * d]. body_bytes: of weights beyond those of the
    target, of the output head and of the tail."""

    layout: BlockLayout
    layers: tuple[DraftLayer, ...]
    tables: tuple[Table, ...]
    fuse: Linear
    context_norm: Norm
    final_norm: Norm
    embed: Embed
    output: OutputHead
    tail: Tail | None
    confidence: ConfidenceHead | None
    dtype: torch.dtype
    body_bytes: int

    def narrowed(self, vocabulary: DraftVocabulary) -> BlockParts:
        """Return the same drafter that names the tokens of a vocabulary alone."""
        output, tail = vocabulary.narrowed(self.output, self.device), self.tail
        if isinstance(tail, MarkovHead) and output is not self.output:
            tail = replace(tail, output=vocabulary.narrowed(tail.output, self.device))
        return replace(self, output=output, tail=tail)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights beyond the target's."""
        tail = 0 if self.tail is None else self.tail.weight_bytes
        return self.body_bytes + self.output.own_bytes + tail

    @property
    def held_bytes(self) -> int:
        tables = sum(part.nbytes for table in self.tables for part in table)
        return self.weight_bytes + tables + bytes_of(self.output.ids)

    @property
    def device(self) -> torch.device:
        return self.tables[0][0].device

    @property
    def attentions(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    @cached_property
    def mask_ids(self) -> torch.Tensor:
        """The tokens of a block but for its root."""
        return indices([self.layout.mask_id] * (self.layout.block_size - 1), self.device)

    def context(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return rows of the context, [n, d]. states: of each layer that is read, [n, d]."""
        rows: torch.Tensor = self.context_norm(self.fuse(torch.cat(tuple(states), dim=-1)))
        return rows

    def tables_at(self, positions: slice | torch.Tensor) -> tuple[Table, ...]:
        """Cosines and sines of some positions, [n, 1, rotated] each."""
        return tuple((cos[positions, None], sin[positions, None]) for cos, sin in self.tables)

    def mask(
        self, layer: int, own: torch.Tensor, num_slots: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return what a block's rows see of the slots of a layer, as `grouped_attention` takes it.
        own: the positions of the rows, [b]."""
        size, window = own.shape[0], self.attentions[layer].window
        among = torch.zeros(size, size, dtype=dtype, device=own.device)
        if self.layout.is_causal[layer]:
            later = torch.ones(size, size, dtype=torch.bool, device=own.device).triu_(1)
            among.masked_fill_(later, float("-inf"))
        positions = own
        if window is not None and self.layout.window_from_root:
            positions, window = own[:1].expand(size), window + 1
        columns = torch.arange(num_slots, device=own.device)
        mask = slot_mask(positions, own, among, columns, window)
        grouped = grouped_mask(mask, self.attentions[layer].heads.num_groups)
        assert grouped is not None, "there is a mask"
        return grouped

    def opened(self, hidden: torch.Tensor, logits: torch.Tensor, root: torch.Tensor) -> BlockRows:
        """Return the rows of a block that predict tokens. hidden: of all rows, normalised, [b, d].
        logits: [b, V]. root: [1]."""
        state = None if self.tail is None else self.tail.state(hidden)
        if not self.layout.samples_root:
            if self.tail is not None and state is not None:  # it reads the root's row as well
                _, state = self.tail.changed(logits[:1], hidden[:1], root, state)
            hidden, logits = hidden[1:], logits[1:]
        return BlockRows(hidden, logits, root, self.tail, self.confidence, state)
