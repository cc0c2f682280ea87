"""Drafts made by device work of fixed shapes, which a graph can hold.

`FixedWork` makes a draft, or a piece of one, on the device alone: what it needs to know of the text
and of the turn's settings is copied into one buffer before it, what it chose is read from another
behind it. Which cuts it makes is fixed (`Cuts`), because sorting a vocabulary that nobody cuts
would cost time. Their values, the temperature, the noise and the share of it are inputs, so that
one graph serves every setting, greedy included.

`FixedDrafts` keeps the work of every key and captures it in idle time. Work without a graph runs as
it is; where nothing is captured, all does. No capture has run on CUDA hardware.

Not here: recording (forward.graphs), what a step runs (chunk, head_chunks, eagle_beams, medusa).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from localspec.core.decoding import SamplingParams, Sequence
from localspec.drafters.drafting import fitted
from localspec.engine.noise import GumbelNoise
from localspec.engine.sampling import Warp, noise_after, perturbed, repelled
from localspec.forward.graphs import GraphFault, GraphPool, GraphStore, Recording
from localspec.forward.upload import indices, pinned

AGREEMENT = 1e-2  # How far a chance of a replay may lie from that of the work as it is.
NUM_KNOBS = 6  # See `knobs_of`.


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
class Buffers:
    """What all work of one drafter shares. out: fp32, what it chose, is written. noise: fp32, one
    row of [V] for each place of a draft, is read. seen: [1, V], the tokens under a penalty, is read
    and may be written."""

    out: torch.Tensor
    noise: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(
        cls, out_shape: tuple[int, ...], num_places: int, vocab_size: int, device: torch.device
    ) -> Buffers:
        return cls(
            torch.zeros(out_shape, device=device),
            torch.zeros(num_places, vocab_size, device=device),
            torch.zeros(1, vocab_size, dtype=torch.bool, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the noise; the others are a few kB."""
        return self.noise.nbytes


