"""Several draft tokens in one piece of device work: forward, warp, choose, and again.

Contract: `draft_on` drafts what `drafting.autoregress` would. The host reads tokens and confidences
once a draft, under a stop rule once in RULED_SIZE tokens. The rule is asked about one token after
the other, and a draft ends with the first token that fails: what was made beyond it is dropped
unseen. `levels` also gives what else may stand at each place. A chunk that has no graph yet runs
uncaptured. A draft that `serves` refuses is the caller's to make token by token.

Which cuts a graph makes is fixed (`Cuts`), because sorting a vocabulary that nobody cuts would cost
time. Their values, the temperature, the noise and the share of it are inputs, so that one graph
serves every setting, greedy included.

The capture has never run on CUDA hardware. The chunk's own arithmetic is tested on a CPU.
Not here: recording (forward.graphs), catching up with the sequence (the drafters).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from localspec.core.decoding import SamplingParams
from localspec.core.units import counted
from localspec.drafters.drafting import Drafting, Level, fitted, level_of
from localspec.engine.noise import GumbelNoise
from localspec.engine.sampling import Warp, noise_after, perturbed, repelled
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import (
    GraphFault,
    GraphPool,
    GraphStore,
    Recording,
    buckets,
)
from localspec.forward.model import prefill
from localspec.forward.static import Window, undisturbed, windows
from localspec.forward.upload import indices, pinned

SIZES = (1, 2, 4, 8)  # any length is a sum of these
FIRST_WIDTH = 2  # after a full acceptance the draft has two tokens to read
AGREEMENT = 1e-2  # of confidences, between a replay and the uncaptured chunk
KNOBS = 5  # where the settings begin in a chunk's input
NUM_INPUTS = 11


class Cuts(NamedTuple):
    """Which warps but the temperature are in use."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False

    def example(self) -> SamplingParams:
        """Settings of this kind."""
        return SamplingParams(
            temperature=0.8,
            top_k=20 if self.top_k else 0,
            top_p=0.9 if self.top_p else 1.0,
            min_p=0.05 if self.min_p else 0.0,
            repetition_penalty=1.2 if self.penalty else 1.0,
        )


def cuts_of(sampling: SamplingParams) -> Cuts:
    """Only the penalty changes the likeliest token, so greedy has no other."""
    has_penalty = sampling.repetition_penalty != 1.0
    if sampling.temperature == 0.0:
        return Cuts(penalty=has_penalty)
    return Cuts(sampling.top_k > 0, sampling.top_p < 1.0, sampling.min_p > 0.0, has_penalty)


def knobs_of(sampling: SamplingParams, share: float, vocab_size: int) -> tuple[float, ...]:
    """Temperature, top-k, top-p, min-p, penalty, share of the noise; those that are not in use are
    never read."""
    top_k = float(max(1, min(sampling.top_k, vocab_size)))
    warp = (sampling.temperature, top_k, sampling.top_p, sampling.min_p)
    return (*warp, sampling.repetition_penalty, share)


def warp_with(cuts: Cuts, knobs: torch.Tensor) -> Warp:
    """The warp whose settings are read from the device: as `knobs_of` lays them out."""
    temperature, top_p, min_p = (knobs[i : i + 1] for i in (0, 2, 3))
    return Warp(
        temperature,
        knobs[1:2].long() if cuts.top_k else None,
        top_p if cuts.top_p else None,
        min_p if cuts.min_p else None,
    )


@dataclass(frozen=True)
class _Key:
    model: Decoder
    cuts: Cuts
    bucket: int
    size: int


@dataclass(frozen=True)
class _Buffers:
    """What all chunks share. summary: [2, 8, K] fp32, tokens and confidences, is written; noise:
    [8, V] fp32, is read; seen: [V], the tokens under a penalty, is read and grows."""

    summary: torch.Tensor
    noise: torch.Tensor
    seen: torch.Tensor


