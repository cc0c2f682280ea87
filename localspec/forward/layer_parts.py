"""What linear layers of several formats have in common (weight_layout, nf4, int8)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
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


def tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """All that it holds, with the scales that bitsandbytes keeps beside a weight of 4 bits."""
    for tensor in chain(module.parameters(), module.buffers()):
        yield tensor
        state = getattr(tensor, "quant_state", None)
        while state is not None:  # scales may have scales
            yield state.absmax
            state = state.state2


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
