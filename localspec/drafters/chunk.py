"""Several draft tokens in one piece of device work: forward, warp, choose, and again.

Contract: `ChunkedDraft.propose` drafts what `drafting.autoregress` would. The host sees tokens and
confidences once a chunk. The stop rule is asked about one token after the other, and a draft ends
with the first token that fails: what the chunk made beyond it is dropped unseen. `propose` is None
where no graph serves (not yet captured, a repetition penalty, the context's end); the caller then
drafts token by token.

Which cuts a graph makes is fixed (`Cuts`), because sorting a vocabulary that nobody cuts would cost
time. Their values, the temperature and the noise are inputs, so that one graph serves every
setting, greedy included. A repetition penalty needs the history and is left to the uncaptured
draft.

The capture itself has never run on CUDA hardware: no GPU was at hand. The chunk's own arithmetic
is tested on a CPU.

Not here: recording (forward.graphs), catching up with the sequence (the drafters).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from localspec.core import DraftPlan, Proposal, SamplingParams, Sequence
from localspec.drafters.drafting import Drafting, fitted
from localspec.drafters.parts import Parts
from localspec.engine.noise import GumbelNoise
from localspec.engine.sampling import Warp, noise_after, perturbed
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import GraphFault, GraphPool, GraphStore, Work, buckets
from localspec.forward.model import LanguageModel, prefill
from localspec.forward.static import Window, undisturbed, uploaded, zero_beyond

SIZES = (1, 2, 4, 8)  # any length is a sum of these
RULED_SIZE = 2  # under a stop rule, which wastes what is drawn beyond its stop
FIRST_WIDTH = 2  # after a full acceptance the draft has two tokens to read
AGREEMENT = 1e-2  # of confidences, between a replay and the uncaptured chunk
KNOBS = 4  # where the settings begin in a chunk's input
NUM_INPUTS = 8


class Cuts(NamedTuple):
    """Which warps leave tokens out."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    def example(self) -> SamplingParams:
        """Settings of this kind."""
        return SamplingParams(
            temperature=0.8,
            top_k=20 if self.top_k else 0,
            top_p=0.9 if self.top_p else 1.0,
            min_p=0.05 if self.min_p else 0.0,
        )


def cuts_of(sampling: SamplingParams) -> Cuts:
    """None of them changes the likeliest token, so greedy has none."""
    if sampling.temperature == 0.0:
        return Cuts()
    return Cuts(sampling.top_k > 0, sampling.top_p < 1.0, sampling.min_p > 0.0)


