"""What the headers of .safetensors files say: the sizes of tensors, and whether a file is whole.

Contract: no tensor is read. ModelError for a file that is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from localspec.errors import ModelError, first_line
from localspec.files import parsed

WHOLE_NUMBERS = frozenset(("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"))
PACKED = frozenset(("I8", "U8"))  # of these, what quantised weights are kept in under usual names
T = TypeVar("T")
POINTER_OF_LFS = b"version "  # how one begins, which a clone without Git LFS holds
MAX_HEADER_BYTES = 100 * 1024**2  # the format's own limit


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    return _each(file, lambda entry: tuple(int(size) for size in entry["shape"]))


def tensor_bytes(file: Path) -> dict[str, int]:
    return _each(file, lambda entry: int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]))


def _each(file: Path, read: Callable[[Any], T]) -> dict[str, T]:
    """What `read` finds in the entry of each tensor. Raises ModelError."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            entries = parsed(stream.read(length))
        return {str(name): read(each) for name, each in entries.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(
            f"The header of {file.name} in {file.parent} cannot be read. Fetch the file again."
        ) from error


def check_safetensors(file: Path, is_packed: bool = True) -> None:
    """Check the header against the file's size, then as safetensors does: known types, shapes that
    fill their bytes, no gaps. is_packed: whether its weights may be quantised. Raises ModelError.
    """
    unfit = WHOLE_NUMBERS - PACKED if is_packed else WHOLE_NUMBERS
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if prefix == POINTER_OF_LFS:
            raise _damaged(file, "it is a pointer of Git LFS, and `git lfs pull` fetches the file")
        if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size - 8):
            raise _damaged(file, "its header does not fit the file")
        raw = stream.read(header_bytes)
    try:
        entries = parsed(raw)
        tensors = {name: each for name, each in entries.items() if name != "__metadata__"}
        ends = [int(each["data_offsets"][1]) for each in tensors.values()]
        counted = [
            name
            for name, each in tensors.items()
            if name.endswith(".weight") and each["dtype"] in unfit
        ]
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise _damaged(file, "its header cannot be read") from error
    if counted:  # transformers would take them as they are, and the model would say nothing
        raise _damaged(file, f"{counted[0]} holds whole numbers of a kind that no weights have")
    if max(ends, default=0) != size - 8 - header_bytes:
        raise _damaged(file, f"it has {size} bytes, not the number its header promises")
    try:
        with safe_open(file, framework="np"):
            return
    except (SafetensorError, OverflowError) as error:
        reason = first_line(error).rstrip(".")
        raise _damaged(file, f"its header does not describe its tensors ({reason})") from error


def _damaged(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file.name} in {file.parent} is damaged: {reason}. Fetch the file again.")
