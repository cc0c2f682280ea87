"""Linear layers in NF4: 4 bits a weight, one scale for 64 inputs, by the kernels of bitsandbytes.

Contract: `Nf4Linear` meets weight_layout.Linear. It is made of a dense weight, or of layers of one
input that were loaded quantised, whose rows become one product. The kernels are called without the
library's own layer around them, which takes longer than a small product does.

On a processor with instructions for bf16 the weights are laid out anew for a kernel that serves any
number of rows, and a row has the same bits beside others as alone. Other processors have no kernel
that multiplies with NF4 (`has_kernel`). On CUDA the library's kernel serves few rows, and for many
it unpacks the weight: those are multiplied with UNPACKED_AT_ONCE weights at a time.

Not here: which layers are quantised (quantise), loading (weights).
Source: NF4 in QLoRA (arXiv 2305.14314).
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from localspec.core.errors import ModelError
from localspec.formats.bitsandbytes_layers import UNPACKED_AT_ONCE
from localspec.forward.cache import WIDEST
from localspec.forward.layer_parts import QuantisedLinear, bytes_of, joined_bias

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
    def of_weight(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Nf4Linear:
        """weight: [out, in], quantised now. Raises RuntimeError where no kernel multiplies with it:
        to run one nevertheless would end the process."""
        if not has_kernel(weight.device):
            raise RuntimeError("this processor has no instructions for bf16")
        shape = (weight.shape[0], weight.shape[1])
        packed, scales = torch.ops.bitsandbytes.quantize_4bit.default(
            weight.contiguous(), BLOCK, "nf4", torch.uint8
        )
        return cls(*_laid_out(packed, scales, shape), shape, bias)

    @classmethod
    def of_modules(cls, layers: Sequence[Any]) -> Nf4Linear | None:
        """Layers of bitsandbytes that read the same input, as one; None for another format."""
        weights = [getattr(layer, "weight", None) for layer in layers]  # other formats have none
        states: list[Any] = [getattr(weight, "quant_state", None) for weight in weights]
        if any(s is None or s.quant_type != "nf4" or s.blocksize != BLOCK for s in states):
            return None
        device = layers[0].weight.device
        if not has_kernel(device) or any(s.shape[1] % BLOCK for s in states):
            return None
        if device.type == "cpu" and any(s.shape[0] % ROWS for s in states):
            return None
        # Blocks lie along the input: rows of several layers stand one after the other.
        parts = [_parts(layer.weight, s) for layer, s in zip(layers, states, strict=True)]
        packed = torch.cat([packed for packed, _ in parts])
        scales = torch.cat([scales for _, scales in parts], 1 if device.type == "cpu" else 0)
        shape = (sum(s.shape[0] for s in states), states[0].shape[1])
        return cls(packed, scales, shape, joined_bias(layers))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        made = self._product(rows)
        return made if self.bias is None else made.add_(self.bias)

    def rows(self, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Those of the weight, unpacked, [n, in]; as bitsandbytes packs them, so on a GPU only."""
        num_out, num_in = self.shape
        packed = self._packed.view(num_out, -1)[places].view(-1, 1)
        scales = self._scales.view(num_out, -1)[places].flatten()
        shape = (places.shape[0], num_in)
        unpack: Any = torch.ops.bitsandbytes.dequantize_4bit.default
        made: torch.Tensor = unpack(packed, scales, BLOCK, "nf4", shape, dtype)
        return made


class Nf4Embedding(torch.nn.Module):
    """An embedding in NF4, on a GPU; one that is tied to an output head is the head's own weight.

    layer: of [V, d]. factor: what rows are multiplied with, as Gemma does."""

    def __init__(self, layer: Nf4Linear, dtype: torch.dtype, factor: torch.Tensor | None) -> None:
        super().__init__()
        self.layer, self.dtype, self.shape = layer, dtype, layer.shape
        self.device, self.nbytes = layer.device, layer.weight_bytes
        self.embed_scale = factor

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[n] -> [n, d], unscaled."""
        return self.layer.rows(ids, self.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = self.rows(ids.flatten()).view(*ids.shape, -1)
        return made if self.embed_scale is None else made * self.embed_scale.to(self.dtype)


def has_kernel(device: torch.device) -> bool:
    """Whether NF4 weights are multiplied with as they are, not unpacked at every step."""
    if device.type != "cpu":
        return device.type == "cuda"
    return bool(_functional().has_avx512bf16())


def _on_card(packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]) -> Product:
    kernel: Any = torch.ops.bitsandbytes.gemm_4bit.default
    num_in = shape[1]
    size = UNPACKED_AT_ONCE // num_in // ROWS * ROWS * num_in
    pieces = tuple(
        zip(torch.split(packed, size // 2), torch.split(scales, size // BLOCK), strict=True)
    )

    def product(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] <= WIDEST:
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
    kernel = prototype((KERNEL, library().cextension.lib._lib))
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


def _laid_out(
    packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the device's kernel reads them. packed, scales: as bitsandbytes makes them."""
    if packed.device.type != "cpu":
        return packed, scales
    functional = _functional()
    code = functional.get_4bit_type("nf4", device=packed.device)
    state = functional.QuantState(scales, shape, code, BLOCK, "nf4", torch.bfloat16)
    laid_out, state = functional._convert_weight_packed_for_cpu(packed, state, ROWS)
    return laid_out, state.absmax


def _parts(weight: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one layer; on a processor its first forward has laid them out already, perhaps."""
    packed: torch.Tensor = weight.data
    if getattr(state, "packing_format_for_cpu", False):
        return packed, state.absmax
    packed = packed.view(torch.uint8).view(-1, 1)
    scales = state.absmax
    if state.nested:  # scales of scales
        scales = _functional().dequantize_blockwise(scales, state.state2) + state.offset
    return _laid_out(packed, scales.float(), (state.shape[0], state.shape[1]))


def _functional() -> Any:
    return library().functional


def library() -> Any:
    """bitsandbytes, imported without letting it look for kernels on a model hub, or prepare to
    compile functions that are not used here, which takes a second. Raises ModelError where it
    cannot be."""
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would warn of the kernels
    try:
        with _set(sys.modules, "kernels", None), _set(os.environ, "TORCHDYNAMO_DISABLE", "1"):
            return import_module("bitsandbytes")
    except ImportError as error:
        raise ModelError(
            f"NF4 needs the package bitsandbytes, which cannot be imported ({error}). Install "
            "the versions in requirements.txt, or choose another drafter."
        ) from error
    finally:
        logger.setLevel(level)


@contextmanager
def _set(values: MutableMapping[str, Any], name: str, value: Any) -> Iterator[None]:
    """One entry for a while. A module that is None cannot be imported."""
    missing = object()
    before = values.get(name, missing)
    values[name] = value
    try:
        yield
    finally:
        if before is missing:
            del values[name]
        else:
            values[name] = before
