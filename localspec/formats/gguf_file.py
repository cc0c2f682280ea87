"""The header of a GGUF file: its settings and where its tensors lie.

Contract: `read_header` reads no weight, checks every length against the file, and raises ModelError
for a file that is damaged or of a kind that is not known. The lists of the vocabulary are walked
over unless they are asked for: a header is then read in tenths of a second, where the `gguf`
package's own reader, which makes an array of every word, takes ten seconds for 150,000. The sizes
of the types come from that package.

Source: docs/gguf.md of ggml, versions 2 and 3 (little endian).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from localspec.core.errors import ModelError, damaged

MAGIC = b"GGUF"
# In a model folder: names the file that holds its weights. No part of its config.json, so that the
# model stays the same where the file is moved.
POINTER = "gguf.json"
VERSIONS = (2, 3)
NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
STRING, ARRAY = 8, 9
ALIGNMENT = 32
# No file has more of these. A damaged one may say so, and its zeros would be read for hours.
MOST_SETTINGS, MOST_TENSORS, MOST_AXES = 2**12, 2**17, 4
MOST_LISTED, MOST_STRING_BYTES = 2**22, 2**24
# The parts of one model, as llama.cpp names them.
PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})$")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor. shape: in torch's order. kind: ggml's name of its type, such as Q4_K. start: of
    its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: str
    file: Path
    start: int
    num_bytes: int

    def entries(self) -> Iterator[GGUFTensor]:
        """Return each part of the tensor along its first axis as a tensor."""
        size = self.num_bytes // self.shape[0]
        for index in range(self.shape[0]):
            start = self.start + index * size
            yield replace(self, shape=self.shape[1:], start=start, num_bytes=size)


@dataclass(frozen=True)
class GGUFHeader:
    """settings: ggml's keys and values; a list of strings that was not asked for is its length."""

    file: Path
    settings: Mapping[str, Any]
    tensors: tuple[GGUFTensor, ...]

    @property
    def family(self) -> str:
        return str(self.settings.get("general.architecture"))

    @property
    def kinds(self) -> dict[str, int]:
        """The types of its matrices with the weights that each holds, the most first."""
        found = Counter[str]()
        for tensor in self.tensors:
            if len(tensor.shape) > 1:
                found[tensor.kind] += prod(tensor.shape)
        return dict(found.most_common())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def is_gguf(file: Path) -> bool:
    """By its first bytes: Ollama's files have no ending."""
    try:
        with file.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def read_header(file: Path, with_vocabulary: bool = False) -> GGUFHeader:
    """The header of a file, or of all parts of a model that the file is one of. with_vocabulary:
    keep the lists of strings. Raises ModelError."""
    parts = [_of_part(part, with_vocabulary) for part in parts_of(file)]
    count = int(parts[0].settings.get("split.count") or len(parts))
    if count != len(parts):
        raise ModelError(
            f"{file.name} is one of {count} parts of a model, whose names must end in "
            f"-00001-of-{count:05} and so on. Give them these names, and name the first one."
        )
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    return GGUFHeader(file, parts[0].settings, tensors)


