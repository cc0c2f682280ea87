"""What every linear layer is, whatever the format of its weight, and the plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from localspec.core.errors import ModelError

GATE_MULTIPLE = 64  # Numbers of a row of gates: whole steps of a processor's kernels.
FEW_ROWS = 16  # Rows up to which a GPU's kernels for 4 bits are faster than an unpacked product.
# Rows from which on a layer on a processor gives a row the same bits, where nothing measures it.
ROW_MULTIPLE = 4
# Outputs of a whole block of the largest kind. A multiple of it suits the kernels of all formats.
OUTPUTS_OF_A_BLOCK = 64


class Linear(Protocol):
    """One product with a weight, and a bias where the layer has one."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def has_invariant_rows(self) -> bool:
        """Whether a row has the same bits at every width, at 1 too, where a packed layer may have
        others (`weights.dense.fewest_rows`)."""
        ...

    @property
    def reads_host(self) -> bool:
        """Whether a product waits for the device, which no captured graph can hold."""
        ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, in] -> [n, out]."""
        ...

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + the product, [n, out]; the residual is not written to."""
        ...

    def dense(self) -> nn.Linear | None:
        """The layer as torch's own, without copying where possible; None if it has no plain
        weight (an already quantised one)."""
        ...

    def of_outputs(self, places: torch.Tensor) -> Linear:
        """Return a layer of some outputs alone, in the same format. places: of the outputs, [k]
        ascending, on the layer's device; in some formats k is a multiple of OUTPUTS_OF_A_BLOCK.
        Raises ModelError where the format does not give its rows away."""
        ...


class QuantisedLinear:
    """A layer without a plain weight."""

    reads_host = False

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(rows).add_(residual)

    def dense(self) -> None:
        return None

    def of_outputs(self, places: torch.Tensor) -> Linear:
        """See Linear."""
        raise ModelError(
            "The format of the output head gives no rows away. Load the model with --dtype bf16."
        )


class PlainLinear:
    """The product as torch does it: any device, any precision."""

    has_invariant_rows = False
    reads_host = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias
        self.weight_bytes = bytes_of(weight, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + F.linear(rows, self.weight, self.bias)

    def dense(self) -> nn.Linear:
        return as_module(self.weight, self.bias)

    def of_outputs(self, places: torch.Tensor) -> PlainLinear:
        """See Linear."""
        return PlainLinear(self.weight[places], taken(self.bias, places))


class SideBySide(QuantisedLinear):
    """Layers of one input whose weights cannot be one weight, such as 4 bits and 16; their outputs
    stand side by side."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self.has_invariant_rows = all(linear.has_invariant_rows for linear in linears)
        self.reads_host = any(linear.reads_host for linear in linears)
        self.weight_bytes = sum(linear.weight_bytes for linear in linears)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(rows) for linear in self.linears], dim=-1)


def filled(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return at least `count` rows, [max(n, count), ...], the last one repeated. Rows that are
    repeated everywhere choose the same experts of a mixture."""
    missing = count - rows.shape[0]
    if missing <= 0:
        return rows
    return torch.cat((rows, rows[-1:].expand(missing, *rows.shape[1:])))


def taken(bias: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor | None:
    """Return the biases of some outputs; None where a layer has none."""
    return None if bias is None else bias[places]


def bytes_of(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def as_module(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """torch's own layer over these tensors."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
