"""Several draft tokens in one piece of device work: forward, warp, draw, and again.

Contract: `ChunkedDraft.propose` drafts what `drafting.autoregress` would: greedily the same tokens;
sampled, from the same distribution and with the same numbers of the turn's random source, which it
leaves in the same state. The host sees tokens and confidences once a chunk; the rows that tokens
were drawn from stay on the device. The stop rule is asked about one token after the other, and a
draft ends with the first token that fails: what the chunk drew beyond it is dropped unseen.
`propose` is None where no graph serves (not yet captured, a repetition penalty, the context's end);
the caller then drafts token by token.

Which warps a graph holds is fixed (`Warp`), because sorting a vocabulary that nobody cuts would
cost time. Their values are inputs, so that one graph serves every setting. A repetition penalty
needs the history and is left to the uncaptured draft.

The capture itself has never run on CUDA hardware: no GPU was at hand. The chunk's own arithmetic
is tested on a CPU.

Not here: recording (forward.graphs), catching up with the sequence (the drafters).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from localspec.core import DraftPlan, Proposal, SamplingParams, Sequence
from localspec.drafters.drafting import Drafting, fitted
from localspec.drafters.parts import Parts
from localspec.engine.sampling import uniforms, warped
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import GraphFault, GraphPool, GraphStore, Work, buckets
from localspec.forward.model import LanguageModel, prefill
from localspec.forward.static import Window, undisturbed, uploaded, zero_beyond

SIZES = (1, 2, 4, 8)  # any length is a sum of these
RULED_SIZE = 2  # under a stop rule, which wastes what is drawn beyond its stop
FIRST_WIDTH = 2  # after a full acceptance the draft has two tokens to read
AGREEMENT = 1e-2  # of confidences, between a replay and the uncaptured chunk
KNOBS = 4  # where the settings begin in a chunk's input
UNIFORMS = 8  # where the random numbers begin


@dataclass(frozen=True)
class Warp:
    """Which warps a row goes through; none but softmax when greedy."""

    is_sampled: bool = False
    has_top_k: bool = False
    has_top_p: bool = False
    has_min_p: bool = False

    def example(self) -> SamplingParams:
        """Settings of this kind."""
        return SamplingParams(
            temperature=0.8 if self.is_sampled else 0.0,
            top_k=20 if self.has_top_k else 0,
            top_p=0.9 if self.has_top_p else 1.0,
            min_p=0.05 if self.has_min_p else 0.0,
        )


GREEDY = Warp()


def warp_of(sampling: SamplingParams) -> Warp:
    if sampling.temperature == 0.0:
        return GREEDY
    return Warp(True, sampling.top_k > 0, sampling.top_p < 1.0, sampling.min_p > 0.0)


def knobs_of(sampling: SamplingParams, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p, min-p; those that are not in use are never read."""
    top_k = max(1, min(sampling.top_k, vocab_size))
    return sampling.temperature, float(top_k), sampling.top_p, sampling.min_p


def probabilities(logits: torch.Tensor, warp: Warp, knobs: torch.Tensor) -> torch.Tensor:
    """What `sampling.distributions` makes of one row, [V] fp32, with the settings read from the
    device: [4] as `knobs_of` lays them out. Plain softmax when greedy: its peak is the token, its
    height the confidence."""
    if not warp.is_sampled:
        return torch.softmax(logits, dim=-1)
    temperature, top_p, min_p = (knobs[i : i + 1].float() for i in (0, 2, 3))
    scaled = (logits - logits.amax()) / temperature  # a tiny temperature must not overflow
    cuts = (
        knobs[1:2].long() if warp.has_top_k else None,
        top_p if warp.has_top_p else None,
        min_p if warp.has_min_p else None,
    )
    return warped(scaled[None], *cuts)[0]


