"""Linear layers in NF4: 4 bits a weight, one scale for 64 inputs, by the kernels of bitsandbytes.

The kernels are called without the library's own layer around them, which takes longer than a small
product does. On a processor with instructions for bf16 the weights are laid out anew for a kernel
that serves any number of rows, and a row has the same bits beside others as alone. Other processors
have no kernel that multiplies with NF4 (`has_kernel`): there `UnpackedLinear` unpacks what a file
holds in NF4 at every product. On CUDA the library's kernel serves few rows, and for many it unpacks
the weight: those are multiplied with UNPACKED_AT_ONCE weights at a time.
Source: NF4 in QLoRA (arXiv 2305.14314).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from localspec.formats.bitsandbytes_layers import UNPACKED_AT_ONCE
from localspec.weights.library import bitsandbytes
from localspec.weights.linear import FEW_ROWS, QuantisedLinear, bytes_of, taken
from localspec.weights.stored import Nf4
from localspec.weights.tiles import rows_of_blocks

BLOCK = 64  # inputs that share one scale
ROWS = 32  # outputs that the processor's kernel takes at a time
KERNEL = "gemv_4bit_inference_cpu_nf4_bf16"  # of bitsandbytes' library, for any number of rows
# Rows, outputs, inputs; the rows, weights, scales and results; BLOCK; strides of rows and results.
KERNEL_ARGUMENTS = (*[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3)

Product = Callable[[torch.Tensor], torch.Tensor]


class Nf4Linear(QuantisedLinear):
    """packed: as bitsandbytes packs them, [out * in / 2, 1], or laid out for the processor,
    [out, in / 2]. scales: fp32, [out * in / BLOCK], or bf16, [in / BLOCK, out]."""

    def __init__(
        self,
        packed: torch.Tensor,
        scales: torch.Tensor,
        shape: tuple[int, int],
        bias: torch.Tensor | None,
    ) -> None:
        self.bias = bias
        self.weight_bytes = bytes_of(packed, scales, bias)
        self.shape, self.device = shape, packed.device
        self._packed, self._scales = packed, scales
        self.has_invariant_rows = packed.device.type == "cpu"
        make = _on_processor if self.has_invariant_rows else _on_card
        self._product = make(packed, scales, shape)

    @classmethod
    def of_stored(cls, weight: Nf4, bias: torch.Tensor | None) -> Nf4Linear:
        """Raises RuntimeError where no kernel multiplies with it: to run one nevertheless would end
        the process."""
        if not takes(weight, weight.packed.device):
            raise RuntimeError("no kernel multiplies with this NF4 weight here")
        shape = (weight.shape[0], weight.shape[1])
        return cls(*_laid_out(weight.packed, weight.scales, shape), shape, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        made = self._product(rows)
        return made if self.bias is None else made.add_(self.bias)

    def of_outputs(self, places: torch.Tensor) -> Nf4Linear:
        """See Linear."""
        bias, num_in = taken(self.bias, places), self.shape[1]
        shape = (len(places), num_in)
        if self.device.type != "cpu":
            stored = Nf4(self._packed, self._scales, self.shape, BLOCK, "nf4").rows(places)
            return Nf4Linear(stored.packed, stored.scales, shape, bias)
        numbers = rows_of_blocks(self._packed, places, (ROWS, num_in), _laid_out_numbers)
        return Nf4Linear(_laid_out_numbers(numbers), self._scales[:, places], shape, bias)

    def rows(self, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Those of the weight, unpacked, [n, in]; as bitsandbytes packs them, so on a GPU only."""
        return Nf4(self._packed, self._scales, self.shape, BLOCK, "nf4").rows(places).dense(dtype)


