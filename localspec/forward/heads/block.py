"""Heads that draft a block of tokens in one forward: DFlash, DFlash2 and DSpark.

The rows of a block are the root and masks. They see each other and the context: keys and values of
every layer that are made of the target's hidden states, one row for each token that the target has
read. Row i of the context bears the name of token i, so `KVCache.reuse` keeps the rows of a text by
their longest common prefix; rows of rejected tokens are made again from the target's new states.
The rows of a block are erased when its forward is over.

A block is one pass (forward.passes), and so is a piece of a context that was missed. Blocks of
several sequences run one after the other: a draft takes one such pass and not one a token, a block
has as many rows as several sequences have in a step, and a convolution reads rows beside its own.

Not here: a config's meaning (block_layout), a folder's tensors (block_files), how rows become
tokens (block_tail).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch

from localspec.forward.attention import grouped_attention
from localspec.forward.cache import KVCache, KVShape, native_cache
from localspec.forward.features import Features
from localspec.forward.graphs import buckets
from localspec.forward.heads.autoregressive import NO_NAME
from localspec.forward.heads.block_layout import EMBEDDING
from localspec.forward.heads.block_parts import BlockParts
from localspec.forward.heads.block_static import StaticBlock
from localspec.forward.heads.block_tail import BlockRows
from localspec.forward.mixer import LayerAttend, Table, halves_swapped
from localspec.forward.model import PREFILL_CHUNK
from localspec.forward.output_head import OutputHead
from localspec.forward.passes import Pass, Ready
from localspec.forward.restoring import undisturbed
from localspec.forward.upload import indices

TOGETHER = 64  # Rows of the context that run with a block; more are read before it.


class BlockHead:
    """One drafter over one text: a drafters.head_drafter.DraftingHead, and a heads.fixed.FixedHead
    whose numbers block_static names. capacity: of the target."""

    reads_last_row = can_resume = False

    def __init__(self, parts: BlockParts, capacity: int) -> None:
        self._parts, self._layout = parts, parts.layout
        attentions = parts.attentions
        sizes = tuple((at.num_kv_heads, at.head_dim) for at in attentions)
        # Behind the text stand a block, and rows that fill up a fixed number of new ones.
        slots = capacity + 2 * self._layout.block_size
        shape = KVShape(
            num_layers=len(sizes),
            num_kv_heads=max(sizes)[0],
            head_dim=max(sizes)[1],
            capacity=slots,
            of_layers=sizes if len(set(sizes)) > 1 else (),
            windows=tuple(at.window for at in attentions),
        )
        self.cache: KVCache = native_cache(shape, parts.dtype, parts.device)
        self._rows: BlockRows | None = None
        self._masks = parts.mask_ids
        self.num_numbers = self._num_new + 3

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in self._layout.layers if layer != EMBEDDING)

    @property
    def output(self) -> OutputHead:
        return self._parts.output

    @property
    def num_drafts(self) -> int:
        """Draft tokens of a block."""
        return self._layout.num_drafts

    @property
    def memory_bytes(self) -> int:
        return self._parts.held_bytes + self._masks.nbytes + self.kv_bytes

    @property
    def kv_bytes(self) -> int:
        return self.cache.kv_bytes

    def start(self, tokens: Sequence[int], features: Features) -> Pass:
        """Run a block after `tokens`, the last of which is the root; the target has read the
        others. Gives the row that predicts the next token, [1, d]."""
        return BlockRun(self, tokens, features, is_reading=self._num_missing(tokens) > TOGETHER)

    def _num_missing(self, tokens: Sequence[int]) -> int:
        """Keep the rows of the context that belong to a text; returns how many are missing. At
        least one is: products of no rows are not to be had everywhere."""
        known = len(tokens) - 1
        return known - self.cache.reuse(tokens[: known - 1])

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], features: Features, end: int) -> torch.Tensor:
        """Append rows of the context alone, up to token `end`, and return them, [n, d]."""
        first = self.cache.length
        context = self._context(tokens, features, first, end)
        self._read(context, tokens[first:end], first)
        return context

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], features: Features) -> torch.Tensor:
        """Append the last rows of the context, and run the block: see `start`."""
        first, known = self.cache.length, len(tokens) - 1
        context = self._context(tokens, features, first, known)
        root = indices(tokens[-1:], self._parts.device)
        hidden = self._run(context, tokens[first:known], torch.cat((root, self._masks)), first)
        hidden = self._parts.final_norm(hidden)
        self._rows = self._parts.opened(hidden, self._parts.output(hidden), root)
        return self._rows.row

    def extend(self, token: int | torch.Tensor, rows: torch.Tensor) -> Pass:
        """Give the row after one more token, [1, d]."""
        block = self._begun
        block.advance(indices(token if isinstance(token, torch.Tensor) else [token], rows.device))
        return Ready(block.row)

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> Pass:
        """Give the logits that the newest row leads to, [1, V] fp32. rows: that row."""
        return Ready(self._begun.logits())

    @torch.inference_mode()
    def stated(self) -> torch.Tensor | None:
        """Return the chance that the drafter states of the newest row's token, [1]."""
        return self._begun.confidence()

    def forget(self, num_pairs: int) -> None:
        """Erase the rows of the context after so many tokens."""
        self.cache.rollback(min(self.cache.length, num_pairs))
        self._rows = None

    @property
    def width(self) -> int:
        """See FixedHead."""
        return self._layout.settings.hidden_size

    @property
    def kept_dtype(self) -> torch.dtype:
        """See FixedHead."""
        return self._parts.dtype

    @property
    def draft_sizes(self) -> tuple[int, ...]:
        """See FixedHead."""
        return (self.num_drafts,)

    @property
    def buckets(self) -> tuple[int, ...]:
        """See FixedHead."""
        return buckets(self.cache.num_slots)

    @property
    def _num_new(self) -> int:
        """Rows of the context that a forward of fixed shape takes."""
        return self._layout.block_size + 1

    def end_of(self, num_tokens: int, num_rows: int) -> int:
        """See FixedHead. The rows that fill up the new ones stand behind the block."""
        return num_tokens - 1 + self._num_new + self._layout.block_size

    def missing(self, tokens: Sequence[int], features: Features) -> Pass | None:
        """See FixedHead."""
        if self._num_missing(tokens) <= self._num_new:
            return None
        return ContextRows(self, tokens, features, len(tokens) - 2, is_reading=True)

    @contextmanager
    def begun(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """See FixedHead."""
        first = self.cache.length
        *new, root = tokens[first:]
        # A block and rows that fill up stand behind the new rows until the next forward.
        self.cache.claim(self._num_new + self._layout.block_size)
        with self.cache.append(new):
            yield [first, len(new), *new, *[0] * (self._num_new - len(new)), root]

    def steps(self, bucket: int, features: Features) -> StaticBlock:
        """See FixedHead."""
        return StaticBlock(self._parts, self.cache, bucket, features)

    def probe(self, which: int) -> list[int]:
        """See FixedHead."""
        new = [1, *[3] * which]
        return [0, len(new), *new, *[0] * (self._num_new - len(new)), 2]

    def undisturbed(self, num_rows: int) -> AbstractContextManager[None]:
        """See FixedHead."""
        return undisturbed(self.cache, self._num_new + self._layout.block_size)

    def recover(self) -> None:
        """See FixedHead."""
        self.cache.zero_beyond()

    @property
    def _begun(self) -> BlockRows:
        assert self._rows is not None, "`start` came before"
        return self._rows

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
        return self._parts.context(states)

    def _read(self, context: torch.Tensor, names: Sequence[int], first: int) -> None:
        """Append rows of the context alone."""
        end = first + context.shape[0]
        tables = self._tables(first, end)
        with self.cache.append(names):
            for layer, attention in enumerate(self._parts.attentions):

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
        end = known + self._layout.block_size
        size = min(self.cache.key_values.num_slots_of(layer), end)
        own = torch.arange(known, end, device=self._parts.device)
        grouped = self._parts.mask(layer, own, size, self.cache.dtype)

        def attend(queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.key_values.write(layer, first, end, keys_values)
            return grouped_attention(queries[-len(own) :], keys, values, grouped)

        return attend

    def _tables(self, first: int, end: int) -> tuple[Table, ...]:
        return self._parts.tables_at(slice(first, end))


@dataclass(frozen=True)
class _HeadPass(Pass):
    """What a block drafter runs after a text. tokens: of it. features: of the target."""

    head: BlockHead
    tokens: Sequence[int]
    features: Features

    @property
    def sharing_key(self) -> Hashable:
        return id(self.head)

    def together(self, parts: Sequence[_HeadPass]) -> list[torch.Tensor]:
        """See Pass."""
        return [part.forward() for part in parts]


@dataclass(frozen=True)
class ContextRows(_HeadPass):
    """Rows of the context up to token `end`."""

    end: int

    @property
    def num_rows(self) -> int:
        return self.end - self.head.cache.length

    def forward(self) -> torch.Tensor:
        """See Pass."""
        return self.head.read(self.tokens, self.features, self.end)

    def cut(self, most_rows: int) -> tuple[Pass, Pass] | None:
        """See Pass."""
        end = self.head.cache.length + most_rows
        return None if self.end <= end else (replace(self, end=end), self)


@dataclass(frozen=True)
class BlockRun(_HeadPass):
    """The rows of the context that are missing, and a block behind them."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens) - 1 - self.head.cache.length + 1 + self.head.num_drafts

    def forward(self) -> torch.Tensor:
        """See BlockHead.start."""
        while (cut := self.cut(PREFILL_CHUNK)) is not None:
            cut[0].forward()
        return self.head.run(self.tokens, self.features)

    def cut(self, most_rows: int) -> tuple[Pass, Pass] | None:
        """See Pass."""
        first, known = self.head.cache.length, len(self.tokens) - 1
        if known - first <= TOGETHER:
            return None
        end = min(first + most_rows, known - 1)
        return ContextRows(self.head, self.tokens, self.features, end, is_reading=True), self
