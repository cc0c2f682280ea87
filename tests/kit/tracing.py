"""Stand-ins for graph capture on a machine without a GPU, and what tests with one need.

`TracingPool` records the tensor operations of one run and repeats those very operations on those
very tensors. Anything the work asks of the host is thereby frozen at what it was when it was
recorded, reading a value back is refused, and what the work left in its own memory is spoilt
afterwards: so it is as strict as a capture. It knows nothing of streams and real memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import Work
from localspec.forward.model import kv_shape
from tests.kit.decoders import decoder_of
from tests.kit.tiny import tiny_llama

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

    FORBIDDEN = ("_local_scalar_dense", "aten.item", "nonzero", "lift_fresh", "is_pinned")

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._outside = set[int]()  # memory that the work brought along
        self._made = dict[int, torch.Tensor]()  # memory that it took while it was recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_named(func, self.FORBIDDEN):
            raise RuntimeError(f"{func} asks the host while a graph is recorded.")
        read = {memory_of(tensor) for tensor in dense((args, kwargs))}
        self._outside |= read - set(self._made)
        out = func(*args, **(kwargs or {}))
        made = dense(out)
        for tensor in made:
            if (memory := memory_of(tensor)) not in self._outside:
                self._made.setdefault(memory, tensor)
        self._lines.append((func, args, kwargs or {}, made))
        return out

    def run(self) -> None:
        for func, args, kwargs, made in self._lines:
            again = func(*args, **kwargs)
            for old, new in zip(made, dense(again), strict=True):
                # What shares memory (a view, a change in place) stands as it was recorded.
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        for tensor in self._made.values():  # other graphs of the pool write there
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


@cache
def is_named(func: Any, words: tuple[str, ...]) -> bool:
    return any(word in str(func) for word in words)


def dense(tree: Any) -> list[torch.Tensor]:
    """The tensors in what an operator takes or gives, which is at most lists and dicts deep."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.layout == torch.strided else []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for each in tree for tensor in dense(each)]


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
    return decoder_of(module, KVCache(kv_shape(module.config, capacity), dtype, device))
