"""Attention with an output gate, as Qwen3.5 has it beside its gated delta nets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from localspec.forward.activations import sigmoid
from localspec.forward.block import Attention
from localspec.forward.mixer import LayerAttend, Swap, Table


@dataclass(frozen=True)
class GatedAttention(Attention):
    """Attention whose result is multiplied by the sigmoid of a gate. In `qkv` the gate of each
    query head stands behind it."""

    def mix(
        self, rows: torch.Tensor, tables: Sequence[Table], swapped: Swap, attend: LayerAttend
    ) -> torch.Tensor:
        """See Attention."""
        size = (rows.shape[0], self.num_heads, 2, self.head_dim)
        heads = self.qkv(rows).view(rows.shape[0], -1, self.head_dim)
        queries, gates = heads[:, : 2 * self.num_heads].view(size).unbind(2)
        qkv = torch.cat((queries, heads[:, 2 * self.num_heads :]), dim=1)
        return attend(*self.turned(qkv, tables, swapped)) * sigmoid(gates).flatten(1)
