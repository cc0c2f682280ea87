"""Linear layers in 8 bits a weight with one scale for each output, on a processor.

Contract: both classes meet weight_layout.Linear. `Int8Linear` is for targets: the weights of
LLM.int8 as bitsandbytes made them, rows in bf16, by torch's own kernel. A row has the same bits
beside others as alone. Without the library's layer around them rows are not rounded to 8 bits, and
a step of a 350M model takes 29 ms in place of 103. `RoundedRowsLinear` is for copies, which check
nothing: rows are rounded too, and FBGEMM multiplies whole numbers.

Not here: which layers are quantised (quantise), loading (weights), LLM.int8 on a GPU
(weight_layout.ModuleLinear).
Source: LLM.int8 (arXiv 2208.07339).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from localspec.forward.layer_parts import QuantisedLinear, bytes_of, joined_bias

STEPS = 127  # of a weight from zero to the largest of its output
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

    @classmethod
    def of_modules(cls, layers: Sequence[Any]) -> Int8Linear | None:
        """Layers of bitsandbytes that read the same input, as one; None for another format, or on
        another device."""
        largest = [_largest(layer) for layer in layers]
        if any(each is None or each.device.type != "cpu" for each in largest):
            return None
        numbers = torch.cat([layer.weight.data for layer in layers])
        scales = torch.cat([each.float() / STEPS for each in largest if each is not None])
        return cls(numbers, scales, joined_bias(layers))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        given = rows.bfloat16().contiguous()
        made: torch.Tensor = self._product(given, self._numbers, self._scales).to(rows.dtype)
        return made if self._bias is None else made.add_(self._bias)


def _largest(layer: Any) -> torch.Tensor | None:
    """Of the weights of each output, [out]; None for another format. The first forward of a layer
    takes it from the weight into the layer's state."""
    found = getattr(getattr(layer, "weight", None), "SCB", None)
    return getattr(getattr(layer, "state", None), "SCB", None) if found is None else found


class RoundedRowsLinear(QuantisedLinear):
    """Rows are rounded to 7 bits with one scale for all of a call (with 8, sums overflow on a
    processor without VNNI), so a row's bits depend on the rows beside it."""

    has_invariant_rows = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        kernels: Any = torch.ops.quantized
        weight = weight.float()
        scales = (weight.abs().amax(1) / STEPS).clamp(min=1e-9).double()
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
