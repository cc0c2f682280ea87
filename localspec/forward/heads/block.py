"""Heads that draft a block of tokens in one forward: DFlash, DFlash2 and DSpark.

The rows of a block are the root and masks. They see each other and the context: keys and values of
every layer that are made of the target's hidden states, one row for each token that the target has
read. Row i of the context bears the name of token i, so `KVCache.reuse` keeps the rows of a text by
their longest common prefix; rows of rejected tokens are made again from the target's new states.
The rows of a block are erased when its forward is over.

Not here: a config's meaning (block_layout), a folder's tensors (block_files), how rows become
tokens (block_tail).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from localspec.forward.attention import grouped_attention, grouped_mask
from localspec.forward.block import Attention, Block, Norm
from localspec.forward.cache import KVCache, KVShape, native_cache
from localspec.forward.features import Features
from localspec.forward.heads.autoregressive import NO_NAME, Embed, OutputHead
from localspec.forward.heads.block_layout import EMBEDDING, BlockLayout
from localspec.forward.heads.block_tail import BlockRows, ConfidenceHead, Tail
from localspec.forward.heads.convolution import Convolution, convolved_mixer
from localspec.forward.mixer import LayerAttend, Mixer, Swap, Table, halves_swapped
from localspec.forward.model import PREFILL_CHUNK
from localspec.forward.upload import indices
from localspec.weights.linear import Linear, bytes_of

TOGETHER = 64  # Rows of the context that run with a block; more are read before it.


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
    the states of all layers read, [d, layers * d]. weight_bytes: beyond the target's own."""

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
    weight_bytes: int

    @property
    def held_bytes(self) -> int:
        tables = sum(part.nbytes for table in self.tables for part in table)
        return self.weight_bytes + tables + bytes_of(self.output.ids)

    @property
    def device(self) -> torch.device:
        return self.tables[0][0].device


