"""Trains heads that draft on their own outputs: EAGLE and multi-token prediction.

Contract: a lesson is processed several times. The first step reads the target's hidden states,
each later step reads the head's own outputs one place later, as a draft of that length does. In
step s (from 0), row i predicts token i + 2 as token s of a draft that starts at i - s, so the
first s rows of step s belong to no draft. The loss is the cross-entropy with the target's
distribution, mean over the steps; the target's embedding and output head are shared and frozen.

Not here: the networks (eagle, mtp).
Source: training-time test of EAGLE-3 (arXiv 2503.01840), as HASS (arXiv 2408.15766).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.forward.features import LAST
from localspec.forward.heads.eagle import EagleShape
from localspec.forward.heads.files import TargetSizes, write_head
from localspec.forward.heads.layer import Attend, Rotation, plain_frequencies
from localspec.forward.heads.mtp import MtpShape
from localspec.training.recipe import saved_weights
from localspec.training.target import Lesson, Teacher

NUM_POSITIONS = 5  # draft positions in the held-out acceptance


class UnrolledNetwork(Protocol):
    """A head's function, over the modules that are trained."""

    def enter(self, features: Sequence[Tensor], /) -> Tensor:
        """The hidden states read, [B, n, d] each -> the rows of the first step, [B, n, d]."""
        ...

    def step(
        self, rows: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attend: Attend, /
    ) -> Tensor:
        """rows, embedded: [B, n, d] -> the rows of the next step, [B, n, d]."""
        ...

    def leave(self, rows: Tensor, /) -> Tensor:
        """What the target's output head reads, [B, n, d]."""
        ...


@dataclass(frozen=True)
class UnrolledRecipe:
    """A head while it is trained. num_steps: draft steps in the loss. rope_base: of the rotary
    positions."""

    kind: str
    layers: tuple[int, ...]
    module: nn.ModuleDict
    network: UnrolledNetwork
    shape: EagleShape | MtpShape
    rope_base: float
    sizes: TargetSizes
    num_steps: int

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        return unrolled_loss(teacher, lesson, self.states(teacher, lesson, self.num_steps))

    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        with torch.no_grad():
            return unrolled_acceptance(teacher, lesson, self.states(teacher, lesson, NUM_POSITIONS))

    def save(self, folder: Path) -> None:
        settings = self.shape.settings()
        write_head(folder, self.kind, self.sizes, settings, saved_weights(self.module))

    def states(self, teacher: Teacher, lesson: Lesson, num_steps: int) -> list[Tensor]:
        """The rows that the target's output head reads, [B, n, d] of each step."""
        return [self.network.leave(rows) for rows in self.outputs(teacher, lesson, num_steps)]

    def outputs(self, teacher: Teacher, lesson: Lesson, num_steps: int) -> list[Tensor]:
        """The head's rows, [B, n, d] of each step."""
        embedded = teacher.embed(lesson.tokens[:, 1:])  # [B, n, d]
        first = self.network.enter([lesson.features[layer] for layer in self.layers])
        length, head_dim = embedded.shape[1], self.shape.head_dim
        frequencies = plain_frequencies(head_dim, self.rope_base, embedded.device)
        cos, sin = Rotation.of(frequencies, length, embedded.dtype).at(slice(0, length))
        return unroll(
            first,
            lambda rows, attend: self.network.step(rows, embedded, cos, sin, attend),
            num_steps,
        )


class UnrolledAttention:
    """Attention of a draft's rows: to all text before the draft's start, and to one row of each
    earlier step. Called once a step; keeps the keys and values of the steps before."""

    def __init__(self) -> None:
        self._keys = list[Tensor]()
        self._values = list[Tensor]()

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries [B, n, heads, size], keys and values [B, n, kv_heads, size] -> [B, n, out]."""
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


def unroll(
    first: Tensor, step: Callable[[Tensor, UnrolledAttention], Tensor], num_steps: int
) -> list[Tensor]:
    """The outputs [B, n, d] of each step: the first from `first`, every other from the outputs of
    the step before, moved one place later."""
    attend, made, rows = UnrolledAttention(), list[Tensor](), first
    for _ in range(num_steps):
        rows = step(rows, attend)
        made.append(rows)
        rows = functional.pad(rows[:, :-1], (0, 0, 1, 0))
    return made


def unrolled_loss(teacher: Teacher, lesson: Lesson, steps: Sequence[Tensor]) -> Tensor:
    """Cross-entropy with the target's distribution, mean over the steps."""
    weights = lesson.weights[:, 1:]  # of token i + 2
    wanted = weights > 0
    with torch.no_grad():
        target = torch.softmax(teacher.head(lesson.features[LAST][:, 1:][wanted]), -1)  # [N, V]
    total = target.new_zeros(())
    for step, rows in enumerate(steps):
        counted = weights.clone()
        counted[:, :step] = 0.0
        counted = counted[wanted]  # [N]
        logits = teacher.head(rows[:, :-1][wanted])  # [N, V]
        losses = functional.cross_entropy(logits, target, reduction="none")
        total = total + (losses * counted).sum() / counted.sum().clamp_min(1e-6)
    return total / len(steps)


@torch.no_grad()
def unrolled_acceptance(
    teacher: Teacher, lesson: Lesson, steps: Sequence[Tensor]
) -> list[tuple[float, float]]:
    """As Recipe.acceptance. A position is tried only where the text agrees with all earlier draft
    tokens: elsewhere the target's choice was made after other tokens."""
    choice = teacher.head(lesson.features[LAST]).argmax(-1)[:, 1:]  # [B, n - 1], of token i + 2
    follows = choice[:, :-1] == lesson.tokens[:, 2:-1]
    alive, found = torch.ones_like(choice, dtype=torch.bool), list[tuple[float, float]]()
    for step, rows in enumerate(steps):
        alive[:, :step] = False
        hits = teacher.head(rows[:, :-1]).argmax(-1) == choice
        tried = lesson.weights[:, 1:] * alive
        found.append((float((tried * hits).sum()), float(tried.sum())))
        # A position without weight was not tried, so nothing after it is.
        alive = functional.pad(((tried > 0) & hits)[:, :-1] & follows, (1, 0))
    return found
