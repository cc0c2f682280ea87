"""Weights as published files keep them -> dense tensors under the names of transformers.

Contract: `stored_weights` chooses the reader by the method of `quantization_config` in config.json;
None where transformers reads the folder itself. Each reader is a pure function of a file's tensors
and settings. The values are those that the format defines, computed in fp32 and rounded once to the
precision asked for.

Not here: what a format is called and which are refused (formats), building the model (weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from localspec.core.errors import ModelError, first_line
from localspec.formats.folder_files import ModelFolder, name_of
from localspec.formats.gguf_file import GGUFTensor, read_header
from localspec.formats.gguf_settings import family_of, tensor_names
from localspec.formats.stored import ONE_PRECISION, Stored
from localspec.forward.grouped import Grouped
from localspec.forward.unpack import (
    GGUF_GROUPS,
    OtherBits,
    Unpack,
    awq,
    compressed_tensors,
    fp8,
    gptq,
)

PIECE_BYTES = 64 * 2**20  # of a tensor's stored bytes that are unpacked to fp32 at once

Dense = dict[str, torch.Tensor]
Keep = Callable[[Grouped], Any]


@dataclass(frozen=True)
class StoredWeights:
    """dense: by transformers' names. kept: what was made of weights in the bits of the file."""

    dense: Dense
    kept: Mapping[str, Any]


def stored_weights(
    found: ModelFolder, dtype: torch.dtype, keep: Keep | None = None
) -> StoredWeights | None:
    """keep: makes a layer of the weights of 4 bits that Int4Linear takes, at once, for as numbers
    of their own they take four times the memory. None: they too are unpacked. Raises ModelError."""
    stored, config = found.stored, found.config
    if stored is None or not stored.is_unpacked:
        return None
    if stored.method == "gguf":
        return gguf_weights(config, found.files[0], dtype, keep)
    return packed_weights(found.files, stored, config["quantization_config"], dtype, keep)


# -- safetensors ----------------------------------------------------------------------------


def packed_weights(
    files: Sequence[Path],
    stored: Stored,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    keep: Keep | None,
) -> StoredWeights:
    """The weights of all layers. A layer's tensors may lie in several files."""
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        layers = dict[str, dict[str, Any]]()
        for file in opened:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                layer, _, part = name.rpartition(".")
                layers.setdefault(layer, {})[part] = file
        found, kept = Dense(), dict[str, Any]()
        for layer, places in layers.items():
            parts = {part: file.get_tensor(f"{layer}.{part}") for part, file in places.items()}
            try:
                weight = READERS[stored.method](parts, settings)
                if isinstance(weight, Grouped):
                    _require_groups(weight, stored.group_size)
                    weight = weight if keep is not None and weight.is_kept else weight.dense()
            except OtherBits as error:
                raise ModelError(
                    f"{name_of(files[0].parent)} keeps its layers in different bits: {layer} is "
                    f"{error}, as its config.json says of all. {ONE_PRECISION}"
                ) from error
            except (KeyError, ValueError, RuntimeError) as error:
                raise ModelError(
                    f"The packed weight {layer} in {name_of(files[0].parent)} is not laid out as "
                    f"its config.json says ({first_line(error)}). Fetch the model again, or choose "
                    "another copy of it."
                ) from error
            if weight is not None:  # the others made it
                parts = {part: tensor for part, tensor in parts.items() if part == "bias"}
            if isinstance(weight, torch.Tensor):
                parts["weight"] = weight
            elif weight is not None and keep is not None:
                kept[f"{layer}.weight"] = keep(weight)
            found |= {f"{layer}.{part}": _as(dtype, tensor) for part, tensor in parts.items()}
    return StoredWeights(found, kept)


def _require_groups(weight: Grouped, size: int) -> None:
    """Raises ValueError for groups of another size than the config says; 0: it says none."""
    if weight.places is None and size not in (0, weight.group_size):
        raise ValueError(f"groups of {weight.group_size}, not {size}")


def _as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


READERS: dict[str, Unpack] = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
}


# -- GGUF -----------------------------------------------------------------------------------


def gguf_weights(
    config: Mapping[str, Any], file: Path, dtype: torch.dtype, keep: Keep | None
) -> StoredWeights:
    header = read_header(file)
    names, family = tensor_names(header), family_of(header)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found, kept = Dense(), dict[str, Any]()
    for tensor in header.tensors:
        if tensor.name not in names:
            continue
        name = names[tensor.name]
        layer = name.split(".")[-2]
        order = halves_apart(tensor.shape[0], heads.get(layer, 0) if family.is_interleaved else 0)
        grouped = gguf_groups(tensor) if keep and layer.endswith("_proj") else None
        if keep is not None and grouped is not None:
            kept[name] = keep(grouped.rows(order))
        elif family.norm_shift and layer.endswith("norm"):
            found[name] = (gguf_values(tensor, torch.float32) - family.norm_shift).to(dtype)
        else:
            found[name] = gguf_values(tensor, dtype)[order]
    return StoredWeights(_with_joined_experts(found), kept)


def _with_joined_experts(dense: Dense) -> Dense:
    """The weights of all experts of a layer as transformers holds them: gate and up as one."""
    joined = Dense()
    for name, tensor in dense.items():
        layer, is_expert, part = name.partition(".experts.")
        if not is_expert:
            joined[name] = tensor
        elif part == "gate_proj.weight":
            up = dense[f"{layer}.experts.up_proj.weight"]
            joined[f"{layer}.experts.gate_up_proj"] = torch.cat((tensor, up), 1)  # [e, 2 f, d]
        elif part == "down_proj.weight":
            joined[f"{layer}.experts.down_proj"] = tensor
    return joined


def gguf_groups(tensor: GGUFTensor) -> Grouped | None:
    """A matrix of 4 bits as its numbers; None for other kinds."""
    if tensor.kind not in GGUF_GROUPS or len(tensor.shape) != 2:
        return None
    num_bytes, read = GGUF_GROUPS[tensor.kind]
    shape = (tensor.shape[0], tensor.num_bytes // tensor.shape[0] // num_bytes, num_bytes)
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.start, shape)
    return read(torch.from_numpy(np.array(raw)))


def gguf_values(tensor: GGUFTensor, dtype: torch.dtype) -> torch.Tensor:
    """What a tensor of a file stands for, in its shape."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quant_shape_to_byte_shape

    kind = GGMLQuantizationType[tensor.kind]
    made = torch.empty(tensor.shape, dtype=dtype)
    flat = made.view(-1, tensor.shape[-1])
    row_bytes = quant_shape_to_byte_shape((1, tensor.shape[-1]), kind)[-1]
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.start, (flat.shape[0], row_bytes))
    step = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, flat.shape[0], step):
        rows = np.array(raw[first : first + step])  # a copy, for torch wants to own it
        try:
            flat[first : first + step] = torch.from_numpy(dequantize(rows, kind))
        except NotImplementedError as error:
            raise ModelError(
                f"{tensor.file.name} holds {tensor.name} as {tensor.kind}, which cannot be "
                "unpacked here. Choose the Q4_K_M, Q5_K_M, Q6_K or Q8_0 file of the model."
            ) from error
    return made


def halves_apart(num_rows: int, num_heads: int) -> torch.Tensor | slice:
    """The order that puts rows of heads whose rotated pairs stand together into all first ones,
    then all second ones. As they are for no heads, and then without a copy: a copy of each weight
    breaks the memory into holes, and a load held up to half of the weights more."""
    if not num_heads:
        return slice(None)
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()
