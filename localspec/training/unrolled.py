"""Rows of heads that draft on their own outputs: EAGLE and multi-token prediction.

Contract: `Unrolled` is the `states` of a HeadRecipe, and `unrolled_plan` its plan. A batch is
processed several times: the first step reads the target's hidden states, each later step reads the
head's own outputs one place later, as a draft of that length does.

Not here: the networks (eagle, mtp), the loss (recipe).
Source: training-time test of EAGLE-3 (arXiv 2503.01840), as HASS (arXiv 2408.15766).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.forward.heads.autoregressive import HeadShape, Network
from localspec.forward.heads.files import Shapes
from localspec.forward.heads.layer import (
    DecoderLayer,
    Rotation,
    plain_frequencies,
    trainable_parts,
)
from localspec.training.recipe import HeadPlan
from localspec.training.target import TaughtBatch, Teacher

NUM_JUDGED = 5  # draft positions in the held-out acceptance


@dataclass(frozen=True)
class Unrolled:
    """network: over the modules that are trained; its rows are [B, n, d]."""

    network: Network
    shape: HeadShape

    def __call__(self, teacher: Teacher, batch: TaughtBatch, num_steps: int) -> list[Tensor]:
        return [self.network.leave(rows) for rows in self.outputs(teacher, batch, num_steps)]

    def outputs(self, teacher: Teacher, batch: TaughtBatch, num_steps: int) -> list[Tensor]:
        """The network's rows, [B, n, d] of each step."""
        embedded = teacher.embed(batch.tokens[:, 1:])  # [B, n, d]
        length = embedded.shape[1]
        head_dim, base = self.shape.layer.head_dim, self.shape.rope_base
        frequencies = plain_frequencies(head_dim, base, embedded.device)
        cos, sin = Rotation.of(frequencies, length, embedded.dtype).at(slice(0, length))
        attend, made = UnrolledAttention(), list[Tensor]()
        rows = self.network.enter([batch.features[layer] for layer in self.shape.layers])
        for _ in range(num_steps):
            rows = self.network.step(rows, embedded, cos, sin, attend)
            made.append(rows)
            rows = functional.pad(rows[:, :-1], (0, 0, 1, 0))
        return made


def unrolled_plan(
    kind: str,
    shape: HeadShape,
    settings: Mapping[str, Any],
    shapes: Shapes,
    network: type[Network],
    initialise: Callable[[nn.ModuleDict, HeadShape], None],
    num_steps: int,
) -> HeadPlan:
    """The plan of a head whose `network` drafts on its own outputs. initialise: changes the random
    first weights. num_steps: draft positions in the loss."""

    def build(generator: torch.Generator) -> tuple[nn.Module, Unrolled]:
        module = trainable_parts(shapes, shape.layer.norm_epsilon, generator)
        initialise(module, shape)
        parts = dict(module.items())
        return module, Unrolled(network(DecoderLayer(shape.layer, parts), parts), shape)

    return HeadPlan(kind, shape.layers, settings, shapes, build, num_steps, NUM_JUDGED)


class UnrolledAttention:
    """Attention of a draft's rows: to all text before the draft's start, and to one row of each
    earlier step. Called once a step; keeps the keys and values of the steps before."""

    def __init__(self) -> None:
        self._keys = list[Tensor]()
        self._values = list[Tensor]()

    def __call__(self, queries: Tensor, keys_values: Tensor) -> Tensor:
        """queries [B, n, heads, size], keys then values [B, n, 2 * kv_heads, size]
        -> [B, n, out]."""
        keys, values = keys_values.chunk(2, dim=-2)
        self._keys.append(keys.transpose(1, 2))
        self._values.append(values.transpose(1, 2))
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            torch.cat(self._keys, dim=2),
            torch.cat(self._values, dim=2),
            attn_mask=visible(queries.shape[1], len(self._keys), queries.device),
            enable_gqa=queries.shape[2] != keys.shape[2],
        )
        return mixed.transpose(1, 2).flatten(2)


def visible(length: int, num_steps: int, device: torch.device) -> Tensor:
    """[n, steps * n] bool: what a row of the last step attends to in all steps. A row before its
    draft's start attends to itself, as softmax needs one entry, and is not counted."""
    place = torch.arange(length, device=device)
    ahead = place[:, None] - place  # [n, n], how far a column lies before a row
    parts = [ahead >= num_steps - 1]
    parts += [ahead == num_steps - 1 - step for step in range(1, num_steps)]
    return torch.cat(parts, dim=1)
