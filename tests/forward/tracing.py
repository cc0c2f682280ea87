"""Stand-ins for graph capture on a machine without a GPU, and what tests with one need.

`TracingPool` records the tensor operations of one run and repeats those very operations on those
very tensors. Anything the work asks of the host is thereby frozen at what it was when it was
recorded, reading a value back is refused, and what the work left in its own memory is spoilt
afterwards: so it is as strict as a capture. It knows nothing of streams and real memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.from_transformers import take_over
from localspec.forward.graphs import Work
from localspec.forward.model import kv_shape
from tests.tiny import tiny_llama

NO_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device is here to capture graphs on"
)


class TracingPool:
    """Repeats recorded tensor operations and spoils the memory they used, as other graphs would.
    num_replays: how many graphs have run."""

    def __init__(self, room: int = 10_000) -> None:
        self.room = room
        self.num_captures = 0
        self.num_replays = 0

    def has_room(self) -> bool:
        return self.num_captures < self.room

    def capture(self, work: Work) -> Work:
        with _Tape() as tape:
            work()
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            tape.run()

        return replay

    def seconds(self, recorded: Work) -> float:
        return 0.0


class _Tape(TorchDispatchMode):
    """Operations in order, with the tensors they read and wrote."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_pinned")

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[tuple[Any, Any, Any, Any]] = []
        self._outside = set[int]()  # memory that the work brought along
        self._made = dict[int, torch.Tensor]()  # memory that it took while it was recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in self.FORBIDDEN):
            raise RuntimeError(f"{func} asks the host while a graph is recorded.")
        read = {memory_of(tensor) for tensor in dense((args, kwargs))}
        self._outside |= read - set(self._made)
        out = func(*args, **(kwargs or {}))
        for tensor in dense(out):
            if memory_of(tensor) not in self._outside:
                self._made.setdefault(memory_of(tensor), tensor)
        self._lines.append((func, args, kwargs or {}, out))
        return out

    def run(self) -> None:
        for func, args, kwargs, out in self._lines:
            again = func(*args, **kwargs)
            for old, new in zip(dense(out), dense(again), strict=True):
                # What shares memory (a view, a change in place) stands as it was recorded.
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        for tensor in self._made.values():  # other graphs of the pool write there
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


def dense(tree: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.layout == torch.strided]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class UncapturedPool:
    """Calls the work again each time."""

    def has_room(self) -> bool:
        return True

    def capture(self, work: Work) -> Work:
        work()
        return work

    def seconds(self, recorded: Work) -> float:
        return 0.0


class StalePool(UncapturedPool):
    """A capture that went wrong without a word: nothing happens on replay."""

    def capture(self, work: Work) -> Work:
        work()
        return lambda: None


class FailingPool(TracingPool):
    """The third graph cannot be captured."""

    def capture(self, work: Work) -> Work:
        work()
        if self.num_captures == 2:
            raise RuntimeError("operation not permitted when stream is capturing.\nCUDA kernel")
        return super().capture(work)


def on_gpu(dtype: torch.dtype, capacity: int) -> Decoder:
    """The tiny model on the GPU, with a cache of its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    module = tiny_llama().to(device=device, dtype=dtype)
    return take_over(module, KVCache(kv_shape(module.config, capacity), dtype, device))
