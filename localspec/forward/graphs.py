"""CUDA graphs: device work recorded once and replayed, and the native decoder captured in them.

Contract: `GraphPool.capture(work)` runs `work` to warm it up, records it, and returns a function
that does the same again on whatever the tensors hold then. Work reads and writes tensors that live
outside it, waits for nothing and returns nothing; so replays may follow each other in any order
although they share memory. `GraphStore` captures graph by graph, stops at the first that fails, and
says why.

`CapturedDecoder` is a Decoder over the same weights and cache that gives the same logits. `forward`
takes the narrowest captured width that holds the tokens and the shortest captured stretch (bucket)
that holds the sequence; rows that are left over write beyond its end, where nothing is held.
What has no graph yet runs uncaptured, so that nothing waits for a capture. `capture` makes the
graphs one by one in idle time; each is used only once a replay has given the logits of the
uncaptured forward. `look_back` (hidden states) is never captured. One thread at a time, captures
included.

The capture itself has never run on CUDA hardware: no GPU was available. All else is tested on a CPU
with pools that record nothing.

Not here: the forward that is recorded (static), the draft loop (drafters.chunk).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import torch

from localspec.core.errors import first_line
from localspec.forward.cache import WIDEST
from localspec.forward.decoder import Decoder
from localspec.forward.restoring import undisturbed
from localspec.forward.static import StaticForward, Window, windows

Work = Callable[[], None]
Filled = TypeVar("Filled", bound=Work)

WARM_UPS = 3  # libraries choose kernels and take workspaces in their first calls
TIMED_REPLAYS = 10
RESERVE_BYTES = 512 * 1024**2  # left free on the device


class GraphPool(Protocol):
    """Where graphs are recorded."""

    def has_room(self) -> bool:
        """Whether another graph may be captured."""
        ...

    def capture(self, work: Work) -> Work:
        """See the module. Raises RuntimeError where the work cannot be recorded."""
        ...

    def seconds(self, recorded: Work) -> float:
        """How long a replay takes."""
        ...


class Capturing(Protocol):
    """What can be captured in idle time."""

    @property
    def notice(self) -> str | None:
        """Why not everything is captured, as a sentence; None while nothing failed."""
        ...

    @property
    def has_missing(self) -> bool:
        """True if `capture` would make a graph now."""
        ...

    def capture(self) -> Iterator[str]:
        """Capture what is missing, one graph at a time; yields a phrase before each. May be left at
        any phrase and called again later."""
        ...


class CudaGraphPool:
    """Graphs of one CUDA device. One thread at a time. limit_bytes: what they may take (planned
    for by machine.memory). pool_bytes: what they have taken so far, as measured."""

    def __init__(
        self,
        device: torch.device,
        limit_bytes: int,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        self.pool_bytes = 0
        self._device = device
        self._reserve_bytes = reserve_bytes
        self._limit_bytes = limit_bytes
        # One stream for every capture: a pool's memory is reused within one stream only.
        stream: Any = torch.cuda.Stream  # untyped there
        self._stream = stream(device)
        self._handle: Any = torch.cuda.graph_pool_handle()

    def has_room(self) -> bool:
        return self._free_bytes() >= self._reserve_bytes and self.pool_bytes < self._limit_bytes

    def capture(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            before = self._free_bytes()
            # After a failed capture torch leaves its own stream current: this restores it.
            with torch.cuda.stream(current):
                self._warm_up(work)
                recorded = self._record(work)
            self.pool_bytes += max(0, before - self._free_bytes())
        return recorded

    def seconds(self, recorded: Work) -> float:
        recorded()
        torch.cuda.synchronize(self._device)
        started = perf_counter()
        for _ in range(TIMED_REPLAYS):
            recorded()
        torch.cuda.synchronize(self._device)
        return (perf_counter() - started) / TIMED_REPLAYS

    def _record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads to the driver must not end the capture.
        with torch.cuda.graph(
            graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return _Recorded(graph, work)

    def _warm_up(self, work: Work) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(self._stream)

    def _free_bytes(self) -> int:
        """As the driver counts it, after torch returned what it keeps for later."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)


class _Recorded:
    """A graph, and the work that owns every tensor whose address stands in it."""

    def __init__(self, graph: Any, work: Work) -> None:
        self._graph = graph
        self._work = work

    def __call__(self) -> None:
        self._graph.replay()


@dataclass(frozen=True)
class Recording(Generic[Filled]):
    """Work whose inputs are filled in before it runs. replay: of its graph, or the work itself."""

    work: Filled
    replay: Work


class GraphFault(RuntimeError):
    """A replay did not do what the recorded work does."""


Key = TypeVar("Key")


class GraphStore(Generic[Key, Filled]):
    """Graphs by key. ready: those that can be used. notice: see Capturing. pool: None where nothing
    is captured."""

    def __init__(self, pool: GraphPool | None) -> None:
        self.pool = pool
        self.ready: dict[Key, Recording[Filled]] = {}
        self.notice: str | None = None
        self._is_closed = False
        self._uncaptured: dict[Key, Recording[Filled]] = {}

    def captured_or(self, key: Key, make: Callable[[], Filled]) -> Recording[Filled]:
        """The graph; the work as it is, made once, where there is none."""
        if key in self.ready:
            self._uncaptured.pop(key, None)
            return self.ready[key]
        if key not in self._uncaptured:
            work = make()
            self._uncaptured[key] = Recording(work, work)
        return self._uncaptured[key]

    def lacks(self, wanted: Iterable[Key]) -> bool:
        """Return True if `fill` would make one of these graphs: nothing stood in its way so far."""
        is_open = self.pool is not None and self.notice is None
        return is_open and any(key not in self.ready for key in wanted)

    def fill(
        self,
        wanted: Iterable[Key],
        phrase: Callable[[Key], str],
        make: Callable[[Key], Sequence[Recording[Filled]]],
    ) -> Iterator[str]:
        """Make what is missing, as Capturing.capture. make: gives one graph, or several that do the
        same, of which the fastest is kept."""
        if self._is_closed or self.pool is None:
            return
        self.notice = None
        for key in wanted:
            if key in self.ready:
                continue
            if not self.pool.has_room():
                self.notice = _notice("no more memory is to spare for them")
                return
            yield phrase(key)
            try:
                self.ready[key] = _fastest(make(key), self.pool)
            except (RuntimeError, MemoryError) as error:
                # A failed capture may leave torch in an unknown state: try no further.
                self._is_closed = True
                self.notice = _notice(first_line(error).rstrip("."))
                return