class FixedWork(ABC):
    """A draft as tensor code, with its inputs in one buffer. A call writes into `buffers`."""

    def __init__(self, num_numbers: int, cuts: Cuts, vocab_size: int, buffers: Buffers) -> None:
        """num_numbers: whole numbers that describe a text."""
        self.cuts, self.vocab_size, self.buffers = cuts, vocab_size, buffers
        self._num_numbers = num_numbers
        # Whole numbers stand in fp32 too, which holds them exactly: one copy for all.
        device = buffers.out.device
        self._inputs = torch.zeros(num_numbers + NUM_KNOBS, dtype=torch.float32, device=device)

    @property
    def numbers(self) -> torch.Tensor:
        """The whole numbers on the device, [num_numbers] int64."""
        return self._inputs[: self._num_numbers].long()

    @torch.inference_mode()
    def fill(self, numbers: Several[int], sampling: SamplingParams, share: float = 1.0) -> None:
        """Set what a call runs. share: of the noise."""
        values = [*numbers, *knobs_of(sampling, share, self.vocab_size)]
        device = self._inputs.device
        self._inputs.copy_(pinned(values, torch.float32, device), non_blocking=True)

    @abstractmethod
    def __call__(self) -> None:
        """Draft."""

    def chances(
        self, logits: torch.Tensor, noise: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """Return how likely each token of the target is to be chosen, [n, V].

        logits: [n, V_draft]. noise: [n or 1, V]. seen: the tokens under a penalty, [n or 1, V]."""
        logits = fitted(logits.float(), self.vocab_size)
        knobs = self._inputs[self._num_numbers :]
        if self.cuts.penalty:
            logits = torch.where(seen, repelled(logits, knobs[4:5]), logits)
        return torch.softmax(perturbed(logits, warp_with(self.cuts, knobs), noise, knobs[5:]), -1)


Key = TypeVar("Key")
Work = TypeVar("Work", bound=FixedWork)


class FixedDrafts(ABC, Generic[Key, Work]):
    """The work of one drafter by key: a graphs.Capturing. pool: None where nothing is captured."""

    def __init__(
        self,
        pool: GraphPool | None,
        vocab_size: int,
        device: torch.device,
        out_shape: tuple[int, ...],
        num_places: int,
    ) -> None:
        """out_shape: of Buffers.out. num_places: of its noise."""
        self.pool, self.vocab_size, self.device = pool, vocab_size, device
        self.cuts = [Cuts()]  # kinds of sampling that were asked for
        self._shape = (out_shape, num_places)
        self._store = GraphStore[Key, Work](pool)
        self._buffers: Buffers | None = None

    @property
    def notice(self) -> str | None:
        """See graphs.Capturing."""
        return self._store.notice

    @property
    def has_missing(self) -> bool:
        """See graphs.Capturing."""
        return self._store.lacks(self.wanted())

    @property
    def buffers(self) -> Buffers:
        if self._buffers is None:
            self._buffers = Buffers.of(*self._shape, self.vocab_size, self.device)
        return self._buffers

    @property
    def buffer_bytes(self) -> int:
        """Device memory that is held beside the pool."""
        return 0 if self._buffers is None else self._buffers.nbytes

    def want(self, sampling: SamplingParams) -> Cuts:
        """Let `capture` make the graphs of this kind of sampling too."""
        if (cuts := cuts_of(sampling)) not in self.cuts:
            self.cuts.append(cuts)
        return cuts

    def capture(self) -> Iterator[str]:
        """See graphs.Capturing."""
        yield from self._store.fill(self.wanted(), self.phrase, self._captured)

    @abstractmethod
    def wanted(self) -> list[Key]:
        """Return the keys of all graphs of what was asked for so far, the most useful first."""

    @abstractmethod
    def works(self, key: Key) -> list[Work]:
        """Return the work of a key, in as many ways as may be the fastest."""

    @abstractmethod
    def phrase(self, key: Key) -> str:
        """Return what is made next, for the person."""

    @abstractmethod
    def undisturbed(self, key: Key) -> AbstractContextManager[None]:
        """Restore afterwards what the work of a key writes when it is tried out."""

    @abstractmethod
    def probe(self, work: Work, which: int) -> None:
        """Fill in made-up inputs; others for each number."""

    def compared(self, work: Work) -> torch.Tensor:
        """Return a view of what two runs must agree in."""
        return self.buffers.out

    def ready(self, key: Key) -> Recording[Work]:
        """Return the graph of a key, or its work as it is."""
        return self._store.captured_or(key, lambda: self.works(key)[0])

    def set_noise(self, sequence: Sequence, first: int, count: int) -> None:
        """Set the noise of `count` places after `first` drafted tokens."""
        if sequence.sampling.temperature > 0.0:  # greedy, any numbers serve
            noise = noise_after(sequence, range(first, first + count), self.device)
            self.buffers.noise[:count].copy_(noise)

    def set_seen(self, cuts: Cuts, tokens: Several[int]) -> None:
        """Set the tokens under a penalty, where there is one."""
        if cuts.penalty:
            seen = indices([*{*tokens}], self.device)
            self.buffers.seen.zero_().index_fill_(1, seen, True)

    def _captured(self, key: Key) -> list[Recording[Work]]:
        return [self._recorded(key, work) for work in self.works(key)]

    @torch.inference_mode()
    def _recorded(self, key: Key, work: Work) -> Recording[Work]:
        """Record one graph and compare a replay with the work that was recorded."""
        assert self.pool is not None, "graphs are recorded in a pool"
        buffers = self.buffers
        noise = GumbelNoise(0, self.vocab_size, self.device).rows(0, len(buffers.noise))
        with self.undisturbed(key):
            self.probe(work, 0)
            replay = self.pool.capture(work)
            results = list[torch.Tensor]()
            for run in (work, replay):
                self.probe(work, 1)  # other inputs than recorded
                buffers.noise.copy_(noise)
                buffers.seen.zero_()
                buffers.out.zero_()
                run()
                results.append(self.compared(work).clone())
        error = float((results[0] - results[1]).abs().max())
        if not error <= AGREEMENT:  # NaN too; other ids differ by more
            raise GraphFault(f"a replay of {self.phrase(key)} gave other tokens")
        return Recording(work, replay)
