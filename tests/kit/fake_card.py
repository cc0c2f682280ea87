"""Tensors of a GPU on a computer without one: shapes, types and devices are real, numbers are not.

`fake_card` lends torch a device on which its own meta kernels run (FakeTensorMode). An operator
that mixes devices, or makes numbers of a type that a card lacks, raises. A fake
holds no numbers: whatever is read back is one and the same number, or True, and every read is
counted, as is every upload that the host would wait for. Streams, rounding, real memory and real
captures are not covered.

CUDA needs a device guard, which a build for processors does not have. It is lent the one of the
device "meta", by a private symbol of torch's library; where torch moved it, tests are skipped.
"""

from __future__ import annotations

import ctypes
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from localspec.forward.heads import files
from localspec.weights import bitsandbytes_folder, mxfp4, packed
from localspec.weights import source as source_of_folders

CUDA, OTHER_CUDA = torch.device("cuda", 0), torch.device("cuda", 1)

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META, _NUM_TYPES = 1, 14, 30  # of c10::DeviceType


@dataclass
class Traffic:
    """Between host and card, by the line of the program that caused it. reads: the host waits for
    a value. uploads: the host waits until its memory was copied. crossings: from one card to the
    other."""

    reads: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)
    crossings: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.crossings.clear()
        self.reads.clear()
        self.uploads.clear()


@contextmanager
def fake_card(number: float = 0.0) -> Iterator[Traffic]:
    """Fake tensors on CUDA. number: what a read gives."""
    _lend_guard()
    traffic = Traffic()
    with ExitStack() as stack:
        for target, name, replacement in _patches(traffic, number):
            stack.enter_context(patch.object(target, name, replacement, create=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Watch(traffic))
        yield traffic


def fake_module(module: Any, dtype: torch.dtype, device: torch.device = CUDA) -> Any:
    """The module with fake tensors in place of its own; tied ones stay tied. Inside `fake_card`."""
    found = dict[int, torch.nn.Parameter]()
    for each in module.modules():
        for name, value in each._parameters.items():
            if value is not None:
                if id(value) not in found:
                    made = torch.empty(value.shape, dtype=dtype, device=device)
                    found[id(value)] = torch.nn.Parameter(made, requires_grad=False)
                each._parameters[name] = found[id(value)]
        for name, value in each._buffers.items():
            if value is not None:
                each._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=device)
    return module


def _lend_guard() -> None:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * _NUM_TYPES).in_dll(library, _GUARDS)
    except (OSError, ValueError):
        pytest.skip("this torch keeps its device guards elsewhere, so no card can be imitated")
    if not guards[_CUDA]:
        guards[_CUDA] = guards[_META]


def _patches(traffic: Traffic, number: float) -> Iterator[tuple[Any, str, Any]]:
    """What reads a value, and what makes a tensor of numbers on the host."""

    def filled(tensor: torch.Tensor) -> Any:
        if tensor.device.type != "cpu":
            traffic.reads[_where()] += 1
        is_bool = tensor.dtype == torch.bool
        value = is_bool or (number if tensor.dtype.is_floating_point else int(number))
        return _nested(list(tensor.shape), value)

    for name in ("tolist", "item", "__float__", "__int__", "__bool__", "__index__"):
        yield FakeTensor, name, _as(name, filled)
    yield FakeTensor, "numpy", lambda tensor: np.array(filled(tensor))
    yield FakeTensor, "pin_memory", _pinned
    yield torch, "equal", lambda left, right: filled((left == right).all())
    yield torch, "tensor", _tensor_of(torch.tensor)
    yield torch, "empty", _empty_of(torch.empty)
    yield files, "load_file", _read_by(files.load_file)
    for source in (bitsandbytes_folder, mxfp4, packed, source_of_folders):
        yield source, "read_tensor", _read_by(source.read_tensor)


