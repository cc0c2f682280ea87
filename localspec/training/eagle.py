"""Teach an EAGLE head to predict the target, on its own outputs as it will when drafting.

Contract: the trained weights are those of forward.heads.eagle, run by its very function; only the
attention is of a whole batch. Each lesson is gone through several times over (training-time test):
first from the target's features, then from the head's own outputs, one place later each time, as
a draft of that length would. The loss is the cross-entropy with the target's distribution, mean
over the steps; the target's embedding and head are shared and frozen.

Not here: attention and loss over the steps (unrolled), the loop and the lessons (frame, collect).
Source: EAGLE-3's training-time test (arXiv 2503.01840), as HASS (2408.15766).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from localspec.forward.features import LAST
from localspec.forward.heads.eagle import KIND, EagleShape, OwnForm
from localspec.forward.heads.eagle_files import read_shape
from localspec.forward.heads.files import TargetSizes, read_head, write_head
from localspec.forward.heads.layer import (
    Rotation,
    module_parts,
    plain_frequencies,
    trainable_parts,
)
from localspec.training.recipe import Lesson, Teacher, fill, halved
from localspec.training.shape import MAX_STEPS, layer_sizes, within
from localspec.training.unrolled import (
    unroll,
    unrolled_acceptance,
    unrolled_loss,
)

NUM_STEPS = 2  # gone through in training: a third costs half as much again
NUM_POSITIONS = 5  # looked at in acceptance
QUIET = 0.1  # how small the layer starts beside the stream it adds to


def read_layers(num_layers: int) -> tuple[int, ...]:
    """A low layer, a middle one, and what the target's head reads."""
    inner = {num_layers // 4, num_layers // 2} - {num_layers - 1}
    return (*sorted(inner), LAST)


def shape_for(sizes: TargetSizes, options: dict[str, int]) -> EagleShape:
    """options: ffn_size, num_heads. Raises ConfigError."""
    layer = layer_sizes(sizes, options)
    return EagleShape(
        layers=read_layers(sizes.num_layers),
        hidden_size=sizes.hidden_size,
        ffn_size=layer.ffn_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_heads,
        head_dim=layer.head_dim,
        norm_epsilon=1e-5,
        rope_base=10000.0,
    )


@dataclass(frozen=True)
class EagleRecipe:
    """The head while it is trained."""

    kind: str
    layers: tuple[int, ...]
    module: nn.ModuleDict
    shape: EagleShape
    sizes: TargetSizes
    num_steps: int

    @property
    def network(self) -> OwnForm:
        return OwnForm.of(self.shape.layer(), module_parts(self.module))

    def outputs(self, teacher: Teacher, lesson: Lesson, num_steps: int) -> list[Tensor]:
        """[B, n, d] for each step. Row i of step s predicts token i + 2 as the s-th token of a
        draft that starts at i - s; its first s rows belong to none (s from 0)."""
        network = self.network
        embedded = teacher.embed(lesson.tokens[:, 1:])  # [B, n, d]
        hidden = network.enter([lesson.features[layer] for layer in self.layers])
        places = slice(0, embedded.shape[1])
        cos, sin = self._rotation(embedded).at(places)
        return unroll(
            hidden,
            lambda rows, attend: network.step(rows, embedded, cos, sin, attend),
            num_steps,
        )

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        return unrolled_loss(teacher, lesson, self._left(teacher, lesson, self.num_steps))

    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        with torch.no_grad():
            steps = self._left(teacher, lesson, NUM_POSITIONS)
        return unrolled_acceptance(teacher, lesson, steps)

    def save(self, folder: Path) -> None:
        write_head(folder, KIND, self.sizes, self.shape.settings(), halved(self.module))

    def _left(self, teacher: Teacher, lesson: Lesson, num_steps: int) -> list[Tensor]:
        """The rows that the target's head reads, of each step."""
        return [self.network.leave(rows) for rows in self.outputs(teacher, lesson, num_steps)]

    def _rotation(self, like: Tensor) -> Rotation:
        frequencies = plain_frequencies(self.shape.head_dim, self.shape.rope_base, like.device)
        return Rotation.of(frequencies, like.shape[1], like.dtype)


def num_weights(sizes: TargetSizes, options: dict[str, int]) -> int:
    """See recipe.num_weights."""
    within("--steps", options.get("num_steps", NUM_STEPS), MAX_STEPS)
    return sum(map(math.prod, shape_for(sizes, options).shapes().values()))


def make(teacher: Teacher, options: dict[str, int], seed: int) -> EagleRecipe:
    """options: ffn_size, num_heads, num_steps."""
    shape = shape_for(teacher.sizes, options)
    generator = torch.Generator().manual_seed(seed)
    module = trainable_parts(shape.shapes(), shape.norm_epsilon, generator)
    _start(module, shape)
    num_steps = options.get("num_steps", NUM_STEPS)
    return EagleRecipe(KIND, shape.layers, module, shape, teacher.sizes, num_steps)


def loaded(teacher: Teacher, folder: Path) -> EagleRecipe:
    """A head as it was saved. Raises ModelError."""
    files = read_head(folder, KIND, teacher.sizes)
    shape = read_shape(files.settings, folder, teacher.sizes)
    module = trainable_parts(shape.shapes(), shape.norm_epsilon, torch.Generator())
    fill(module, files, folder.name)
    return EagleRecipe(KIND, shape.layers, module, shape, teacher.sizes, NUM_STEPS)


@torch.no_grad()
def _start(module: nn.ModuleDict, shape: EagleShape) -> None:
    """The layer adds little at first, and the stream starts as what the target's head reads, so
    that the shared head finds it in the place it knows."""
    weights, same = dict(module.named_parameters()), torch.eye(shape.hidden_size)
    for name in ("fuse.weight", "mix.weight", "output.weight", "down.weight"):
        weights[name].mul_(QUIET)
    last = shape.layers.index(LAST) * shape.hidden_size
    weights["fuse.weight"][:, last : last + shape.hidden_size] += same
    weights["mix.weight"][:, shape.hidden_size :] += same  # behind the embedding