class StaticChunk:
    """`size` draft steps in one window, as tensor code with its inputs in one buffer."""

    def __init__(self, window: Window, key: _Key, vocab_size: int, buffers: _Buffers) -> None:
        device = window.device
        self.size = key.size
        self._window = window
        self._cuts = key.cuts
        self._vocab_size = vocab_size
        # A damaged draft's NaN could point anywhere, and a wrong index ends a CUDA process.
        self._last_id = min(vocab_size, window.weights.embedding.shape[0]) - 1
        self._buffers = buffers
        # Ids, start and place in fp32 too, which holds them exactly: one copy for all.
        self._inputs = torch.zeros(NUM_INPUTS, dtype=torch.float32, device=device)
        self._offsets = torch.arange(FIRST_WIDTH, device=device)
        pair = (FIRST_WIDTH, FIRST_WIDTH)
        causal = torch.full(pair, float("-inf"), dtype=window.dtype, device=device)
        self._pair = causal.triu_(1)
        self._single = torch.zeros(1, 1, dtype=window.dtype, device=device)

    @torch.inference_mode()
    def fill(
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
        head = [pending[0], pending[last], start, last, num_settled]
        values = [*head, *knobs_of(sampling, share, self._vocab_size)]
        self._inputs.copy_(pinned(values, torch.float32, self._window.device), non_blocking=True)
        if newest is not None:
            self._inputs[:FIRST_WIDTH].copy_(newest.expand(FIRST_WIDTH))

    @torch.inference_mode()
    def __call__(self) -> None:
        """Draft: tokens and confidences into the buffers."""
        head = self._inputs[:KNOBS].long()
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
        logits = fitted(self._window.logits(row).float(), self._vocab_size)  # [1, V]
        knobs, seen = self._inputs[KNOBS:], self._buffers.seen
        if self._cuts.penalty:
            logits = torch.where(seen, repelled(logits, knobs[4:5]), logits)
        noise = self._buffers.noise[step : step + 1]
        scores = perturbed(logits, warp_with(self._cuts, knobs), noise, knobs[5:])
        row, summary = torch.softmax(scores[0], dim=-1), self._buffers.summary
        if summary.shape[2] == 1:  # a maximum takes less time than the largest few
            confidences, tokens = row.max(dim=-1, keepdim=True)  # [1] each
        else:
            confidences, tokens = row.topk(summary.shape[2])  # [K] each
        tokens = tokens.clamp(max=self._last_id)
        summary[0, step].copy_(tokens)
        summary[1, step].copy_(confidences)
        if self._cuts.penalty:
            seen.index_fill_(0, tokens[:1], True)
        return tokens[:1]


class ChunkedDraft:
    """Drafts with `model` in chunks that are captured in idle time. num_children: tokens that
    `levels` gives for each place."""

    def __init__(
        self,
        model: Decoder,
        target_vocab_size: int,
        pool: GraphPool,
        num_children: int = 1,
    ) -> None:
        self._num_children = min(num_children, target_vocab_size)
        self._vocab_size = target_vocab_size
        self._pool = pool
        self._cuts = [Cuts()]  # kinds that were asked for
        self._buffers: _Buffers | None = None
        self._store = GraphStore[_Key, StaticChunk](pool)
        self._windows = cache(windows)
        self.model = model  # may change; the graphs of each model that drafted are kept

    @property
    def notice(self) -> str | None:
        """Why not everything is captured, for the person; None while nothing went wrong."""
        return self._store.notice

    @property
    def buffer_bytes(self) -> int:
        """Device memory for the noise that chunks read beside the pool; other inputs are a few kB
        more."""
        return 0 if self._buffers is None else self._buffers.noise.nbytes

    @property
    def has_missing(self) -> bool:
        """See graphs.Capturing."""
        return self._store.lacks(self._wanted())

    def want(self, sampling: SamplingParams) -> None:
        """Let `capture` make the graphs of this kind of sampling too."""
        if cuts_of(sampling) not in self._cuts:
            self._cuts.append(cuts_of(sampling))

    def capture(self) -> Iterator[str]:
        """Make the graphs that are missing for what was asked for so far, one at a time; yields
        what is made next. Stop at any time and come back later."""
        yield from self._store.fill(self._wanted(), _phrase, self._captured)

    def _wanted(self) -> list[_Key]:
        return [
            _Key(self.model, cuts, bucket, size)
            for cuts in self._cuts
            for bucket in buckets(self.model.cache.shape.capacity)
            for size in SIZES
            if size + FIRST_WIDTH <= bucket
        ]

    def serves(self, draft: Drafting) -> bool:
        """Whether a window holds the whole draft, the cache takes all its rows back, and no grammar
        asks the host about each token."""
        num_tokens, cache = draft.plan.num_draft_tokens, self.model.cache
        end = len(draft.sequence.tokens) + num_tokens
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
        pending = [*draft.sequence.tokens, *draft.tokens][self.model.cache.length :]
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
        sequence, buffers, found = draft.sequence, self._buffer(), list[torch.Tensor]()
        cuts, start, done = cuts_of(sequence.sampling), self.model.cache.length, len(draft.tokens)
        num_rows = max(FIRST_WIDTH, len(pending) + count - 1)
        self.model.cache.claim(num_rows, num_padding=1)  # the first step of a chunk has two rows
        num_settled = self.model.cache.num_settled
        if cuts.penalty:
            seen = indices([*{*sequence.tokens, *draft.tokens}], self.model.device)
            buffers.seen.zero_().index_fill_(0, seen, True)
        for size in _sizes(count):
            key = _Key(self.model, cuts, self._bucket(draft), size)
            ready = self._store.captured_or(key, partial(self._chunk, key))
            if sequence.sampling.temperature > 0.0:  # greedy, any numbers serve
                places = range(done, done + size)
                buffers.noise[:size].copy_(noise_after(sequence, places, self.model.device))
            newest = found[-1][0, -1, :1] if found else None
            ready.work.fill(pending, start, sequence.sampling, draft.share, newest, num_settled)
            ready.replay()
            found.append(buffers.summary[:, :size].clone())
            start += size if found[1:] else len(pending) + size - 1
            done += size
        return torch.cat(found, dim=1)

    def _bucket(self, draft: Drafting) -> int:
        """The shortest window that holds the whole draft."""
        end = len(draft.sequence.tokens) + draft.plan.num_draft_tokens
        return next(each for each in buckets(self.model.cache.shape.capacity) if each >= end)

    def _chunk(self, key: _Key, window: Window | None = None) -> StaticChunk:
        window = window or self._windows(key.model, key.bucket)[0]
        return StaticChunk(window, key, self._vocab_size, self._buffer())

    def _captured(self, key: _Key) -> list[Recording[StaticChunk]]:
        """The graphs that a key may have."""
        return [self._recorded(key, window) for window in self._windows(key.model, key.bucket)]

    @torch.inference_mode()
    def _recorded(self, key: _Key, window: Window) -> Recording[StaticChunk]:
        """Record one chunk and compare a replay with the code that was recorded."""
        buffers, chunk = self._buffer(), self._chunk(key, window)
        sampling = key.cuts.example()
        noise = GumbelNoise(0, self._vocab_size, self.model.device)
        with undisturbed(self.model.cache, key.size + FIRST_WIDTH):
            chunk.fill([0], 0, sampling)
            replay = self._pool.capture(chunk)
            chunk.fill([1, 2], 0, sampling)  # other inputs than recorded
            buffers.noise.copy_(noise.rows(0, len(buffers.noise)))
            buffers.seen.zero_()
            chunk()
            wanted = buffers.summary[:, : key.size].clone()
            buffers.summary.zero_()
            buffers.seen.zero_()
            replay()
            found = buffers.summary[:, : key.size]
            is_same = torch.equal(found[0], wanted[0])
            error = float((found[1] - wanted[1]).abs().max())
        if not (is_same and error <= AGREEMENT):
            raise GraphFault(f"a replay of {key.size} draft tokens gave other tokens")
        return Recording(chunk, replay)

    def _buffer(self) -> _Buffers:
        if self._buffers is None:
            device, most = self.model.device, max(SIZES)
            self._buffers = _Buffers(
                summary=torch.zeros(2, most, self._num_children, device=device),
                noise=torch.zeros(most, self._vocab_size, device=device),
                seen=torch.zeros(self._vocab_size, dtype=torch.bool, device=device),
            )
        return self._buffers


def _sizes(count: int) -> Iterator[int]:
    """Sizes of chunks that make up `count`, the largest first."""
    while count:
        size = max(size for size in SIZES if size <= count)
        yield size
        count -= size


def _phrase(key: _Key) -> str:
    tokens = counted(key.size, "token")
    return f"preparing drafts of {tokens} within {key.bucket} tokens of context"
