"""The tensors of a model by their names in transformers, as its files hold them.

`open_source` chooses the reader of a folder. A reader gives the names of what it holds and reads
one tensor at a time, of a stack one matrix; it holds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from localspec.core.errors import ModelError
from localspec.formats.folder_files import ModelFolder
from localspec.weights.bitsandbytes_folder import BitsAndBytesSource
from localspec.weights.files import places_in, read_tensor
from localspec.weights.gguf import GGUFSource
from localspec.weights.mxfp4 import Mxfp4Source
from localspec.weights.packed import READERS, PackedSource
from localspec.weights.stored import Dense, Weight


class WeightSource(Protocol):
    """Where the tensors of a model come from."""

    @property
    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> Weight:
        """Read one of `names`. Raises ModelError, KeyError."""
        ...

    def entries(self, name: str) -> Iterator[Weight]:
        """Read the matrices of a stack one by one, each as `read` gives them. Raises ModelError,
        KeyError."""
        ...


class PlainSource:
    """A folder of .safetensors files in full precision."""

    def __init__(self, found: ModelFolder, dtype: torch.dtype) -> None:
        self._places = places_in(found.files)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def read(self, name: str) -> Weight:
        return Dense(read_tensor(self._places[name]))

    def entries(self, name: str) -> Iterator[Weight]:
        for place in self._places[name].entries():
            yield Dense(read_tensor(place))


class HeldTensors:
    """Tensors in memory, by name."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        self._held = held

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._held)

    def read(self, name: str) -> Weight:
        return Dense(self._held[name])

    def entries(self, name: str) -> Iterator[Weight]:
        yield from map(Dense, self._held[name])


# By the method in quantization_config.
SOURCES: Mapping[str, Callable[[ModelFolder, torch.dtype], WeightSource]] = {
    "gguf": GGUFSource,
    "bitsandbytes": BitsAndBytesSource,
    "mxfp4": Mxfp4Source,
    **dict.fromkeys(READERS, PackedSource),
}


def open_source(found: ModelFolder, dtype: torch.dtype) -> WeightSource:
    """Return the reader of a folder. dtype: of what a reader unpacks. Raises ModelError."""
    if found.stored is None:
        return PlainSource(found, dtype)
    if found.stored.method not in SOURCES:
        raise ModelError(
            f"{found.name} keeps its weights as {found.stored.title}, which only transformers "
            "reads. Choose its copy with 16-bit weights, or a GGUF file."
        )
    return SOURCES[found.stored.method](found, dtype)
