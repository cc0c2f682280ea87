"""What the headers of .safetensors files say: the sizes of tensors, and whether a file is whole.

Contract: no tensor is read. ModelError for a file that is damaged.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from localspec.errors import ModelError, first_line

WHOLE_NUMBERS = frozenset(("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"))
PACKED = frozenset(("I8", "U8"))  # of these, what quantised weights are kept in under usual names
POINTER_OF_LFS = b"version "  # how one begins, which a clone without Git LFS holds
BITS = re.compile(r"\d+")  # in the name of a type


class _Entry(NamedTuple):
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        bits = BITS.search(self.dtype)
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8  # BOOL has none


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in _entries(file).items()}


def tensor_bytes(file: Path) -> dict[str, int]:
    return {name: entry.num_bytes for name, entry in _entries(file).items()}


def check_safetensors(file: Path, is_packed: bool = True) -> None:
    """Check that the header fits the file as safetensors does: known types, shapes that fill their
    bytes, no gaps. is_packed: whether its weights may be quantised. Raises ModelError.
    """
    unfit = WHOLE_NUMBERS - PACKED if is_packed else WHOLE_NUMBERS
    for name, entry in _entries(file).items():
        if name.endswith(".weight") and entry.dtype in unfit:
            # transformers would take them as they are, and the model would say nothing
            raise _damaged(file, f"{name} holds whole numbers of a kind that no weights have")


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
        raise _damaged(file, f"it cannot be read ({error})") from error
    except (SafetensorError, OverflowError) as error:
        with file.open("rb") as stream:
            if stream.read(len(POINTER_OF_LFS)) == POINTER_OF_LFS:
                reason = "it is a pointer of Git LFS, and `git lfs pull` fetches the file"
                raise _damaged(file, reason) from error
        said, size = first_line(error).rstrip("."), file.stat().st_size
        raise _damaged(
            file, f"it has {size} bytes, which its header does not fit ({said})"
        ) from error


def _damaged(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file.name} in {file.parent} is damaged: {reason}. Fetch the file again.")
