"""Inputs that every layer has of its own for each token, as in Gemma 4 E2B and E4B.

Their table holds more weights than the rest of such a model and is only looked up, so it stays in
host memory, in the precision of its files. A row of it is joined with what the token's embedding
says, and each layer adds a gated product of its part to what goes through the model.
Source: Gemma 4, and the modelling file of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from localspec.forward.norm import RootMeanSquareNorm
from localspec.weights.linear import Linear

SHARE = 2.0**-0.5  # Both parts of an input have a variance of 1; so has their sum times this.


@dataclass(frozen=True)
class PerLayerGate:
    """What one layer makes of its input. norm: of the product, before it is added."""

    gate: Linear
    projection: Linear
    norm: RootMeanSquareNorm
    activation: Callable[[torch.Tensor], torch.Tensor]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.gate, self.projection)

    @property
    def weight_bytes(self) -> int:
        return self.norm.weight_bytes + sum(linear.weight_bytes for linear in self.linears)

    def with_linears(self, change: Callable[[Linear], Linear]) -> PerLayerGate:
        return replace(self, gate=change(self.gate), projection=change(self.projection))

    def add_to(self, rows: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """rows: [n, d]. inputs: of this layer, [n, width] -> [n, d]."""
        return rows + self.norm(self.projection(self.activation(self.gate(rows)) * inputs))


@dataclass(frozen=True)
class PerLayerInputs:
    """The table and what is common to all layers. table: [V, layers * width] on the host.
    projection: of embedded tokens, [n, d] to [n, layers * width]. norm: of the `width` numbers of a
    layer."""

    table: torch.Tensor
    projection: Linear
    norm: RootMeanSquareNorm
    width: int
    hidden_size: int

    @property
    def device_bytes(self) -> int:
        """All but the table."""
        return self.projection.weight_bytes + self.norm.weight_bytes

    def looked_up(
        self, tokens: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return the table's rows of these tokens, [n, layers * width]. The host does not wait for
        the copy (see upload)."""
        rows = F.embedding(torch.tensor(tokens, dtype=torch.int64), self.table).to(dtype)
        rows = rows.pin_memory() if device.type == "cuda" else rows
        return rows.to(device, non_blocking=True)

    def of_rows(self, embedded: torch.Tensor, looked_up: torch.Tensor) -> torch.Tensor:
        """Return the inputs of all layers, [n, layers, width].

        embedded: [n, d]. looked_up: the rows of their tokens, in the same precision."""
        projected = self.projection(embedded) * self.hidden_size**-0.5
        parts = projected.view(embedded.shape[0], -1, self.width)
        of_tokens = (looked_up * self.width**0.5).view(parts.shape)
        inputs: torch.Tensor = (self.norm(parts) + of_tokens) * SHARE
        return inputs
