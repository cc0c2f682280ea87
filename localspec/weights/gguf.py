"""The tensors of a GGUF file under the names of transformers.

What a file holds in 4 bits and groups is read as such numbers, experts in MXFP4 stay in it, and
everything else is read as the values that its kind stands for, computed in fp32 and rounded once.
Source: ggml's kinds; the values by gguf-py's quants.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from localspec.core.errors import ModelError
from localspec.formats.folder_files import ModelFolder
from localspec.formats.gguf_file import GGUFTensor, read_header
from localspec.formats.gguf_settings import family_of, tensor_names
from localspec.weights.stored import MXFP4_BLOCK, Dense, Grouped, Mxfp4, Weight

PIECE_BYTES = 2**22  # Stored bytes of a tensor that are unpacked to fp32 at once.


class GGUFSource:
    """See the module. dtype: of values that are unpacked. Raises ModelError."""

    def __init__(self, found: ModelFolder, dtype: torch.dtype) -> None:
        header, config = read_header(found.files[0]), found.config
        self._dtype, self._family = dtype, family_of(header)
        names = tensor_names(header)
        self._tensors = {names[each.name]: each for each in header.tensors if each.name in names}
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._heads = heads if self._family.is_interleaved else {}
        self._delta = DeltaOrder.of(config) if "linear_num_key_heads" in config else None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def read(self, name: str) -> Weight:
        if ".linear_attn." in name and self._delta is not None:
            return self._of_delta_net(name, self._delta)
        tensor, layer = self._tensors[name], name.split(".")[-2]
        if layer == "shared_expert_gate":
            return Dense(gguf_values(tensor, self._dtype).view(1, -1))
        order = halves_apart(tensor.shape[0], self._heads.get(layer, 0))
        groups = gguf_groups(tensor)
        if groups is not None:
            return groups.rows(order)
        if self._family.norm_shift and "norm" in layer:
            shifted = gguf_values(tensor, torch.float32) - self._family.norm_shift
            return Dense(shifted.to(self._dtype))
        return Dense(gguf_values(tensor, self._dtype)[order])

    def entries(self, name: str) -> Iterator[Weight]:
        for tensor in self._tensors[name].entries():
            packed = gguf_mxfp4(tensor) or gguf_groups(tensor)
            yield Dense(gguf_values(tensor, self._dtype)) if packed is None else packed

    def _of_delta_net(self, name: str, order: DeltaOrder) -> Weight:
        """A tensor of a gated delta net, its value heads in transformers' order."""
        tensor, part = self._tensors[name], name.partition(".linear_attn.")[2]
        weight: Dense | Grouped | None = gguf_groups(tensor)
        if weight is None:
            weight = Dense(gguf_values(tensor, torch.float32 if part == "A_log" else self._dtype))
        if part == "out_proj.weight":
            return weight.columns(order.heads(order.value_size))
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            weight = weight.rows(order.channels())
        elif part == "in_proj_z.weight":
            weight = weight.rows(order.heads(order.value_size))
        elif part != "norm.weight":
            weight = weight.rows(order.heads(1))
        if part == "A_log":  # the file holds what it stands for
            return Dense(torch.log(-weight.dense(torch.float32)).to(self._dtype))
        if part == "conv1d.weight":
            return Dense(weight.dense(self._dtype).unsqueeze(1))
        return weight


@dataclass(frozen=True)
class DeltaOrder:
    """The order of the value heads of gated delta nets. Files hold the first value head of every
    key head, then the second one of each; transformers all of the first key head, then of the next.
    keys: numbers of all keys. value_size: of one value head."""

    num_key_heads: int
    num_value_heads: int
    keys: int
    value_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DeltaOrder:
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        keys = key_heads * config["linear_key_head_dim"]
        return cls(key_heads, value_heads, keys, config["linear_value_head_dim"])

    def heads(self, size: int) -> torch.Tensor:
        """Return where the file holds each number of the value heads, with `size` of each."""
        places = torch.arange(self.num_value_heads * size).view(-1, self.num_key_heads, size)
        return places.transpose(0, 1).flatten()

    def channels(self) -> torch.Tensor:
        """Return the same of queries, keys and values in one."""
        return torch.cat((torch.arange(2 * self.keys), 2 * self.keys + self.heads(self.value_size)))


def gguf_groups(tensor: GGUFTensor) -> Grouped | None:
    """A matrix of 4 bits as its numbers; None for other kinds."""
    if tensor.kind not in GGUF_GROUPS or len(tensor.shape) != 2:
        return None
    num_bytes, read = GGUF_GROUPS[tensor.kind]
    return read(_blocks(tensor, num_bytes))


def gguf_mxfp4(tensor: GGUFTensor) -> Mxfp4 | None:
    """A matrix in MXFP4 as its bytes; None for other kinds."""
    if tensor.kind != "MXFP4" or len(tensor.shape) != 2:
        return None
    return mxfp4(_blocks(tensor, 1 + MXFP4_BLOCK // 2))


def _blocks(tensor: GGUFTensor, num_bytes: int) -> torch.Tensor:
    """Return the blocks of a matrix, [rows, n, num_bytes]."""
    shape = (tensor.shape[0], tensor.num_bytes // tensor.shape[0] // num_bytes, num_bytes)
    return torch.from_numpy(np.array(np.memmap(tensor.file, np.uint8, "r", tensor.start, shape)))


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


def mxfp4(blocks: torch.Tensor) -> Mxfp4:
    """blocks: [rows, n, 17] bytes: a scale, then the first 16 weights in low halves of bytes and
    the last 16 in high halves. Folders hold two that follow one another in a byte."""
    values = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
    return Mxfp4(values[..., ::2] | values[..., 1::2] << 4, blocks[..., 0].contiguous())


def q4_0(blocks: torch.Tensor) -> Grouped:
    """blocks: [rows, n, 18] bytes: an fp16 scale, then 16 low and 16 high numbers."""
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
    values = torch.cat((blocks[..., 2:] & 15, blocks[..., 2:] >> 4), -1).flatten(1)
    return Grouped(values, scales, -8.0 * scales, 4)


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
    return Grouped(values, scales.flatten(1), -minima.flatten(1), 4)


GGUF_GROUPS = {"Q4_0": (18, q4_0), "Q4_K": (144, q4_k)}  # bytes of a block, reader
