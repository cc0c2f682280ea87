"""What linear layers of several formats have in common (weight_layout, nf4, int8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class QuantisedLinear:
    """A layer without a plain weight (weight_layout.Linear)."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(rows).add_(residual)

    def dense(self) -> None:
        return None


def bytes_of(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def joined_bias(layers: Sequence[Any]) -> torch.Tensor | None:
    """Of layers whose outputs stand side by side, [out of all]; None where none has one."""
    if all(layer.bias is None for layer in layers):
        return None
    like = next(layer.bias.detach() for layer in layers if layer.bias is not None)
    return torch.cat(
        [
            like.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
            for layer in layers
        ]
    )