def knobs_of(sampling: SamplingParams, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p, min-p; those that are not in use are never read."""
    top_k = max(1, min(sampling.top_k, vocab_size))
    return sampling.temperature, float(top_k), sampling.top_p, sampling.min_p


def warp_with(cuts: Cuts, knobs: torch.Tensor) -> Warp:
    """The warp whose settings are read from the device: [4] as `knobs_of` lays them out."""
    temperature, top_p, min_p = (knobs[i : i + 1].float() for i in (0, 2, 3))
    return Warp(
        temperature,
        knobs[1:2].long() if cuts.top_k else None,
        top_p if cuts.top_p else None,
        min_p if cuts.min_p else None,
    )


@dataclass(frozen=True)
class _Key:
    """One graph."""

    cuts: Cuts
    bucket: int
    size: int


@dataclass(frozen=True)
class _Buffers:
    """What all chunks share. summary: [2, 8] fp64, tokens and confidences, is written; noise:
    [8, V] fp32, is read."""

    summary: torch.Tensor
    noise: torch.Tensor


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
        # Ids, start and place as fp64 too, which holds them exactly: one copy for all.
        self._inputs = torch.zeros(NUM_INPUTS, dtype=torch.float64, device=device)
        self._offsets = torch.arange(FIRST_WIDTH, device=device)
        causal = torch.full((FIRST_WIDTH, FIRST_WIDTH), float("-inf"), dtype=window.dtype)
        self._pair = causal.triu_(1).to(device)
        self._single = torch.zeros(1, 1, dtype=window.dtype, device=device)

    @torch.inference_mode()
    def fill(self, pending: list[int], start: int, sampling: SamplingParams) -> None:
        """pending: one or two tokens that follow `start` cached ones."""
        assert 1 <= len(pending) <= FIRST_WIDTH, "older tokens are taken in before"
        last = len(pending) - 1
        head = [pending[0], pending[last], start, last]  # a pad's id does not matter
        values = [*head, *knobs_of(sampling, self._vocab_size)]
        self._inputs.copy_(uploaded(values, torch.float64, self._window.device), non_blocking=True)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Draft: tokens and confidences into the buffers."""
        head = self._inputs[:KNOBS].long()
        start, last = head[2:3], head[3:4]
        slots = start + self._offsets  # [2]; a pad's slot is written again by the next step
        rows = self._window.forward(head[:FIRST_WIDTH], slots, slots, self._pair)  # [2, d]
        row, place = rows.index_select(0, last), start + last
        for step in range(self.size):
            token = self._draft(row, step)  # [1]
            if step + 1 < self.size:
                place = place + 1
                row = self._window.forward(token, place, place, self._single)  # [1, d]

    def _draft(self, row: torch.Tensor, step: int) -> torch.Tensor:
        logits = fitted(self._window.logits(row).float(), self._vocab_size)  # [1, V]
        warp = warp_with(self._cuts, self._inputs[KNOBS:])
        scores = perturbed(logits, warp, self._buffers.noise[step : step + 1])
        confidence, token = torch.softmax(scores[0], dim=-1).max(dim=-1, keepdim=True)  # [1] each
        token = token.clamp(max=self._last_id)
        self._buffers.summary[0, step : step + 1].copy_(token)
        self._buffers.summary[1, step : step + 1].copy_(confidence)
        return token


@dataclass(frozen=True)
class _Ready:
    """A recorded chunk with its inputs."""

    chunk: StaticChunk
    replay: Work


class ChunkedDraft:
    """Drafts with `model` in captured chunks. target_vocab_size: see Drafting."""

    def __init__(self, model: Decoder, target_vocab_size: int, pool: GraphPool) -> None:
        self.model = model
        self._vocab_size = target_vocab_size
        self._store = GraphStore[_Key, _Ready](pool)
        self._cuts = [Cuts()]  # kinds that were asked for
        self._windows: dict[int, Window] = {}
        self._buffers: _Buffers | None = None

    @classmethod
    def of(cls, model: LanguageModel, parts: Parts) -> ChunkedDraft | None:
        """The captured draft loop of a model; None where nothing is captured."""
        if parts.pool is None or not isinstance(model, Decoder):
            return None
        return cls(model, parts.target.vocab_size, parts.pool)

    @property
    def notice(self) -> str | None:
        """Why not everything is captured, for the person; None while nothing went wrong."""
        return self._store.notice

    @property
    def buffer_bytes(self) -> int:
        """Device memory for the noise that chunks read beside the pool; other inputs are a few kB
        more."""
        return 0 if self._buffers is None else self._buffers.noise.nbytes

    def want(self, sampling: SamplingParams) -> None:
        """Let the next `capture` make the graphs of this kind of sampling too."""
        if sampling.repetition_penalty == 1.0 and cuts_of(sampling) not in self._cuts:
            self._cuts.append(cuts_of(sampling))

    def capture(self) -> Iterator[str]:
        """Make the graphs that are missing for what was asked for so far, one at a time; yields
        what is made next. Stop at any time and come back later."""
        capacity = self.model.cache.shape.capacity
        wanted = [
            _Key(cuts, bucket, size)
            for cuts in self._cuts
            for bucket in buckets(capacity)
            for size in SIZES
            if size + FIRST_WIDTH <= bucket
        ]
        yield from self._store.fill(wanted, _phrase, self._captured)

    @torch.inference_mode()
    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal | None:
        """What autoregress would propose; None where it has to."""
        sampling, cache = sequence.sampling, self.model.cache
        self.want(sampling)
        if plan.num_draft_tokens == 0 or sampling.repetition_penalty != 1.0:
            return None
        chunks = self._ready(cuts_of(sampling), len(sequence.tokens) + plan.num_draft_tokens)
        if not chunks:
            return None
        pending = sequence.tokens[cache.length :]
        if len(pending) > FIRST_WIDTH:
            prefill(self.model, pending[:-1])
            pending = pending[-1:]
        draft, goes_on = Drafting(sequence, plan, self._vocab_size), True
        while goes_on:
            room = plan.num_draft_tokens - len(draft.tokens)
            room = room if plan.keep_drafting is None else min(room, RULED_SIZE)
            ready = chunks[max(size for size in chunks if size <= room)]
            goes_on = self._run(ready, pending, sequence, draft)
            pending = draft.tokens[-1:]
        return draft.proposal()

    def _ready(self, cuts: Cuts, end: int) -> dict[int, _Ready]:
        """Chunks by size in the shortest window that holds `end` slots; empty if there is none."""
        for bucket in buckets(self.model.cache.shape.capacity):
            keys = [_Key(cuts, bucket, size) for size in SIZES] if bucket >= end else []
            found = {key.size: self._store.ready[key] for key in keys if key in self._store.ready}
            if 1 in found:  # any length can then be put together
                return found
        return {}

    def _run(self, ready: _Ready, pending: list[int], sequence: Sequence, draft: Drafting) -> bool:
        """One chunk: draft, read, and add the tokens that count; whether the draft goes on."""
        chunk, cache, done = ready.chunk, self.model.cache, len(draft.tokens)
        assert self._buffers is not None, "a captured chunk has its buffers"
        if sequence.sampling.temperature > 0.0:  # greedy, any numbers serve
            rows = noise_after(sequence, range(done, done + chunk.size))
            self._buffers.noise[: chunk.size].copy_(rows)
        chunk.fill(pending, cache.length, sequence.sampling)
        ready.replay()
        tokens, confidences = self._buffers.summary[:, : chunk.size].tolist()  # the one copy
        kept, goes_on = 0, True
        while goes_on and kept < chunk.size:
            if math.isnan(confidences[kept]):  # a damaged draft costs time, never correctness
                goes_on = False
                break
            goes_on = draft.add(int(tokens[kept]), confidences[kept])
            kept += 1
        if kept:
            with cache.append([*pending, *draft.tokens[len(draft.tokens) - kept : -1]]):
                pass  # their slots are written already
        if any(map(math.isnan, confidences)):
            zero_beyond(cache)
        return goes_on

    @torch.inference_mode()
    def _captured(self, key: _Key) -> _Ready:
        """Record one chunk and compare a replay with the code that was recorded."""
        buffers = self._buffer()
        chunk = StaticChunk(self._window(key.bucket), key, self._vocab_size, buffers)
        sampling = key.cuts.example()
        noise = GumbelNoise(0, self._vocab_size, self.model.device)
        with undisturbed(self.model.cache, key.size + FIRST_WIDTH):
            chunk.fill([0], 0, sampling)
            replay = self._store.pool.capture(chunk)
            chunk.fill([1, 2], 0, sampling)  # other inputs than recorded
            buffers.noise.copy_(noise.rows(0, len(buffers.noise)))
            chunk()
            wanted = buffers.summary[:, : key.size].clone()
            buffers.summary.zero_()
            replay()
            found = buffers.summary[:, : key.size]
            is_same = torch.equal(found[0], wanted[0])
            error = float((found[1] - wanted[1]).abs().max())
        if not (is_same and error <= AGREEMENT):
            raise GraphFault(f"a replay of {key.size} draft tokens gave other tokens")
        return _Ready(chunk, replay)

    def _window(self, bucket: int) -> Window:
        if bucket not in self._windows:
            self._windows[bucket] = Window(self.model, bucket)
        return self._windows[bucket]

    def _buffer(self) -> _Buffers:
        if self._buffers is None:
            device, most = self.model.device, max(SIZES)
            summary = torch.zeros(2, most, dtype=torch.float64, device=device)
            self._buffers = _Buffers(summary, torch.zeros(most, self._vocab_size, device=device))
        return self._buffers


def _phrase(key: _Key) -> str:
    tokens = "token" if key.size == 1 else "tokens"
    return f"preparing drafts of {key.size} {tokens} within {key.bucket} tokens of context"
