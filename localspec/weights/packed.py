"""Folders whose layers are packed: AWQ, GPTQ, compressed-tensors and FP8.

`PackedSource` finds the tensors of each layer. Each reader is a pure function of these tensors, by
the last part of their names, and of the settings in `quantization_config`; it returns groups of
whole numbers with their scales, or [out, in] in fp32. A KeyError names a tensor that is missing.
Source: AutoAWQ's GEMM packing, GPTQ's (versions 1 and 2), compressed-tensors' pack_quantized,
int_quantized and float_quantized, and the block scales of DeepSeek's FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from localspec.core.errors import ModelError, first_line
from localspec.formats.folder_files import ModelFolder
from localspec.formats.safetensors_file import TensorPlace
from localspec.formats.stored import ONE_PRECISION
from localspec.weights.files import places_in, read_tensor
from localspec.weights.stored import Dense, Grouped, Weight

Parts = Mapping[str, torch.Tensor]
Settings = Mapping[str, Any]
Unpack = Callable[[Parts, Settings], Grouped | torch.Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a word hold
FLOAT8 = ("F8_E4M3", "F8_E5M2")  # safetensors' names of 8-bit floats
# Parts of a layer that only a packed layer has.
MARKS = frozenset(("qweight", "weight_packed", "weight_scale", "weight_scale_inv"))
PARTS = MARKS | {"weight", "bias"}  # last parts of names that say nothing of a layer
JOINED_SCALES = "_scale_inv"  # ends the name of the scales of joined experts


class OtherBits(ValueError):
    """A layer holds its weights in another number of bits than the config.json says of all."""


def fields(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Return the unsigned numbers of `bits` in 32-bit words, the lowest first, along `axis`, as
    uint8."""
    words, mask = words.movedim(axis, -1), (1 << bits) - 1
    values = torch.empty((*words.shape, 32 // bits), dtype=torch.uint8, device=words.device)
    for place, shift in enumerate(range(0, 32, bits)):
        values[..., place] = (words >> shift) & mask
    return values.flatten(-2).movedim(-1, axis)


def _require_bits(bits: int, num_words: int, num_values: int) -> None:
    """Raise OtherBits if so many values in so many 32-bit words have another number of bits."""
    held, left = divmod(32 * num_words, num_values)
    if held != bits and not left:
        raise OtherBits(f"in {held} bits, not {bits}")


def awq(parts: Parts, settings: Settings) -> Grouped:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    _require_bits(4, parts["qweight"].shape[1], parts["scales"].shape[1])
    values, zeros = (_in_order(fields(parts[name], 4, 1)) for name in ("qweight", "qzeros"))
    return Grouped.with_zeros(values.T, zeros.T, parts["scales"].T, 4)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    order = torch.tensor(AWQ_ORDER, device=values.device).argsort()
    by_word = values.view(values.shape[0], -1, len(AWQ_ORDER))
    return by_word[..., order].flatten(1)


def gptq(parts: Parts, settings: Settings) -> Grouped:
    """qweight [in / n, out], qzeros [groups, out / n], scales [groups, out], with n numbers in a
    word; g_idx [in] says which group an input belongs to, where they are not in a row. The zero of
    symmetric weights is the middle, whatever the file holds and whichever version it names: some
    programs write the middle itself under the name of the version that keeps one less."""
    bits = int(settings["bits"])
    _require_bits(bits, parts["qzeros"].shape[1], parts["scales"].shape[1])
    values, zeros = fields(parts["qweight"], bits, 0), fields(parts["qzeros"], bits, 1)
    if settings.get("sym") is True:
        if (zeros != zeros.flatten()[0]).any():
            raise ValueError("symmetric weights with several zeros")
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    elif settings.get("checkpoint_format", "gptq") == "gptq":  # the first version keeps one less
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return Grouped.with_zeros(values.T, zeros.T, parts["scales"].T, bits, parts.get("g_idx"))


def compressed_tensors(parts: Parts, settings: Settings) -> Grouped | torch.Tensor:
    """Packed: weight_packed [out, in / n], weight_scale [out, groups], weight_shape. Else `weight`
    in 8 bits with weight_scale, of the tensor, of each row, of groups or of blocks."""
    if "weight_packed" not in parts:
        return _times_scales(parts, _weights_of(settings).get("block_structure"))
    bits = int(_weights_of(settings)["num_bits"])
    offset = 1 << (bits - 1)
    rows, columns = (int(size) for size in parts["weight_shape"])
    _require_bits(bits, parts["weight_packed"].shape[1], columns)
    values = _signed(fields(parts["weight_packed"], bits, 1)[:rows, :columns], offset)
    scales, groups = parts["weight_scale"], parts.get("weight_g_idx")
    zeros = torch.zeros_like(scales, dtype=torch.int32)
    if "weight_zero_point" in parts:
        zeros = fields(parts["weight_zero_point"], bits, 0)[:rows].int() - offset
    return Grouped.with_zeros(values, zeros, scales, bits, groups)


def _signed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Unsigned numbers less `offset`, as int8."""
    return values.sub_(offset).view(torch.int8)


def _weights_of(settings: Settings) -> Mapping[str, Any]:
    """Of all layers alike (formats.stored refuses others)."""
    found: Mapping[str, Any] = next(iter(settings["config_groups"].values()))["weights"]
    return found


def fp8(parts: Parts, settings: Settings) -> torch.Tensor:
    """weight [out, in] in 8-bit floats; weight_scale_inv or weight_scale multiplies it."""
    return _times_scales(parts, settings.get("weight_block_size"))


def _times_scales(parts: Parts, block: Sequence[int] | None) -> torch.Tensor:
    """`weight` times the scales of the tensor, of its rows or of its blocks. block: the size of
    one, the last of an axis may be cut short; None where they divide the weight evenly."""
    weight = parts["weight"].float()  # [out, in]
    scales = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        weight = weight - _spread(zeros.float(), weight.shape, block)
    return weight * _spread(scales.float(), weight.shape, block)


def _spread(
    scales: torch.Tensor, shape: Sequence[int], block: Sequence[int] | None
) -> torch.Tensor:
    if scales.ndim < 2:  # of the tensor, or of its rows
        scales = scales.reshape(-1, 1)
    for axis, size in enumerate(shape):
        count = scales.shape[axis]
        if count in (1, size):
            continue
        width = size // count if block is None else block[axis]
        if -(-size // width) != count:
            raise ValueError(f"{count} scales along an axis of {size}")
        scales = scales.repeat_interleave(width, axis).narrow(axis, 0, size)
    return scales


READERS: Mapping[str, Unpack] = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
}


class PackedSource:
    """The tensors of a folder, with the packed ones under the names of their weights.

    dtype: of what is unpacked here. A layer's tensors may lie in several files."""

    def __init__(self, found: ModelFolder, dtype: torch.dtype) -> None:
        assert found.stored is not None
        self._found, self._dtype = found, dtype
        self._group_size, self._read = found.stored.group_size, READERS[found.stored.method]
        self._settings: Settings = found.config["quantization_config"]
        self._whole = places_in(found.files)
        layers = dict[str, dict[str, TensorPlace]]()  # the parts of each, by the name of its weight
        for name, place in self._whole.items():
            weight, part = self._part_of(name)
            layers.setdefault(weight, {})[part] = place
        self._packed = {name: parts for name, parts in layers.items() if _is_packed(parts)}
        for name in list(self._whole):
            weight, part = self._part_of(name)
            if weight in self._packed and part != "bias":
                del self._whole[name]

    def _part_of(self, name: str) -> tuple[str, str]:
        """The name of the weight that a tensor belongs to, and which part of it it is. Scales of
        joined experts, which no ".weight" stands for, have the name of their weight in theirs."""
        joined = name.removesuffix(JOINED_SCALES)
        if joined != name and joined in self._whole:
            return joined, "weight_scale_inv"
        layer, _, part = name.rpartition(".")
        if part not in PARTS and self._whole[name].dtype in FLOAT8:
            return name, "weight"
        return f"{layer}.weight", part

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self._whole, *self._packed))

    def read(self, name: str) -> Weight:
        """Raises ModelError for a layer that is not laid out as config.json says."""
        if name not in self._packed:
            return Dense(read_tensor(self._whole[name]))
        if _is_stack(self._packed[name]):
            matrices = [weight.dense(self._dtype) for weight in self.entries(name)]
            return Dense(torch.stack(matrices))
        return self._unpacked(name, self._packed[name])

    def entries(self, name: str) -> Iterator[Weight]:
        """Raises ModelError for a stack that is not laid out as config.json says."""
        if name not in self._packed:
            yield from (Dense(read_tensor(place)) for place in self._whole[name].entries())
            return
        parts = self._packed[name]
        for places in zip(*(place.entries() for place in parts.values()), strict=False):
            yield self._unpacked(name, dict(zip(parts, places, strict=True)))

    def _unpacked(self, name: str, places: Mapping[str, TensorPlace]) -> Weight:
        layer, folder = name.removesuffix(".weight"), self._found.name
        parts = {part: read_tensor(place) for part, place in places.items()}
        try:
            weight = self._read(parts, self._settings)
            if isinstance(weight, torch.Tensor):
                return Dense(weight.to(self._dtype))
            if weight.places is None and self._group_size not in (0, weight.group_size):
                raise ValueError(f"groups of {weight.group_size}, not {self._group_size}")
            return weight
        except OtherBits as error:
            raise ModelError(
                f"{folder} keeps its layers in different bits: {layer} is {error}, as its "
                f"config.json says of all. {ONE_PRECISION}"
            ) from error
        except (KeyError, ValueError, RuntimeError, ZeroDivisionError) as error:
            raise ModelError(
                f"The packed weight {layer} in {folder} is not laid out as its config.json says "
                f"({first_line(error)}). Fetch the model again, or choose another copy of it."
            ) from error


def _is_stack(parts: Mapping[str, TensorPlace]) -> bool:
    """True for joined experts in 8-bit floats, which transformers writes."""
    weight = parts.get("weight")
    return weight is not None and len(weight.shape) == 3


def _is_packed(parts: Mapping[str, TensorPlace]) -> bool:
    weight = parts.get("weight")
    return bool(parts.keys() & MARKS) or (weight is not None and weight.dtype in FLOAT8)