def _as(name: str, filled: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    kinds: dict[str, Callable[[Any], Any]] = {
        "__float__": float, "__int__": int, "__bool__": bool, "__index__": int
    }  # fmt: skip

    def read(tensor: torch.Tensor) -> Any:
        value = filled(tensor)
        while name != "tolist" and isinstance(value, list):  # a tensor of one element
            (value,) = value
        return kinds.get(name, lambda same: same)(value)

    return read


def _pinned(tensor: Any) -> Any:
    tensor.is_pinned_here = True
    return tensor


def _tensor_of(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor in its two steps: memory of the host, and a copy to the card."""

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **kind: Any) -> Any:
        made = real(data, device="cpu", **kind)
        if isinstance(made, FakeTensor):
            made.constant = None  # else torch would work out its numbers
        made.is_pinned_here = pin_memory
        return made.to(torch.get_default_device() if device is None else device)

    return tensor


def _empty_of(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.empty, which on a computer without a card pins nothing."""

    def empty(*sizes: Any, pin_memory: bool = False, **kind: Any) -> Any:
        made = real(*sizes, **kind)
        if pin_memory:
            cast(Any, made).is_pinned_here = True
        return made

    return empty


def _read_by(load: Callable[..., Any]) -> Callable[..., Any]:
    """A file's tensors are real, and on the host."""

    def read(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return load(*arguments)

    return read


class _Watch(TorchDispatchMode):
    """Counts the copies between host and card."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(out, "dtype", None) == torch.float64 and out.device.type != "cpu":
            raise TypeError("Apple GPUs have no float64, and on others it is slow.")
        name = func.overloadpacket.__name__
        if name in (
            "to",
            "_to_copy",
        ):  # the first in inference mode
            self._copied(args[0], out, kwargs)
        elif name == "copy_":
            self._copied(args[1], out, {"non_blocking": args[2:3] == (True,), **(kwargs or {})})
        elif name in ("index", "index_put_", "index_put") and args[0].device.type != "cpu":
            if any(each is not None and each.device.type == "cpu" for each in args[1]):
                self._traffic.uploads[_where()] += 1
        elif name in ("nonzero", "masked_select", "_local_scalar_dense"):
            self._traffic.reads[_where()] += 1
        return out

    def _copied(self, source: torch.Tensor, out: torch.Tensor, kwargs: Any) -> None:
        if source.device == out.device:
            return
        if source.device.type == out.device.type:
            self._traffic.crossings[_where()] += 1
            return
        is_read = out.device.type == "cpu"
        is_pinned = getattr(out if is_read else source, "is_pinned_here", False)
        if not (is_pinned and (kwargs or {}).get("non_blocking")):
            (self._traffic.reads if is_read else self._traffic.uploads)[_where()] += 1


def _nested(shape: list[int], value: float) -> Any:
    if not shape:
        return value
    return [_nested(shape[1:], value) for _ in range(shape[0])]


def _where() -> str:
    """The innermost line of the program."""
    for frame, line in traceback.walk_stack(None):
        file = frame.f_code.co_filename
        if "/localspec/" in file:
            return f"{file.partition('/localspec/')[2]}:{line}"
    return "?"


# -- memory ---------------------------------------------------------------------------------

MIB = 2**20


class Allocator:
    """What torch's caching allocator reserves on a card: blocks are cut from segments, the best fit
    first; freed neighbours join; a segment goes back when it is empty and `empty_cache` is called.

    Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13, without streams and its settings."""

    def __init__(self) -> None:
        self._segments: list[list[tuple[int, bool]]] = []  # blocks in order: bytes, whether in use
        self._where: dict[int, tuple[list[tuple[int, bool]], int]] = {}
        self.reserved = self.most_reserved = self.used = self.most_used = 0

    def take(self, key: int, num_bytes: int) -> None:
        size = max(512, -(-num_bytes // 512) * 512)
        is_small = size <= MIB
        segment = self._segment_for(size, is_small)
        place = min(
            (i for i, (held, is_used) in enumerate(segment) if not is_used and held >= size),
            key=lambda i: segment[i][0],
        )
        left = segment[place][0] - size
        is_cut = left >= 512 if is_small else left > MIB
        parts = [(size, True), (left, False)] if is_cut else [(size + left, True)]
        segment[place : place + 1] = parts
        self._where[key] = (segment, sum(held for held, _ in segment[:place]))
        self.used += parts[0][0]
        self.most_used = max(self.most_used, self.used)

    def give(self, key: int) -> None:
        segment, start = self._where.pop(key)
        at = 0
        for place, (held, _) in enumerate(segment):
            if at == start:
                segment[place] = (held, False)
                self.used -= held
                break
            at += held
        joined = list[tuple[int, bool]]()
        for held, is_used in segment:
            if joined and not is_used and not joined[-1][1]:
                joined[-1] = (joined[-1][0] + held, False)
            else:
                joined.append((held, is_used))
        segment[:] = joined

    def empty_cache(self) -> None:
        empty = [each for each in self._segments if not any(is_used for _, is_used in each)]
        self.reserved -= sum(each[0][0] for each in empty)
        self._segments = [each for each in self._segments if each not in empty]

    def _segment_for(self, size: int, is_small: bool) -> list[tuple[int, bool]]:
        fits = [
            (min(held for held, is_used in each if not is_used and held >= size), number)
            for number, each in enumerate(self._segments)
            if (sum(held for held, _ in each) == 2 * MIB) == is_small
            and any(not is_used and held >= size for held, is_used in each)
        ]
        if fits:
            return self._segments[min(fits)[1]]
        whole = 2 * MIB if is_small else 20 * MIB
        if size >= 10 * MIB:
            whole = -(-size // (2 * MIB)) * 2 * MIB
        self._segments.append([(whole, False)])
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)
        return self._segments[-1]


class Memory(TorchDispatchMode):
    """Follows every storage on the card. Inside `fake_card`."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator()
        self._known = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                self._follow(tensor.untyped_storage())
        return out

    def _follow(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.allocator.take(key, storage.nbytes())
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._known.discard(key)
        self.allocator.give(key)


@contextmanager
def memory_of_card() -> Iterator[Allocator]:
    """Inside `fake_card`: what would be reserved."""
    with Memory() as memory, patch.object(torch.cuda, "empty_cache", memory.allocator.empty_cache):
        yield memory.allocator
