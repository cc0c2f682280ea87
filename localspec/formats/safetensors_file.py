"""What the headers of .safetensors files say: the sizes of tensors, and whether a file is whole.

Contract: no tensor is read. ModelError for a file that is damaged.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from localspec.errors import damaged, first_line

WHOLE_NUMBERS = frozenset(("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"))
PACKED = frozenset(("I8", "U8"))  # of these, the types of weights that are quantised
POINTER_OF_LFS = b"version "  # how one begins, which a clone without Git LFS holds


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def num_bytes_of(count: int, dtype: str) -> int:
    """Of so many values of a type, whose name holds their bits: F8_E4M3, BF16; BOOL takes 8."""
    bits = re.search(r"\d+", dtype)
    return count * (int(bits[0]) if bits else 8) // 8


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in _entries(file).items()}


def tensor_bytes(file: Path) -> dict[str, int]:
    return {
        name: num_bytes_of(prod(shape), dtype) for name, (shape, dtype) in _entries(file).items()
    }


def check_safetensors(file: Path, is_packed: bool = True) -> None:
    """Check that the header fits the file as safetensors does: known types, shapes that fill their
    bytes, no gaps. is_packed: whether its weights may be quantised. Raises ModelError.
    """
    unfit = WHOLE_NUMBERS - PACKED if is_packed else WHOLE_NUMBERS
    for name, entry in _entries(file).items():
        if name.endswith(".weight") and entry.dtype in unfit:
            # transformers would take them as they are, and the model would say nothing
            raise damaged(file, f"{name} holds whole numbers of a kind that no weights have")


def _entries(file: Path) -> dict[str, _Entry]:
    """The entry of each tensor. Raises ModelError."""
    try:
        with safe_open(file, framework="np") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: _Entry(tuple(each.get_shape()), str(each.get_dtype()))
                for name, each in found.items()
            }
    except OSError as error:
        raise damaged(file, f"it cannot be read ({error})") from error
    except (SafetensorError, OverflowError) as error:
        with file.open("rb") as stream:
            if stream.read(len(POINTER_OF_LFS)) == POINTER_OF_LFS:
                reason = "it is a pointer of Git LFS, and `git lfs pull` fetches the file"
                raise damaged(file, reason) from error
        said, size = first_line(error).rstrip("."), file.stat().st_size
        raise damaged(
            file, f"it has {size} bytes, which its header does not fit ({said})"
        ) from error
