"""Several draft tokens in one piece of device work: forward, warp, choose, and again.

Contract: `draft_on` drafts what `drafting.autoregress` would. The host reads tokens and confidences
once a draft, under a stop rule once in RULED_SIZE tokens. The rule is asked about one token after
the other, and a draft ends with the first token that fails: what was made beyond it is dropped
unseen. `levels` also gives what else may stand at each place. A draft that `serves` refuses is the
caller's to make token by token.

The capture has never run on CUDA hardware. The chunk's own arithmetic is tested on a CPU.
Not here: choosing, recording (fixed), catching up with the sequence (the drafters).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from localspec.core.decoding import SamplingParams
from localspec.core.units import counted
from localspec.drafters.drafting import Drafting, Level, level_of
from localspec.drafters.fixed import Buffers, Cuts, FixedDrafts, FixedWork, cuts_of
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import GraphPool, buckets
from localspec.forward.heads.fixed import DRAFT_SIZES
from localspec.forward.model import prefill
from localspec.forward.restoring import undisturbed
from localspec.forward.static import Window, windows

FIRST_WIDTH = 2  # after a full acceptance the draft has two tokens to read
NUM_NUMBERS = 5  # the first step's ids, its start, which of its rows is the last, settled tokens


@dataclass(frozen=True)
class _Key:
    model: Decoder
    cuts: Cuts
    bucket: int
    size: int


class StaticChunk(FixedWork):
    """`size` draft steps in one window. Buffers.out: tokens and confidences, [2, 8, K]."""

    def __init__(self, window: Window, key: _Key, vocab_size: int, buffers: Buffers) -> None:
        super().__init__(NUM_NUMBERS, key.cuts, vocab_size, buffers)
        device = window.device
        self.size = key.size
        self._window = window
        # A damaged draft's NaN could point anywhere, and a wrong index ends a CUDA process.
        self._last_id = min(vocab_size, window.weights.embedding.shape[0]) - 1
        self._offsets = torch.arange(FIRST_WIDTH, device=device)
        pair = (FIRST_WIDTH, FIRST_WIDTH)
        causal = torch.full(pair, float("-inf"), dtype=window.dtype, device=device)
        self._pair = causal.triu_(1)
        self._single = torch.zeros(1, 1, dtype=window.dtype, device=device)

    @torch.inference_mode()
    def fill_after(
        self,
        pending: list[int],
        start: int,
        sampling: SamplingParams,
        share: float = 1.0,
        newest: torch.Tensor | None = None,
        num_settled: int = 0,
    ) -> None:
        """pending: one or two tokens that follow `start` cached ones. share: of the noise. newest:
        [1], the one token in place of them where it is known on the device alone. num_settled: the
        cached tokens that states have settled."""
        assert 1 <= len(pending) <= FIRST_WIDTH, "older tokens are taken in before"
        last = len(pending) - 1 if newest is None else 0
        # A pad's id does not matter.
        self.fill([pending[0], pending[last], start, last, num_settled], sampling, share)
        if newest is not None:
            self._inputs[:FIRST_WIDTH].copy_(newest.expand(FIRST_WIDTH))

    @torch.inference_mode()
    def __call__(self) -> None:
        """Draft: tokens and confidences into the buffers."""
        head = self.numbers
        start, last, settled = head[2:3], head[3:4], head[4:5]
        slots = start + self._offsets  # [2]; a pad's slot is written again by the next step
        rows = self._window.forward(
            head[:FIRST_WIDTH], slots, slots, self._pair, slots - settled
        )  # [2, d]
        row, place = rows.index_select(0, last), start + last
        for step in range(self.size):
            token = self._draft(row, step)  # [1]
            if step + 1 < self.size:
                place = place + 1
                row = self._window.forward(
                    token, place, place, self._single, place - settled
                )  # [1, d]

    def _draft(self, row: torch.Tensor, step: int) -> torch.Tensor:
        noise, out, seen = self.buffers.noise, self.buffers.out, self.buffers.seen
        (row,) = self.chances(self._window.logits(row), noise[step : step + 1], seen)  # [V]
        if out.shape[2] == 1:  # a maximum takes less time than the largest few
            confidences, tokens = row.max(dim=-1, keepdim=True)  # [1] each
        else:
            confidences, tokens = row.topk(out.shape[2])  # [K] each
        tokens = tokens.clamp(max=self._last_id)
        out[0, step].copy_(tokens)
        out[1, step].copy_(confidences)
        if self.cuts.penalty:
            seen.index_fill_(1, tokens[:1], True)
        return tokens[:1]


class ChunkedDraft(FixedDrafts[_Key, StaticChunk]):
    """Drafts with `model` in chunks. num_children: tokens that `levels` gives for each place."""

    def __init__(
        self,
        model: Decoder,
        target_vocab_size: int,
        pool: GraphPool,
        num_children: int = 1,
    ) -> None:
        shape = (2, max(DRAFT_SIZES), min(num_children, target_vocab_size))
        super().__init__(pool, target_vocab_size, model.device, shape, max(DRAFT_SIZES))
        self._windows = cache(windows)
        self.model = model  # may change; the graphs of each model that drafted are kept

    def wanted(self) -> list[_Key]:
        """See FixedDrafts."""
        return [
            _Key(self.model, cuts, bucket, size)
            for cuts in self.cuts
            for bucket in buckets(self.model.cache.shape.capacity)
            for size in DRAFT_SIZES
            if size + FIRST_WIDTH <= bucket
        ]

    def works(self, key: _Key) -> list[StaticChunk]:
        """See FixedDrafts."""
        return [
            StaticChunk(window, key, self.vocab_size, self.buffers)
            for window in self._windows(key.model, key.bucket)
        ]

    def phrase(self, key: _Key) -> str:
        """See FixedDrafts."""
        tokens = counted(key.size, "token")
        return f"preparing drafts of {tokens} within {key.bucket} tokens of context"

    def undisturbed(self, key: _Key) -> AbstractContextManager[None]:
        """See FixedDrafts."""
        return undisturbed(key.model.cache, key.size + FIRST_WIDTH)

    def probe(self, work: StaticChunk, which: int) -> None:
        """See FixedDrafts."""
        work.fill_after([1, 2] if which else [0], 0, work.cuts.example())

    def compared(self, work: StaticChunk) -> torch.Tensor:
        """See FixedDrafts."""
        return self.buffers.out[:, : work.size]

    def serves(self, draft: Drafting) -> bool:
        """Whether a window holds the whole draft, the cache takes all its rows back, and no grammar
        asks the host about each token."""
        num_tokens, cache = draft.plan.num_draft_tokens, self.model.cache
        end = len(draft.text) + num_tokens
        is_held = end <= cache.shape.capacity and num_tokens < cache.most_rows
        return draft.sequence.grammar is None and is_held

    @torch.inference_mode()
    def draft_on(self, draft: Drafting) -> None:
        """Draft until the draft ends, after the last token of sequence and draft, which is not in
        the cache yet."""
        pending, goes_on = self._pending(draft), not draft.is_full
        while goes_on:
            _, goes_on = self._taken(draft, pending)
            pending = draft.tokens[-1:]

    @torch.inference_mode()
    def levels(self, draft: Drafting) -> list[Level]:
        """Draft all at once, and give for each place the likeliest few tokens after those that were
        drafted for the places before it."""
        found, _ = self._taken(draft, self._pending(draft))
        return [level_of(*level) for level in zip(*found, strict=True)]

    def _pending(self, draft: Drafting) -> list[int]:
        """The tokens that the first step reads."""
        self.want(draft.sequence.sampling)
        self.model.catch_up()
        pending = draft.pending(self.model.cache.length)
        if len(pending) > FIRST_WIDTH:
            prefill(self.model, pending[:-1])
            pending = pending[-1:]
        return pending

    def _taken(self, draft: Drafting, pending: list[int]) -> tuple[list[Any], bool]:
        """Make tokens, read them, and add those that count: tokens and confidences [2, count, K],
        and whether the draft goes on."""
        cache, num_before = self.model.cache, len(draft.tokens)
        found = self._made(draft, pending, draft.num_unread).tolist()  # the one copy
        tokens, confidences = ([place[0] for place in each] for each in found)
        goes_on = draft.take_all(tokens, confidences)
        if added := draft.tokens[num_before:]:
            with cache.append([*pending, *added[:-1]]):
                pass  # their slots are written already
        if any(map(math.isnan, confidences)):  # a damaged draft costs time, never correctness
            cache.zero_beyond()
        return found, goes_on

    def _made(self, draft: Drafting, pending: list[int], count: int) -> torch.Tensor:
        """`count` tokens and their confidences, [2, count, K], by the largest chunks that fit."""
        sequence, found = draft.sequence, list[torch.Tensor]()
        cuts, start, done = cuts_of(sequence.sampling), self.model.cache.length, len(draft.tokens)
        num_rows = max(FIRST_WIDTH, len(pending) + count - 1)
        self.model.cache.claim(num_rows, num_padding=1)  # the first step of a chunk has two rows
        num_settled = self.model.cache.num_settled
        self.set_seen(cuts, [*sequence.tokens, *draft.tokens])
        for size in sizes_of(count, DRAFT_SIZES):
            ready = self.ready(_Key(self.model, cuts, self._bucket(draft), size))
            self.set_noise(sequence, done, size)
            newest = found[-1][0, -1, :1] if found else None
            ready.work.fill_after(
                pending, start, sequence.sampling, draft.share, newest, num_settled
            )
            ready.replay()
            found.append(self.buffers.out[:, :size].clone())
            start += size if found[1:] else len(pending) + size - 1
            done += size
        return torch.cat(found, dim=1)

    def _bucket(self, draft: Drafting) -> int:
        """The shortest window that holds the whole draft."""
        end = len(draft.text) + draft.plan.num_draft_tokens
        return next(each for each in buckets(self.model.cache.shape.capacity) if each >= end)


def sizes_of(count: int, sizes: Several[int]) -> Iterator[int]:
    """Yield sizes that make up `count`, the largest first; the last may be larger than what is left
    where none is as small."""
    while count > 0:
        yield (size := max((size for size in sizes if size <= count), default=min(sizes)))
        count -= size
