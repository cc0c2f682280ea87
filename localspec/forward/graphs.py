"""The native decoder, its forwards captured as graphs: one per width and stretch of the cache.

Contract: `CapturedDecoder` is a Decoder over the same weights and cache that gives the same
logits. `forward` takes the narrowest captured width that holds the tokens and the shortest
captured stretch (bucket) that holds the sequence; rows that are left over write beyond its end,
where nothing is held. Whatever has no graph yet runs as before, so that nothing ever waits for a
capture. `capture` makes the graphs one by one in idle time; each is believed only once a replay
has given the logits of the uncaptured forward. `run` (several sequences, hidden states) is never
captured. One thread at a time, captures included.

The capture itself has never run on CUDA hardware: no GPU was at hand. All else is exercised on a
CPU by a pool that records nothing.

Not here: recording (pool), the forward that is recorded (static), the draft loop (drafters.chunk).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from localspec.forward.decoder import Decoder
from localspec.forward.pool import GraphFault, GraphPool, Shelf, Work
from localspec.forward.static import StaticForward, Window, undisturbed

# The widths of the cost table first, at every length; then those between them.
COARSE_WIDTHS = (1, 2, 4, 8, 16)
FINE_WIDTHS = (3, 5, 6, 9, 12)
SHORTEST_BUCKET = 256
AGREEMENT = 1e-2  # how far a replay may lie from the uncaptured forward, by the logits' norm

Shape = tuple[int, int]  # width, bucket


def buckets(capacity: int) -> tuple[int, ...]:
    """Stretches of a cache that get graphs of their own: doubling, the last one all of it."""
    found, size = list[int](), SHORTEST_BUCKET
    while size < capacity:
        found.append(size)
        size *= 2
    return (*found, capacity)


def shapes(capacity: int) -> tuple[Shape, ...]:
    """All that is worth capturing, the most useful first."""
    return tuple(
        (width, bucket)
        for widths in (COARSE_WIDTHS, FINE_WIDTHS)
        for bucket in buckets(capacity)
        for width in widths
        if width <= bucket
    )


class _Captured:
    """A recorded forward with its inputs."""

    def __init__(self, static: StaticForward, replay: Work) -> None:
        self.static = static
        self.replay = replay


class CapturedDecoder(Decoder):
    """A Decoder whose forward replays a graph where there is one."""

    def __init__(self, decoder: Decoder, pool: GraphPool) -> None:
        super().__init__(decoder.weights, decoder.cache)
        self._shelf = Shelf[Shape, _Captured](pool)
        self._order: tuple[Shape, ...] = ()  # of the ready ones: narrow before wide, then short
        self._windows: dict[int, Window] = {}
        self._out: torch.Tensor | None = None  # [widest, V] fp32, shared by all graphs

    @property
    def captured(self) -> frozenset[Shape]:
        """Width and bucket of every graph that can be used."""
        return frozenset(self._shelf.ready)

    @property
    def notice(self) -> str | None:
        """Why not everything is captured, for the person; None while nothing went wrong."""
        return self._shelf.notice

    @property
    def buffer_bytes(self) -> int:
        """Device memory for logits that graphs need beside the pool; inputs are a few kB more."""
        return 0 if self._out is None else self._out.nbytes

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        """See Decoder.forward."""
        found = self._graph_for(len(tokens))
        if found is None or self._out is None:
            return super().forward(tokens, parents, num_logits)
        size = len(tokens)
        with self.cache.append(tokens) as start:
            found.static.fill(tokens, parents, start)
            found.replay()
        first = 0 if num_logits is None else size - num_logits
        return self._out[first:size].clone()  # the next replay writes over it

    def capture(self) -> Iterator[str]:
        """Make the graphs that are missing, one at a time; yields what is made next. Stop at any
        time and come back later; each graph is used as soon as it is there."""
        wanted = shapes(self.cache.shape.capacity)
        yield from self._shelf.fill(wanted, _phrase, self._captured)

    def _graph_for(self, num_tokens: int) -> _Captured | None:
        start = self.cache.length
        for width, bucket in self._order:
            if num_tokens <= width and start + width <= bucket:
                return self._shelf.ready[width, bucket] if num_tokens else None
        return None

    @torch.inference_mode()
    def _captured(self, shape: Shape) -> _Captured:
        """Record one graph and hold it against the forward it was made of."""
        width, bucket = shape
        out = self._buffer()
        static = StaticForward(self._window(bucket), width, out)
        with undisturbed(self.cache, width):
            static.fill(self._probe(width, 1), None, 0)
            replay = self._shelf.pool.capture(static)
            static.fill(self._probe(width, 5), None, 0)  # other tokens than those recorded
            static()
            wanted = out[:width].clone()
            out.zero_()
            replay()
            error = float((out[:width] - wanted).norm() / wanted.norm())
        if not error <= AGREEMENT:
            raise GraphFault(f"a replay of {width} tokens gave other logits")
        self._order = tuple(sorted({*self._order, shape}))
        return _Captured(static, replay)

    def _window(self, bucket: int) -> Window:
        if bucket not in self._windows:
            self._windows[bucket] = Window(self, bucket)
        return self._windows[bucket]

    def _buffer(self) -> torch.Tensor:
        if self._out is None:
            widest = max(*COARSE_WIDTHS, *FINE_WIDTHS)
            self._out = torch.zeros(widest, self.vocab_size, device=self.device)
        return self._out

    def _probe(self, width: int, step: int) -> list[int]:
        return [(1 + step * place) % self.vocab_size for place in range(1, width + 1)]


def _phrase(shape: Shape) -> str:
    width, bucket = shape
    return f"preparing steps of {width} within {bucket} tokens of context"
