"""Linear layers in 8 bits a weight with one scale for each output.

`Int8Linear` is for targets on a processor: the weights of LLM.int8, rows in bf16, by torch's own
kernel. A row has the same bits beside others as alone. Without the library's layer around them rows
are not rounded to 8 bits, and a step of a 350M model takes 29 ms in place of 103. On other devices
`LibraryInt8Linear` is that layer. `RoundedRowsLinear` is for copies on a processor, which check
nothing: rows are rounded too, and FBGEMM multiplies whole numbers.
Source: LLM.int8 (arXiv 2208.07339).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from localspec.weights.library import bitsandbytes
from localspec.weights.linear import QuantisedLinear, bytes_of, taken
from localspec.weights.stored import INT8_STEPS, Int8

ROW_BYTES = 12  # that FBGEMM holds of each output: its scale, zero point and sum of weights


class Int8Linear(QuantisedLinear):
    """numbers: [out, in] int8. scales: [out], what a number stands for."""

    has_invariant_rows = True

    def __init__(
        self, numbers: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self._numbers = numbers.contiguous()
        self._scales = scales.bfloat16()
        self._bias = bias
        self._product: Any = torch.ops.aten._weight_int8pack_mm.default
        self.weight_bytes = bytes_of(self._numbers, self._scales, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        given = rows.bfloat16().contiguous()
        made: torch.Tensor = self._product(given, self._numbers, self._scales).to(rows.dtype)
        return made if self._bias is None else made.add_(self._bias)

    def of_outputs(self, places: torch.Tensor) -> Int8Linear:
        """See Linear."""
        parts = (self._numbers[places], self._scales[places], taken(self._bias, places))
        return Int8Linear(*parts)


class LibraryInt8Linear(QuantisedLinear):
    """bitsandbytes' own layer, which rounds rows by all that they hold. It looks for outliers on
    the host, so a graph cannot hold it."""

    has_invariant_rows = False
    reads_host = True

    def __init__(self, weight: Int8, bias: torch.Tensor | None) -> None:
        parts = bitsandbytes().nn
        num_out, num_in = weight.shape
        self._layer: Any = parts.Linear8bitLt(
            num_in, num_out, bias is not None, has_fp16_weights=False, threshold=6.0, device="meta"
        )
        self._layer.weight = parts.Int8Params(
            weight.numbers,
            requires_grad=False,
            has_fp16_weights=False,
            CB=weight.numbers,
            SCB=weight.largest,
        )
        if bias is not None:
            self._layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        self._layer.eval()
        self._weight, self._bias = weight, bias
        self.weight_bytes = bytes_of(weight.numbers, weight.largest, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._layer(rows)
        return product

    def of_outputs(self, places: torch.Tensor) -> LibraryInt8Linear:
        """See Linear."""
        return LibraryInt8Linear(self._weight.rows(places), taken(self._bias, places))


def stored_linear(weight: Int8, bias: torch.Tensor | None) -> Int8Linear | LibraryInt8Linear:
    """Return the layer of a weight of LLM.int8, on the weight's device."""
    if weight.numbers.device.type != "cpu":
        return LibraryInt8Linear(weight, bias)
    return Int8Linear(weight.numbers, weight.largest / INT8_STEPS, bias)


class RoundedRowsLinear(QuantisedLinear):
    """Rows are rounded to 7 bits with one scale for all of a call (with 8, sums overflow on a
    processor without VNNI), so a row's bits depend on the rows beside it."""

    has_invariant_rows = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        kernels: Any = torch.ops.quantized
        weight = weight.float()
        scales = (weight.abs().amax(1) / INT8_STEPS).clamp(min=1e-9).double()
        with warnings.catch_warnings():  # a later torch drops this type; kernels may go with it
            warnings.simplefilter("ignore", UserWarning)
            numbers = torch.quantize_per_channel(
                weight, scales, torch.zeros_like(scales, dtype=torch.int64), 0, torch.qint8
            )
        self._packed: Any = kernels.linear_prepack(numbers, None if bias is None else bias.float())
        self._product: Any = kernels.linear_dynamic.default
        self.weight_bytes = weight.numel() + ROW_BYTES * weight.shape[0] + bytes_of(bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._product(rows.float(), self._packed, True).to(rows.dtype)
        return made


def has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines
