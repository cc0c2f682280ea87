"""Device work recorded once and replayed: CUDA graphs that share one memory pool.

Contract: `capture(work)` runs `work` (really, to warm it up), records it, and returns a function
that does the same again on whatever the tensors hold then. Work reads and writes tensors that
live outside it, waits for nothing and returns nothing; so replays may follow each other in any
order although they share memory. What the pool took from the device is measured, in bytes.
`Shelf` fills itself graph by graph, stops at the first that cannot be had, and says why.
`UncapturedPool` only calls the work: by it all that lies above runs on any device.

The CUDA part has never run on its hardware: it was written against torch's documentation and
source, on a machine without a GPU.

Not here: what is captured (graphs, drafters.chunk).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch

Work = Callable[[], None]

WARM_UPS = 3  # libraries choose kernels and take workspaces in their first calls
RESERVE_BYTES = 512 * 1024**2  # left free on the device for everybody else
LIMIT_BYTES = 2 * 1024**3  # graphs beyond this are worth less than the context they cost


class GraphPool(Protocol):
    """Where graphs are recorded."""

    @property
    def pool_bytes(self) -> int:
        """Device memory that capturing has taken so far, as measured."""
        ...

    def has_room(self) -> bool:
        """Whether another graph may be captured."""
        ...

    def capture(self, work: Work) -> Work:
        """See above. Raises RuntimeError where the work cannot be recorded."""
        ...


class Capturing(Protocol):
    """What can be captured in idle time."""

    @property
    def notice(self) -> str | None:
        """Why not everything is captured, for the person; None while nothing went wrong."""
        ...

    def capture(self) -> Iterator[str]:
        """Capture what is missing, one graph after the other; yields what is made next."""
        ...


class UncapturedPool:
    """Calls the work again each time: any device, no memory, no gain."""

    pool_bytes = 0

    def has_room(self) -> bool:
        return True

    def capture(self, work: Work) -> Work:
        work()
        return work


class CudaGraphPool:
    """Graphs of one CUDA device. One thread at a time."""

    def __init__(
        self,
        device: torch.device,
        reserve_bytes: int = RESERVE_BYTES,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.pool_bytes = 0
        self._device = device
        self._reserve_bytes = reserve_bytes
        self._limit_bytes = limit_bytes
        # One stream for every capture: memory of a pool is handed on within a stream only.
        stream: Any = torch.cuda.Stream  # untyped there
        self._stream = stream(device)
        self._handle: Any = torch.cuda.graph_pool_handle()

    def has_room(self) -> bool:
        return self._free_bytes() >= self._reserve_bytes and self.pool_bytes < self._limit_bytes

    def capture(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            before = self._free_bytes()
            # After a capture that failed, torch leaves its stream in force: this one restores.
            with torch.cuda.stream(current):
                self._warm_up(work)
                recorded = self._record(work)
            self.pool_bytes += max(0, before - self._free_bytes())
        return recorded

    def _record(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        # Other threads may ask the driver for something meanwhile: that must not spoil it.
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
        """As the driver counts it, with nothing kept back by torch for later."""
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


class GraphFault(RuntimeError):
    """A replay did not do what the recorded work does."""


Key = TypeVar("Key")
Graph = TypeVar("Graph")


class Shelf(Generic[Key, Graph]):
    """Graphs by key. ready: those that can be used. notice: why there are no more, in words for
    the person; None while nothing went wrong."""

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self.ready: dict[Key, Graph] = {}
        self.notice: str | None = None
        self._is_closed = False

    def fill(
        self, wanted: Iterable[Key], phrase: Callable[[Key], str], make: Callable[[Key], Graph]
    ) -> Iterator[str]:
        """Make what is missing, one at a time, each announced by its phrase just before. May be
        left at any phrase and begun again later."""
        if self._is_closed:
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
                self.ready[key] = make(key)
            except (RuntimeError, MemoryError) as error:
                # After a failed capture torch's own bookkeeping is in doubt: try no further.
                self._is_closed = True
                self.notice = _notice(_first_line(error))
                return


def _notice(reason: str) -> str:
    return (
        f"Not every step is a captured graph: {reason}. Replies are the same; those steps take "
        "a little longer."
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def uploaded(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new host tensor of `values`, in memory that a GPU can fetch it from without a wait.

    New each time: torch keeps such memory until the copy is over, whereas a buffer of our own
    could be written to again before the device has read it.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