class Nf4Embedding:
    """An embedding in NF4, on a GPU; one that is tied to an output head is the head's own weight.

    layer: of [V, d]. dtype: of the rows."""

    def __init__(self, layer: Nf4Linear, dtype: torch.dtype) -> None:
        self.layer, self.dtype, self.shape = layer, dtype, layer.shape
        self.device, self.nbytes = layer.device, layer.weight_bytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, d], unscaled."""
        return self.layer.rows(ids, self.dtype)


class UnpackedLinear(QuantisedLinear):
    """Weights that no kernel multiplies with as they are: unpacked at every product."""

    has_invariant_rows = False

    def __init__(self, weight: Nf4, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.weight_bytes = bytes_of(weight.packed, weight.scales, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self._weight.dense(rows.dtype), self._bias)

    def of_outputs(self, places: torch.Tensor) -> UnpackedLinear:
        """See Linear."""
        try:
            return UnpackedLinear(self._weight.rows(places), taken(self._bias, places))
        except ValueError:  # a block of weights has parts of two rows
            super().of_outputs(places)
            raise


def stored_linear(weight: Nf4, bias: torch.Tensor | None) -> Nf4Linear | UnpackedLinear:
    """Return the layer of a weight that a file holds in NF4 or FP4, on the weight's device."""
    has_fit = takes(weight, weight.packed.device)
    return Nf4Linear.of_stored(weight, bias) if has_fit else UnpackedLinear(weight, bias)


def takes(weight: Nf4, device: torch.device) -> bool:
    """Return True if a kernel of the device multiplies with such a weight."""
    num_out, num_in = weight.shape
    is_whole = not num_in % BLOCK and (device.type == "cuda" or not num_out % ROWS)
    return weight.kind == "nf4" and weight.block_size == BLOCK and is_whole and has_kernel(device)


def has_kernel(device: torch.device) -> bool:
    """Return True if NF4 weights are multiplied with as they are, not unpacked at every step."""
    if device.type != "cpu":
        return device.type == "cuda"
    return bool(bitsandbytes().functional.has_avx512bf16())


def _on_card(packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]) -> Product:
    kernel: Any = torch.ops.bitsandbytes.gemm_4bit.default
    num_in = shape[1]
    size = UNPACKED_AT_ONCE // num_in // ROWS * ROWS * num_in
    pieces = tuple(
        zip(torch.split(packed, size // 2), torch.split(scales, size // BLOCK), strict=True)
    )

    def product(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] <= FEW_ROWS:
            made: torch.Tensor = kernel(rows, packed, shape, scales, BLOCK, "nf4")
            return made
        return torch.cat(
            [
                kernel(rows, piece, (2 * piece.numel() // num_in, num_in), of, BLOCK, "nf4")
                for piece, of in pieces
            ],
            1,
        )

    return product


def _on_processor(packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]) -> Product:
    """By the address of the kernel: the operator around it takes as long as a small product."""
    prototype = ctypes.CFUNCTYPE(None, *KERNEL_ARGUMENTS)
    kernel = prototype((KERNEL, bitsandbytes().cextension.lib._lib))
    num_out, num_in = shape
    addresses = (packed.data_ptr(), scales.data_ptr())
    held = (packed, scales)  # as long as their addresses are in use

    def product(rows: torch.Tensor) -> torch.Tensor:
        assert held and rows.shape[1] == num_in
        given = rows.to(torch.bfloat16)
        given = given if given.stride(1) == 1 else given.contiguous()
        made = torch.empty((rows.shape[0], num_out), dtype=torch.bfloat16)
        places = (given.data_ptr(), *addresses, made.data_ptr())
        kernel(rows.shape[0], num_out, num_in, *places, BLOCK, given.stride(0), num_out)
        return made.to(rows.dtype)

    return product


def _laid_out_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 15, [out, in], as the processor's kernel reads them."""
    packed = (numbers[:, ::2] << 4 | numbers[:, 1::2]).byte().view(-1, 1)
    scales = torch.ones(numbers.numel() // BLOCK)
    return _laid_out(packed, scales, (numbers.shape[0], numbers.shape[1]))[0]


def _laid_out(
    packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the device's kernel reads them. packed, scales: as bitsandbytes makes them."""
    if packed.device.type != "cpu":
        return packed, scales
    functional = bitsandbytes().functional
    code = functional.get_4bit_type("nf4", device=packed.device)
    state = functional.QuantState(scales, shape, code, BLOCK, "nf4", torch.bfloat16)
    laid_out, state = functional._convert_weight_packed_for_cpu(packed, state, ROWS)
    return laid_out, state.absmax
