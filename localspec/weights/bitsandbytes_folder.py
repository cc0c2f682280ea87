"""Folders that bitsandbytes wrote: NF4, FP4 and LLM.int8.

Source: QuantState.as_dict and Linear8bitLt of bitsandbytes 0.50. The sizes of a layer's tensors are
compared with its settings before anything is read (formats.bitsandbytes_layers).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from localspec.formats.bitsandbytes_layers import SCALES, STATE, check_bitsandbytes
from localspec.formats.folder_files import ModelFolder
from localspec.weights.files import places_in, read_tensor
from localspec.weights.library import bitsandbytes
from localspec.weights.stored import Dense, Int8, Nf4, Weight

FORMAT = ".weight_format"  # how an 8-bit layer lays its numbers out; always row by row on disk


class BitsAndBytesSource:
    """See the module. Raises ModelError for a layer of other sizes than its settings say."""

    def __init__(self, found: ModelFolder, dtype: torch.dtype) -> None:
        check_bitsandbytes(found.files, found.name)
        self._places = places_in(found.files)
        # The name of a 4-bit weight, and of its settings.
        self._states = {name.partition(STATE)[0]: name for name in self._places if STATE in name}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for name in self._places if not self._is_part(name))

    def read(self, name: str) -> Weight:
        weight = read_tensor(self._places[name])
        largest = self._places.get(f"{name.removesuffix('.weight')}{SCALES}")
        if largest is not None:
            return Int8(weight, read_tensor(largest).float())
        return self._nf4(name, weight) if name in self._states else Dense(weight)

    def entries(self, name: str) -> Iterator[Weight]:
        """Those of a stack in full precision: the library packs no other."""
        for place in self._places[name].entries():
            yield Dense(read_tensor(place))

    def _nf4(self, name: str, packed: torch.Tensor) -> Nf4:
        functional: Any = bitsandbytes().functional
        begin = f"{name}."
        parts = {
            each.removeprefix(begin): read_tensor(place)
            for each, place in self._places.items()
            if each.startswith(begin)
        }
        state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        scales = state.absmax
        if state.nested:  # scales of scales
            scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
        shape = tuple(int(size) for size in state.shape)
        words = packed.view(torch.uint8).view(-1, 1)
        return Nf4(words, scales.float(), shape, state.blocksize, state.quant_type)

    def _is_part(self, name: str) -> bool:
        """True for a tensor that belongs to a quantised weight."""
        of_weight = name.rpartition(".weight.")[0]
        return name.endswith((SCALES, FORMAT)) or f"{of_weight}.weight" in self._states