def parts_of(file: Path) -> list[Path]:
    """The files of the model that `file` is or begins. Raises ModelError where one is missing."""
    named = PART.match(file.stem)
    if named is None:
        return [file]
    count = int(named["count"])
    names = [f"{named['stem']}-{n:05}-of-{count:05}{file.suffix}" for n in range(1, count + 1)]
    missing = [name for name in names if not (file.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of the {count} parts of {named['stem']} are missing from "
            f"{file.parent}, first {missing[0]}. Fetch them to complete the model."
        )
    return [file.parent / name for name in names]


def _of_part(file: Path, with_vocabulary: bool) -> GGUFHeader:
    try:
        found = file.stat()
        if with_vocabulary:
            return _parsed(file, found.st_size, with_vocabulary)
        return _remembered(file, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}). Check the path.") from error
    except (struct.error, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise damaged(file, "its header cannot be read") from error


@lru_cache(maxsize=256)
def _remembered(file: Path, size: int, changed_ns: int) -> GGUFHeader:
    """changed_ns: so that a file that changed is read again."""
    return _parsed(file, size, with_vocabulary=False)


def _parsed(file: Path, size: int, with_vocabulary: bool) -> GGUFHeader:
    if size < 24:
        raise damaged(file, f"it has {size} bytes")
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != MAGIC:
            raise ModelError(f"{file} is no GGUF file. Name a .gguf file or a model folder.")
        version, num_tensors, num_settings = struct.unpack_from("<IQQ", data, 4)
        if version not in VERSIONS:
            raise ModelError(
                f"{file.name} is GGUF of version {version}, and versions 2 and 3 are read here. "
                "Fetch a newer file of the model."
            )
        if num_settings > MOST_SETTINGS or num_tensors > MOST_TENSORS:
            raise ValueError("it counts more than any file holds")
        reader = _Reader(data, 24, with_vocabulary)
        settings = {reader.string(): reader.value() for _ in range(num_settings)}
        table = [reader.tensor() for _ in range(num_tensors)]
        alignment = settings.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError("no alignment")
        begin = -(-reader.place // alignment) * alignment
    tensors = tuple(_tensor(file, size, begin, *entry) for entry in table)
    _require_apart(file, tensors)
    return GGUFHeader(file, settings, tensors)


def _tensor(
    file: Path, size: int, begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GGUFTensor:
    """size: of the file. begin: of all tensors in it. Raises ModelError."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # numpy: some tenths

    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(
            f"{file.name} holds {name} in a type ({kind}) that this version does not know. "
            "Choose the Q4_K_M, Q5_K_M, Q6_K or Q8_0 file of the model."
        ) from None
    per_block, block_bytes = GGML_QUANT_SIZES[known]
    if not shape or shape[-1] % per_block or not all(shape):
        raise damaged(file, f"{name} holds {list(shape)} weights in blocks of {per_block}")
    num_bytes = prod(shape) // per_block * block_bytes
    if begin + offset + num_bytes > size:
        raise damaged(file, f"it has {size} bytes, fewer than its header promises")
    return GGUFTensor(name, shape, known.name, file, begin + offset, num_bytes)


def _require_apart(file: Path, tensors: Sequence[GGUFTensor]) -> None:
    """Raises ModelError where two tensors have one name, or bytes in common."""
    names = Counter(tensor.name for tensor in tensors)
    if twice := [name for name, count in names.items() if count > 1]:
        raise damaged(file, f"it holds {twice[0]} twice")
    for one, other in pairwise(sorted(tensors, key=lambda tensor: tensor.start)):
        if one.start + one.num_bytes > other.start:
            raise damaged(file, f"{one.name} and {other.name} share bytes")


@dataclass(eq=False)
class _Reader:
    data: mmap.mmap
    place: int
    with_vocabulary: bool

    def number(self, form: str) -> Any:
        (found,) = struct.unpack_from(form, self.data, self.place)
        self.place += struct.calcsize(form)
        return found

    def _count(self, form: str, most: int) -> int:
        found = int(self.number(form))
        if found > most:
            raise ValueError(f"{found} of what no file has more than {most} of")
        return found

    def string(self) -> str:
        length = self._count("<Q", MOST_STRING_BYTES)
        raw = self.data[self.place : self.place + length]
        if len(raw) != length:
            raise ValueError("a string ends beyond the file")
        self.place += length
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int | None = None) -> Any:
        kind = self.number("<I") if kind is None else kind
        if kind == STRING:
            return self.string()
        return self._list() if kind == ARRAY else self.number(NUMBERS[kind])

    def _list(self) -> Any:
        kind, count = self.number("<I"), self._count("<Q", MOST_LISTED)
        if kind == ARRAY:
            raise ValueError("a list of lists")
        if kind in NUMBERS:
            form = f"<{count}{NUMBERS[kind][1]}"
            found = struct.unpack_from(form, self.data, self.place)
            self.place += struct.calcsize(form)
            return list(found)
        if kind == STRING and not self.with_vocabulary:
            for _ in range(count):
                self.place += 8 + struct.unpack_from("<Q", self.data, self.place)[0]
            return count
        return [self.value(kind) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_axes = self.string(), self._count("<I", MOST_AXES)
        axes = [self.number("<Q") for _ in range(num_axes)]
        return name, tuple(reversed(axes)), self.number("<I"), self.number("<Q")