def drawn(probs: torch.Tensor, best: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The id at `uniform` ([1] fp64, in [0, 1)) of the cumulative sum of probs [V], as [1].
    best: [1], the likeliest id, for the case that uniform * total rounds up to the total."""
    cumulative = probs.double().cumsum(dim=0)
    place = torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True)  # [1]
    return torch.where(place == probs.shape[0], best, place)


@dataclass(frozen=True)
class _Key:
    """One graph. warp: which warps are in it; their values are inputs."""

    warp: Warp
    bucket: int
    size: int


@dataclass(frozen=True)
class _Buffers:
    """What every chunk writes. summary: [2, 8] fp64, tokens and confidences. rows: [8, V] fp32."""

    summary: torch.Tensor
    rows: torch.Tensor


class StaticChunk:
    """`size` draft steps in one window, as tensor code with its inputs in one buffer."""

    def __init__(self, window: Window, key: _Key, vocab_size: int, buffers: _Buffers) -> None:
        device = window.device
        self.size = key.size
        self._window = window
        self._warp = key.warp
        self._vocab_size = vocab_size
        # A damaged draft's NaN could point anywhere, and a wrong index ends a CUDA process.
        self._last_id = min(vocab_size, window.weights.embedding.shape[0]) - 1
        self._buffers = buffers
        # Ids, start and place as fp64 too, which holds them exactly: one copy for all.
        self._inputs = torch.zeros(UNIFORMS + key.size, dtype=torch.float64, device=device)
        self._offsets = torch.arange(FIRST_WIDTH, device=device)
        causal = torch.full((FIRST_WIDTH, FIRST_WIDTH), float("-inf"), dtype=window.dtype)
        self._pair = causal.triu_(1).to(device)
        self._single = torch.zeros(1, 1, dtype=window.dtype, device=device)

    @torch.inference_mode()
    def fill(
        self, pending: list[int], start: int, sampling: SamplingParams, chances: list[float]
    ) -> None:
        """pending: one or two tokens that follow `start` cached ones. chances: a number in [0, 1)
        for each step, ignored when greedy."""
        assert 1 <= len(pending) <= FIRST_WIDTH, "older tokens are taken in before"
        last = len(pending) - 1
        head = [pending[0], pending[last], start, last]  # a pad's id does not matter
        values = [*head, *knobs_of(sampling, self._vocab_size), *chances]
        values += [0.0] * (UNIFORMS + self.size - len(values))
        self._inputs.copy_(uploaded(values, torch.float64, self._window.device), non_blocking=True)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Draft: tokens, confidences and rows into the buffers."""
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
        logits = fitted(self._window.logits(row)[0].float(), self._vocab_size)  # [V]
        probs = probabilities(logits, self._warp, self._inputs[KNOBS:UNIFORMS])
        confidence, token = probs.max(dim=-1, keepdim=True)  # [1] each
        if self._warp.is_sampled:
            token = drawn(probs, token, self._inputs[UNIFORMS + step : UNIFORMS + step + 1])
            self._buffers.rows[step].copy_(probs)
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
        self._warps = [GREEDY]  # kinds of sampling that were asked for
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
        """Device memory for rows that chunks need beside the pool; inputs are a few kB more."""
        return 0 if self._buffers is None else self._buffers.rows.nbytes

    def want(self, sampling: SamplingParams) -> None:
        """Let the next `capture` make the graphs of this kind of sampling too."""
        if sampling.repetition_penalty == 1.0 and warp_of(sampling) not in self._warps:
            self._warps.append(warp_of(sampling))

    def capture(self) -> Iterator[str]:
        """Make the graphs that are missing for what was asked for so far, one at a time; yields
        what is made next. Stop at any time and come back later."""
        capacity = self.model.cache.shape.capacity
        wanted = [
            _Key(warp, bucket, size)
            for warp in self._warps
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
        chunks = self._ready(warp_of(sampling), len(sequence.tokens) + plan.num_draft_tokens)
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

    def _ready(self, warp: Warp, end: int) -> dict[int, _Ready]:
        """Chunks by size in the shortest window that holds `end` slots; empty if there is none."""
        for bucket in buckets(self.model.cache.shape.capacity):
            keys = [_Key(warp, bucket, size) for size in SIZES] if bucket >= end else []
            found = {key.size: self._store.ready[key] for key in keys if key in self._store.ready}
            if 1 in found:  # any length can then be put together
                return found
        return {}

    def _run(self, ready: _Ready, pending: list[int], sequence: Sequence, draft: Drafting) -> bool:
        """One chunk: draft, read, and add the tokens that count; whether the draft goes on."""
        chunk, cache, rng = ready.chunk, self.model.cache, sequence.rng
        is_sampled = sequence.sampling.temperature > 0.0
        state = rng.get_state() if is_sampled else None
        random_numbers = uniforms(chunk.size, rng) if is_sampled else []
        chunk.fill(pending, cache.length, sequence.sampling, random_numbers)
        ready.replay()
        assert self._buffers is not None, "a captured chunk has its buffers"
        tokens, confidences = self._buffers.summary[:, : chunk.size].tolist()  # the one copy
        # The next chunk writes over the rows.
        rows = list(self._buffers.rows[: chunk.size].clone()) if is_sampled else [None] * chunk.size
        kept, goes_on = 0, True
        while goes_on and kept < chunk.size:
            if math.isnan(confidences[kept]):  # a damaged draft costs time, never correctness
                goes_on = False
                break
            goes_on = draft.add(int(tokens[kept]), confidences[kept], rows[kept])
            kept += 1
        if state is not None and kept < chunk.size:  # as if the others had never been drawn
            rng.set_state(state)
            uniforms(kept, rng)
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
        sampling = key.warp.example()
        with undisturbed(self.model.cache, key.size + FIRST_WIDTH):
            chunk.fill([0], 0, sampling, [0.5] * key.size)
            replay = self._store.pool.capture(chunk)
            chunk.fill([1, 2], 0, sampling, [0.25] * key.size)  # other inputs than recorded
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