class BlockHead:
    """One drafter over one text: a drafters.head_drafter.DraftingHead. capacity: of the target."""

    reads_last_row = False

    def __init__(self, parts: BlockParts, capacity: int) -> None:
        self._parts, self._layout = parts, parts.layout
        sizes = tuple((at.num_kv_heads, at.head_dim) for at in self._attentions)
        of_layers = sizes if len(set(sizes)) > 1 else ()
        slots = capacity + self._layout.block_size
        shape = KVShape(len(sizes), *max(sizes), slots, of_layers)
        self.cache: KVCache = native_cache(shape, parts.dtype, parts.device)
        self._rows: BlockRows | None = None
        masks = [self._layout.mask_id] * (self._layout.block_size - 1)
        self._masks = indices(masks, parts.device)

    @property
    def _attentions(self) -> list[Attention]:
        return [layer.attention for layer in self._parts.layers]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in self._layout.layers if layer != EMBEDDING)

    @property
    def num_drafts(self) -> int:
        """Draft tokens of a block."""
        return self._layout.num_drafts

    @property
    def memory_bytes(self) -> int:
        return self._parts.held_bytes + self.cache.kv_bytes + self._masks.nbytes

    @property
    def kv_bytes(self) -> int:
        return self.cache.kv_bytes

    @torch.inference_mode()
    def start(self, tokens: Sequence[int], features: Features) -> torch.Tensor:
        """Run a block after `tokens`, the last of which is the root; the target has read the
        others. Returns the row that predicts the next token, [1, d]."""
        known = len(tokens) - 1
        first = self.cache.reuse(tokens[:-1])
        while known - first > TOGETHER:
            end = min(first + PREFILL_CHUNK, known)
            self._read(self._context(tokens, features, first, end), tokens[first:end], first)
            first = end
        context = self._context(tokens, features, first, known)
        root = indices(tokens[-1:], self._parts.device)
        hidden = self._run(context, tokens[first:known], torch.cat((root, self._masks)), first)
        hidden = self._parts.final_norm(hidden)
        self._rows = self._opened(hidden, root)
        return self._rows.row

    def extend(self, token: int | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the row after one more token, [1, d]."""
        block = self._begun
        block.advance(indices(token if isinstance(token, torch.Tensor) else [token], rows.device))
        return block.row

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits that the newest row leads to, [1, V] fp32. rows: that row."""
        return self._begun.logits()

    @torch.inference_mode()
    def confidence(self) -> torch.Tensor | None:
        """Return the chance that the drafter states of the newest row's token, [1]."""
        return self._begun.confidence()

    def forget(self, num_pairs: int) -> None:
        """Erase the rows of the context after so many tokens."""
        self.cache.rollback(min(self.cache.length, num_pairs))
        self._rows = None

    @property
    def _begun(self) -> BlockRows:
        assert self._rows is not None, "`start` came before"
        return self._rows

    def _opened(self, hidden: torch.Tensor, root: torch.Tensor) -> BlockRows:
        """The rows that predict tokens, with their logits. hidden: of all rows, normalised."""
        parts, tail = self._parts, self._parts.tail
        state = None if tail is None else tail.state(hidden)
        if not self._layout.samples_root:
            if tail is not None and state is not None:  # a state reads the root's row as well
                _, state = tail.changed(parts.output(hidden[:1]), hidden[:1], root, state)
            hidden = hidden[1:]
        return BlockRows(hidden, parts.output(hidden), root, tail, parts.confidence, state)

    def _context(
        self, tokens: Sequence[int], features: Features, first: int, end: int
    ) -> torch.Tensor:
        """Rows of the context, [end - first, d], of the target's states."""
        states = [
            self._parts.embed(tokens[first:end])
            if layer == EMBEDDING
            else features.rows(layer, first, end)
            for layer in self._layout.layers
        ]
        joined: torch.Tensor = self._parts.context_norm(self._parts.fuse(torch.cat(states, dim=-1)))
        return joined

    def _read(self, context: torch.Tensor, names: Sequence[int], first: int) -> None:
        """Append rows of the context alone."""
        end = first + context.shape[0]
        tables = self._tables(first, end)
        with self.cache.append(names):
            for layer, attention in enumerate(self._attentions):

                def write(
                    queries: torch.Tensor, keys_values: torch.Tensor, layer: int = layer
                ) -> torch.Tensor:
                    self.cache.key_values.write(layer, first, end, keys_values)
                    return queries.flatten(1)

                attention.mix(context, tables, halves_swapped, write)

    def _run(
        self, context: torch.Tensor, names: Sequence[int], ids: torch.Tensor, first: int
    ) -> torch.Tensor:
        """Append rows of the context, and run a block behind them: its rows, [b, d]."""
        parts, size = self._parts, self._layout.block_size
        known = first + len(names)
        tables = self._tables(first, known + size)
        rows = parts.embed(ids)
        with self.cache.append([*names, *[NO_NAME] * size]):
            for layer, draft in enumerate(parts.layers):
                attend = self._attend(layer, first, known)
                rows = draft.with_context(context)(rows, tables, halves_swapped, attend)
        self.cache.rollback(known)
        return rows

    def _attend(self, layer: int, first: int, known: int) -> LayerAttend:
        """Attention of a block's rows in a layer, of which keys from slot `first` on are new."""
        attention, end = self._attentions[layer], known + self._layout.block_size
        oldest, mask = self._mask(layer, known)
        grouped = grouped_mask(mask, attention.heads.num_groups)

        def attend(queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.key_values.write(layer, first, end, keys_values)
            own = queries[-self._layout.block_size :]
            return grouped_attention(own, keys[:, :, oldest:], values[:, :, oldest:], grouped)

        return attend

    def _mask(self, layer: int, known: int) -> tuple[int, torch.Tensor | None]:
        """The first slot that a block's rows see in a layer, and what each of them sees from there
        on, [1, 1, b, slots]; None where every row sees all."""
        layout, window = self._layout, self._attentions[layer].window
        device, size = self._parts.device, layout.block_size
        own = torch.arange(known, known + size, device=device)[:, None]
        oldest = 0
        if window is not None:
            oldest = max(0, known - window + (0 if layout.window_from_root else 1))
        slots = torch.arange(oldest, known + size, device=device)
        hidden = slots > own if layout.is_causal[layer] else torch.zeros_like(slots > own)
        if window is not None and not layout.window_from_root:
            hidden |= slots <= own - window
        if not layout.is_causal[layer] and (window is None or layout.window_from_root):
            return oldest, None
        mask = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=device)
        return oldest, mask.masked_fill_(hidden, float("-inf"))[None, None]

    def _tables(self, first: int, end: int) -> tuple[Table, ...]:
        """Cosines and sines of some positions, [n, 1, rotated] each."""
        return tuple(
            (cos[first:end, None], sin[first:end, None]) for cos, sin in self._parts.tables
        )
