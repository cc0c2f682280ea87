"""One layer's weight as a published layout keeps it -> what it stands for.

Contract: each reader is a pure function of the tensors of one layer, by the last part of their
names, and of the settings in `quantization_config`; it returns groups of whole numbers with their
scales, or [out, in] in fp32, or None where the layer is not packed (norms, embeddings, what was
left whole). A KeyError names a tensor that is missing.

Not here: files, the choice of the reader (stored), refusing (formats.stored).
Source: AutoAWQ's GEMM packing, GPTQ's (versions 1 and 2), compressed-tensors' pack_quantized,
int_quantized and float_quantized, and the block scales of DeepSeek's FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from localspec.forward.grouped import Grouped

Parts = Mapping[str, torch.Tensor]
Settings = Mapping[str, Any]
Unpack = Callable[[Parts, Settings], Grouped | torch.Tensor | None]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of a word hold
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class OtherBits(ValueError):
    """A layer holds its weights in another number of bits than the config.json says of all."""


def fields(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """The unsigned numbers of `bits` in 32-bit words, the lowest first, along `axis`."""
    words = words.movedim(axis, -1)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    found = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return found.flatten(-2).movedim(-1, axis)


def _require_bits(bits: int, num_words: int, num_values: int) -> None:
    """Raise OtherBits if so many values in so many 32-bit words have another number of bits."""
    held, left = divmod(32 * num_words, num_values)
    if held != bits and not left:
        raise OtherBits(f"in {held} bits, not {bits}")


def awq(parts: Parts, settings: Settings) -> Grouped | None:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    if "qweight" not in parts:
        return None
    _require_bits(4, parts["qweight"].shape[1], parts["scales"].shape[1])
    values, zeros = (_in_order(fields(parts[name], 4, 1)) for name in ("qweight", "qzeros"))
    return Grouped.with_zeros(values.T, zeros.T, parts["scales"].T, 4)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    order = torch.tensor(AWQ_ORDER, device=values.device).argsort()
    by_word = values.view(values.shape[0], -1, len(AWQ_ORDER))
    return by_word[..., order].flatten(1)


def gptq(parts: Parts, settings: Settings) -> Grouped | None:
    """qweight [in / n, out], qzeros [groups, out / n], scales [groups, out], with n numbers in a
    word; g_idx [in] says which group an input belongs to, where they are not in a row. The zero of
    symmetric weights is the middle, whatever the file holds and whichever version it names: some
    programs write the middle itself under the name of the version that keeps one less."""
    if "qweight" not in parts:
        return None
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


def compressed_tensors(parts: Parts, settings: Settings) -> Grouped | torch.Tensor | None:
    """Packed: weight_packed [out, in / n], weight_scale [out, groups], weight_shape. Else `weight`
    in 8 bits with weight_scale, of the tensor, of each row, of groups or of blocks."""
    if "weight_scale" not in parts:
        return None
    if "weight_packed" not in parts:
        return _times_scales(parts, _weights_of(settings).get("block_structure"))
    bits = int(_weights_of(settings)["num_bits"])
    offset = 1 << (bits - 1)
    rows, columns = (int(size) for size in parts["weight_shape"])
    _require_bits(bits, parts["weight_packed"].shape[1], columns)
    values = fields(parts["weight_packed"], bits, 1)[:rows, :columns] - offset
    scales, groups = parts["weight_scale"], parts.get("weight_g_idx")
    zeros = torch.zeros_like(scales, dtype=torch.int32)
    if "weight_zero_point" in parts:
        zeros = fields(parts["weight_zero_point"], bits, 0)[:rows] - offset
    return Grouped.with_zeros(values, zeros, scales, bits, groups)


def _weights_of(settings: Settings) -> Mapping[str, Any]:
    """Of all layers alike (formats.stored refuses others)."""
    found: Mapping[str, Any] = next(iter(settings["config_groups"].values()))["weights"]
    return found


def fp8(parts: Parts, settings: Settings) -> torch.Tensor | None:
    """weight [out, in] in 8-bit floats; weight_scale_inv or weight_scale multiplies it."""
    if "weight" not in parts or parts["weight"].dtype not in FLOAT8:
        return None
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


# -- GGUF, of 4 bits ------------------------------------------------------------------------


def q4_0(blocks: torch.Tensor) -> Grouped:
    """blocks: [rows, n, 18] bytes: an fp16 scale, then 16 low and 16 high numbers."""
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
    values = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), -1).flatten(1)
    return Grouped(values.int(), scales, -8.0 * scales, 4)


def q4_k(blocks: torch.Tensor) -> Grouped:
    """blocks: [rows, n, 144] bytes: two fp16 scales, of eight 6-bit scales and eight 6-bit minima
    in 12 bytes, then 256 numbers."""
    halves = blocks[..., :4].contiguous().view(torch.float16).float()  # [rows, n, 2]
    packed = blocks[..., 4:16].int()
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), -1) * halves[..., :1]
    minima = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), -1) * halves[..., 1:]
    numbers = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)  # 32 low ones, then 32 high
    values = torch.cat((numbers & 15, numbers >> 4), -2).flatten(1)
    return Grouped(values.int(), scales.flatten(1), -minima.flatten(1), 4)


GGUF_GROUPS = {"Q4_0": (18, q4_0), "Q4_K": (144, q4_k)}  # bytes of a block, reader
