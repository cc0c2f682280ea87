"""The weights of a model, read from its files only while a layer is in use.

Contract: `opened_by_layers` gives a module of transformers without weights but for its embedding.
Its forward reads the weights of each layer and lets them go again, and so does `lent`: a model on a
processor is compared and taken over with no more than one layer held beside what is made of it. A
map of a file stays in memory as long as one tensor of it does, so each layer has maps of its own.

Not here: folders whose weights have other names or shapes than the module (weights).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from localspec.formats.safetensors_file import tensor_shapes
from localspec.forward.own_bits import empty_module


class LayerFiles:
    """A module on torch's meta device, and where each of its parameters stands."""

    def __init__(self, module: Any, files: Mapping[str, Path], dtype: torch.dtype) -> None:
        self.module = module
        self._files = files
        self._dtype = dtype
        names = {id(parameter): name for name, parameter in module.named_parameters()}  # tied: one
        self._places: dict[nn.Module, dict[str, str]] = {
            part: {name: names[id(each)] for name, each in part.named_parameters(recurse=False)}
            for part in module.modules()
        }
        self.fill(module.get_input_embeddings())
        module.tie_weights()
        for part, places in self._places.items():
            if places and part is not module.get_input_embeddings():
                part.register_forward_pre_hook(lambda part, _: self.fill(part))
                part.register_forward_hook(lambda part, *_: self._clear(part))

    @contextmanager
    def lent(self, layer: nn.Module) -> Iterator[None]:
        """The weights of a layer, for as long as it is read."""
        self.fill(layer)
        yield
        self._clear(layer)

    def fill(self, part: nn.Module) -> None:
        for each in part.modules():
            for name, place in self._places[each].items():
                if getattr(each, name).is_meta:
                    weight = nn.Parameter(self._read(place), requires_grad=False)
                    setattr(each, name, weight)

    def _clear(self, part: nn.Module) -> None:
        embedding = self.module.get_input_embeddings().weight
        for each in part.modules():
            for name in self._places[each]:
                held = getattr(each, name)
                if held is not embedding:
                    empty = torch.empty(held.shape, device="meta", dtype=self._dtype)
                    setattr(each, name, nn.Parameter(empty, requires_grad=False))

    def _read(self, place: str) -> torch.Tensor:
        with safe_open(self._files[place], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(place)
            return tensor.to(self._dtype)


def return_cached(device: torch.device) -> None:
    """Free what torch, or on Linux the C library, keeps on a device for later. The latter keeps
    what was freed between blocks in use: after loading a packed model, more than the model."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def opened_by_layers(known: Any, files: Sequence[Path], dtype: torch.dtype) -> LayerFiles | None:
    """None where names or shapes in the files are others than the module's, or no module can be
    made, of which transformers' own loading says why. known: the config of a native family, as
    transformers reads it."""
    try:
        module = empty_module(known, dtype)
    except MemoryError:
        raise
    except Exception:  # unknown values in transformers' code: any type is possible
        return None
    shapes, places = dict[str, tuple[int, ...]](), dict[str, Path]()
    for file in files:
        found = tensor_shapes(file)
        shapes |= found
        places |= dict.fromkeys(found, file)
    wanted = {name: tuple(each.shape) for name, each in module.named_parameters()}
    if any(shapes.get(name) != shape for name, shape in wanted.items()):
        return None
    return LayerFiles(module.eval(), places, dtype)
