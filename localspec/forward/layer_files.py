"""The weights of a model, read from its files only while a layer is in use.

Contract: `opened_by_layers` gives a module of transformers without weights but for its embedding.
Its forward reads the weights of each layer and lets them go again (by accelerate's hooks), and so
does `lent`: a model on a processor is compared and taken over with no more than one layer held
beside what is made of it. A map of a file stays in memory as long as one tensor of it does, so each
tensor has a map of its own.

Not here: folders whose weights have other names or shapes than the module (weights).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset, align_module_device
from torch import nn

from localspec.formats.folder_files import ModelFolder
from localspec.formats.safetensors_file import tensor_shapes
from localspec.forward.completeness import require_read
from localspec.forward.own_bits import empty_module


def return_cached(device: torch.device) -> None:
    """Free what torch, or on Linux the C library, keeps on a device for later. The latter keeps
    what was freed between blocks in use: after loading a packed model, more than the model."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def opened_by_layers(found: ModelFolder, known: Any, dtype: torch.dtype) -> Any:
    """The module; None where names or shapes in the files are others than the module's, or no
    module can be made, of which transformers' own loading says why. known: the config of a native
    family, as transformers reads it. Raises ModelError for tensors that a part of the module
    lacks."""
    try:
        module = empty_module(known, dtype)
    except MemoryError:
        raise
    except Exception:  # unknown values in transformers' code: any type is possible
        return None
    shapes, index = dict[str, tuple[int, ...]](), dict[str, dict[str, str]]()
    for file in found.files:
        for name, shape in tensor_shapes(file).items():
            shapes[name] = shape
            index[name] = {"safetensors_file": str(file), "dtype": str(dtype).partition(".")[2]}
    wanted = {name: tuple(each.shape) for name, each in module.named_parameters()}
    if any(shapes.get(name) != shape for name, shape in wanted.items()):
        return None
    require_read(found, module, shapes.keys() - module.state_dict().keys())
    _hook(module, OffloadedWeightsLoader(index=index))
    return module.eval()


def _hook(module: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Let every part but the embedding, and a head tied to it, read its weights when it is used."""
    embedding = module.get_input_embeddings()
    kept = embedding.weight
    for path, part in module.named_modules():
        own = PrefixedDataset(weights, f"{path}.")
        if part is embedding:
            part.weight = nn.Parameter(own["weight"], requires_grad=False)
        elif any(each is not kept for each in part.parameters(recurse=False)):
            add_hook_to_module(part, AlignDevicesHook("cpu", offload=True, weights_map=own))
    module.tie_weights()


@contextmanager
def lent(layer: nn.Module) -> Iterator[None]:
    """The weights of a layer, for as long as it is read."""
    with ExitStack() as stack:
        for part in layer.modules():
            stack.enter_context(align_module_device(part))
        yield
