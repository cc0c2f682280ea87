"""Tensors read from .safetensors files one by one, so that none is held longer than it is used.

A map of a file stays in memory as long as one tensor of it does; what is read here is memory of its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from localspec.core.errors import ModelError, damaged
from localspec.formats.safetensors_file import TensorPlace, tensor_places

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def places_in(files: Sequence[Path]) -> dict[str, TensorPlace]:
    """Return where each tensor of a model lies."""
    return {name: place for file in files for name, place in tensor_places(file).items()}


def read_tensor(place: TensorPlace) -> torch.Tensor:
    """Read one tensor into memory of its own. Raises ModelError."""
    if place.dtype not in DTYPES:
        raise ModelError(
            f"{place.file.name} holds a tensor in the type {place.dtype}, which is not read here. "
            "Choose another copy of the model."
        )
    held = torch.empty(place.num_bytes, dtype=torch.uint8)
    view = memoryview(held.numpy().data)
    with place.file.open("rb", buffering=0) as stream:
        stream.seek(place.start)
        while view:
            count = stream.readinto(view)  # at most 2 GiB at once on Linux
            if not count:
                raise damaged(place.file, "it ends within a tensor")
            view = view[count:]
    return held.view(DTYPES[place.dtype]).view(place.shape)
