"""Linear layers of the native decoder: rows in, rows out, in whatever form is fastest here.

Contract: a `Linear` maps [n, in] to [n, out]; `add_to` adds the result to a residual, in one
kernel where there is one. `packed` lays a weight out for the processor's matrix kernels, which
about halves the time of a step and makes checking eight tokens cost little more than one. The
kernels are private operators of torch: each layer is compared with the plain product once, when
it is packed, and stays plain where they are missing or wrong. `dense` gives the weight back.

Not here: choosing quantised formats (quantised), the layers' order (decoder).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

PACKED_DTYPES = (torch.bfloat16, torch.float32)
TESTED_ROWS = (1, 5)  # one row and several take different kernels
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # relative, of the largest output


class Linear(Protocol):
    """One product with a weight, and a bias where the layer has one."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + the product; the residual is not written to."""
        ...

    def dense(self) -> nn.Linear | None:
        """The layer as torch's own, without copying where possible; None if it has no plain
        weight (an already quantised one)."""
        ...


class PlainLinear:
    """The product as torch does it: any device, any precision."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias

    @property
    def weight_bytes(self) -> int:
        return _bytes(self.weight, self.bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + F.linear(rows, self.weight, self.bias)

    def dense(self) -> nn.Linear:
        return _as_module(self.weight, self.bias)


class PackedLinear:
    """A weight in the layout of oneDNN's matrix kernels. CPU, bf16 and fp32.

    rows_alone: the plain weight as well, for one row at a time; None where memory or time are
    better without it (see tuned)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        kernels: Any = torch.ops.mkldnn
        self._packed: torch.Tensor = kernels._reorder_linear_weight(weight.contiguous(), 1)
        self._product: Any = kernels._linear_pointwise.default
        self._product_and_sum: Any = kernels._linear_pointwise.binary
        self.bias = bias
        self.rows_alone: torch.Tensor | None = None
        self.in_features: int = weight.shape[1]
        self.dtype = weight.dtype
        self._packed_bytes = _bytes(weight, bias)

    @property
    def weight_bytes(self) -> int:
        plain = 0 if self.rows_alone is None else _bytes(self.rows_alone, None)
        return self._packed_bytes + plain

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.rows_alone is not None and rows.shape[0] == 1:
            return one_row(rows, self.rows_alone, self.bias)
        made: torch.Tensor = self._product(rows, self._packed, self.bias, "none", [], "")
        return made

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.rows_alone is not None and rows.shape[0] == 1:
            return one_row(rows, self.rows_alone, self.bias).add_(residual)
        made: torch.Tensor = self._product_and_sum(rows, residual, self._packed, self.bias, "add")
        return made

    def dense(self) -> nn.Linear:
        weight = self._packed.to_dense() if self.rows_alone is None else self.rows_alone
        return _as_module(weight, self.bias)


def one_row(row: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of a single row by torch's own vector kernel: it streams the plain weight at
    the speed of the memory, which oneDNN's matrix kernels do not."""
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(row, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)


class ModuleLinear:
    """A layer of somebody else's format (NF4, int8), by its module."""

    def __init__(self, module: Any, weight_bytes: int) -> None:
        self.module = module
        self.weight_bytes = weight_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.module(rows)
        return made

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)

    def dense(self) -> None:
        return None


class Joined:
    """Layers of one input whose weights cannot be fused, their outputs side by side."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = tuple(parts)
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(rows) for part in self._parts], dim=-1)

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)

    def dense(self) -> None:
        return None


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest form of a full-precision layer on its device that computes the same."""
    plain = PlainLinear(weight, bias)
    if weight.device.type != "cpu" or weight.dtype not in PACKED_DTYPES:
        return plain
    try:
        made = PackedLinear(weight, bias)
        is_right = all(_agree(made, plain, num_rows) for num_rows in TESTED_ROWS)
    except (RuntimeError, AttributeError, NotImplementedError):
        return plain  # kernels of another torch or another processor
    return made if is_right else plain


def fused(layers: Sequence[Any]) -> Linear:
    """Linear modules of one input as one product; side by side where their format forbids it."""
    # Subclasses are somebody's own format (4-bit, 8-bit): their weights cannot be stacked.
    if any(type(layer) is not nn.Linear for layer in layers):
        parts = [ModuleLinear(layer, module_bytes(layer)) for layer in layers]
        return parts[0] if len(parts) == 1 else Joined(parts)
    weights = [layer.weight.detach() for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return packed(weight, _stacked_bias(layers))


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's tensors."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _stacked_bias(layers: Sequence[nn.Linear]) -> torch.Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat(parts)


@torch.inference_mode()
def _agree(made: PackedLinear, plain: PlainLinear, num_rows: int) -> bool:
    rows = torch.randn(
        num_rows, plain.weight.shape[1], generator=torch.Generator().manual_seed(num_rows)
    ).to(plain.weight.dtype)
    wanted = plain(rows).float()  # [n, out]
    bound = TOLERANCE[plain.weight.dtype] * float(wanted.abs().max()) + 1e-6
    alone = float((made(rows).float() - wanted).abs().max())
    residual = torch.ones_like(wanted).to(rows.dtype)
    added = float((made.add_to(rows, residual).float() - wanted - 1.0).abs().max())
    return alone <= bound and added <= 2.0 * bound + TOLERANCE[rows.dtype]  # NaN is refused too


def _as_module(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _bytes(weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    held = weight.numel() * weight.element_size()
    return held if bias is None else held + bias.numel() * bias.element_size()