def _fastest(made: Sequence[Recording[Filled]], pool: GraphPool) -> Recording[Filled]:
    if len(made) == 1:  # there is no choice to take the time for
        return made[0]
    return min(made, key=lambda each: pool.seconds(each.replay))


def _notice(reason: str) -> str:
    return (
        f"Not every step is a captured graph: {reason}. Replies are the same; those steps take "
        "a little longer."
    )


# The widths of the cost table come first, at every length; then those between them.
COARSE_WIDTHS = (1, 2, 4, 8, WIDEST)
FINE_WIDTHS = (3, 5, 6, 9, 12)
SHORTEST_BUCKET = 256
AGREEMENT = 1e-2  # how far a replay may lie from the uncaptured forward, by the logits' norm


def require_agreement(logits: torch.Tensor, wanted: torch.Tensor, work: str) -> None:
    """Raise GraphFault unless a replay gave the logits of a head that were wanted. work: what was
    replayed. A token that the head does not know has no finite logit in either."""
    is_number = wanted.isfinite()
    off = (logits - wanted).masked_fill(~is_number, 0.0).norm()
    error = float(off / wanted.masked_fill(~is_number, 0.0).norm())
    if not error <= AGREEMENT:  # NaN too
        raise GraphFault(f"a replay of {work} gave other logits")


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


class CapturedDecoder(Decoder):
    """A Decoder whose forward replays a graph where there is one."""

    def __init__(self, decoder: Decoder, pool: GraphPool) -> None:
        super().__init__(decoder.weights, decoder.cache, decoder.is_fastest)
        self._store = GraphStore[Shape, StaticForward](pool)
        self._pool = pool
        self._order = list[Shape]()  # of the ready ones: narrow before wide, then short
        # The ways of attending in a bucket, among which time decides.
        self._windows_of: Callable[[int], tuple[Window, ...]] = cache(partial(windows, self))
        self._out: torch.Tensor | None = None  # [widest, V] fp32, shared by all graphs

    @property
    def captured(self) -> frozenset[Shape]:
        """Width and bucket of every graph that can be used."""
        return frozenset(self._store.ready)

    @property
    def notice(self) -> str | None:
        return self._store.notice

    @property
    def buffer_bytes(self) -> int:
        """Device memory for logits that graphs need beside the pool; inputs are a few kB more."""
        return 0 if self._out is None else self._out.nbytes

    @property
    def has_missing(self) -> bool:
        """See Capturing."""
        return self._store.lacks(self._shapes())

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        """See Decoder.forward."""
        self.catch_up()
        found = self._recording_for(len(tokens))
        if found is None:
            return super().forward(tokens, parents, num_logits)
        size = len(tokens)
        with self.cache.append(tokens) as start:
            self.cache.claim(found.work.width)
            found.work.fill(tokens, parents, start, self.cache.num_settled)
            found.replay()
        first = 0 if num_logits is None else size - num_logits
        return self._buffer()[first:size].clone()  # the next replay writes over it

    def capture(self) -> Iterator[str]:
        """See Capturing; each graph is used as soon as it is there."""
        yield from self._store.fill(self._shapes(), _phrase, self._captured)

    def _shapes(self) -> tuple[Shape, ...]:
        return shapes(self.cache.num_slots)

    def _recording_for(self, num_tokens: int) -> Recording[StaticForward] | None:
        start, ready = self.cache.length, self._store.ready
        if len(self._order) < len(ready):
            self._order = sorted(ready)
        for width, bucket in self._order if num_tokens else ():
            if num_tokens <= width and start + width <= bucket:
                return ready[width, bucket]
        return None

    @torch.inference_mode()
    def _captured(self, shape: Shape) -> list[Recording[StaticForward]]:
        """The graphs that a shape may have."""
        width, bucket = shape
        return [self._recorded(window, width) for window in self._windows_of(bucket)]

    def _recorded(self, window: Window, width: int) -> Recording[StaticForward]:
        """Record one graph and compare it with the forward it was made of."""
        out = self._buffer()
        static = StaticForward(window, width, out)
        with undisturbed(self.cache, width):
            static.fill(self._probe(width, 1), None, 0)
            replay = self._pool.capture(static)
            static.fill(self._probe(width, 5), None, 0)  # other tokens than those recorded
            static()
            wanted = out[:width].clone()
            out.zero_()
            replay()
            require_agreement(out[:width], wanted, f"{width} tokens")
        return Recording(static, replay)

    def _buffer(self) -> torch.Tensor:
        if self._out is None:
            self._out = torch.zeros(WIDEST, self.vocab_size, device=self.device)
        return self._out

    def _probe(self, width: int, step: int) -> list[int]:
        return [(1 + step * place) % self.vocab_size for place in range(1, width + 1)]


def _phrase(shape: Shape) -> str:
    width, bucket = shape
    return f"preparing steps of {width} within {bucket} tokens of context"
