"""What the headers of .safetensors files say: the sizes of tensors, and whether a file is whole.

Contract: no tensor is read but an output head and the embedding that it is compared with.
ModelError for a file that is damaged.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from localspec.core.errors import damaged, first_line

WHOLE_NUMBERS = frozenset(("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"))
PACKED = frozenset(("I8", "U8"))  # of these, the types of weights that are quantised
PACKED_PARTS = ("qweight", "weight_packed")  # of a layer; those of MXFP4 end in _blocks
HEAD, EMBEDDING = "lm_head", "embed_tokens"  # the layers' own names, in families that tie them
PIECE_BYTES = 2**20  # of two tensors that are compared at once
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


def tensor_places(file: Path) -> dict[str, TensorPlace]:
    """Return where each tensor of a file lies. file: checked by `check_safetensors`."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        entries = json.loads(stream.read(size))
    return {
        name: TensorPlace(
            file,
            tuple(entry["shape"]),
            entry["dtype"],
            8 + size + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def has_separate_head(files: Sequence[Path]) -> bool:
    """True if the files hold an output head whose bytes are not those of the embedding, whatever
    config.json says. Two that are equal are read whole, once. Raises ModelError."""
    stamps = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return _has_separate_head(stamps)


@lru_cache(maxsize=256)
def _has_separate_head(stamps: tuple[tuple[Path, int, int], ...]) -> bool:
    """stamps: each file with its size and time, so that a file that changed is read again."""
    tensors = {name: file for file, _, _ in stamps for name in tensor_shapes(file)}
    parts = {name: name.split(".")[-2:] for name in sorted(tensors, key=len)}
    embedding = next((name for name, part in parts.items() if part == [EMBEDDING, "weight"]), None)
    head = next((name for name, part in parts.items() if part == [HEAD, "weight"]), None)
    if head is None or embedding is None:
        return any([HEAD, part] in parts.values() for part in PACKED_PARTS)
    places = (tensor_places(tensors[name])[name] for name in (head, embedding))
    return next(places).differ_from(next(places))


class TensorPlace(NamedTuple):
    """Where a tensor lies in its file. dtype: safetensors' name of its type, such as BF16."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int

    def entries(self) -> Iterator[TensorPlace]:
        """Return where each part of the tensor along its first axis lies."""
        size = self.num_bytes // max(1, self.shape[0])
        for index in range(self.shape[0]):
            start = self.start + index * size
            yield self._replace(shape=self.shape[1:], start=start, num_bytes=size)

    def differ_from(self, other: TensorPlace) -> bool:
        if self.num_bytes != other.num_bytes:
            return True
        with self.file.open("rb") as mine, other.file.open("rb") as theirs:
            mine.seek(self.start)
            theirs.seek(other.start)
            for read in range(0, self.num_bytes, PIECE_BYTES):
                size = min(PIECE_BYTES, self.num_bytes - read)
                if mine.read(size) != theirs.read(size):
                    return True
        return False


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
