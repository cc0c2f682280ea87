"""Teach a multi-token-prediction module, on its own outputs as it will be when drafting.

Contract: the trained weights are those of forward.heads.mtp, run by its `MtpModule`; only the
attention is of a whole batch. A lesson is gone through once from the target's states and then
from the module's own, one place later each time, as a draft of that length would. The loss is the
cross-entropy with the target's distribution, mean over the steps; the target's embedding and head
are shared and frozen.

Not here: the loop, where lessons come from (frame, collect).
Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); one module unrolled over its own outputs as in
FastMTP and, of EAGLE-3, the training-time test (arXiv 2503.01840).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from localspec.errors import ConfigError
from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes, read_head, write_head
from localspec.forward.heads.layer import (
    Rotation,
    module_parts,
    plain_frequencies,
    trainable_parts,
)
from localspec.forward.heads.mtp import KIND, MtpModule, MtpShape
from localspec.training.recipe import Lesson, Teacher, fill, halved
from localspec.training.shape import MAX_STEPS, layer_sizes, within
from localspec.training.unrolled import (
    unroll,
    unrolled_acceptance,
    unrolled_loss,
)

NUM_STEPS = 3  # gone through in training
NUM_POSITIONS = 5  # looked at in acceptance
QUIET = 0.1  # how small the layer and the embedding start beside the state


def shape_for(sizes: TargetSizes, options: dict[str, int]) -> MtpShape:
    """options: ffn_size, num_heads. Raises ConfigError."""
    layer = layer_sizes(sizes, options)
    return MtpShape(layer.ffn_size, layer.num_heads, layer.num_heads, layer.head_dim)


@dataclass(frozen=True)
class MtpRecipe:
    """The module while it is trained."""

    kind: str
    layers: tuple[int, ...]
    module: nn.ModuleDict
    shape: MtpShape
    sizes: TargetSizes
    num_steps: int

    def states(self, teacher: Teacher, lesson: Lesson, num_steps: int) -> list[Tensor]:
        """What the head reads, [B, n, d] for each step. Row i of step s (from 0) predicts token
        i + 2 as token s of a draft; before i = s there is no such draft."""
        network = MtpModule.of(self.shape.layer(self.sizes.hidden_size), module_parts(self.module))
        embedded = teacher.embed(lesson.tokens[:, 1:])  # [B, n, d]
        cos, sin = self._rotation(embedded).at(slice(0, embedded.shape[1]))
        return unroll(
            lesson.features[LAST],
            lambda states, attend: network(states, embedded, cos, sin, attend),
            num_steps,
        )

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        return unrolled_loss(teacher, lesson, self.states(teacher, lesson, self.num_steps))

    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        with torch.no_grad():
            steps = self.states(teacher, lesson, NUM_POSITIONS)
        return unrolled_acceptance(teacher, lesson, steps)

    def save(self, folder: Path) -> None:
        write_head(folder, KIND, self.sizes, self.shape.settings(), halved(self.module))

    def _rotation(self, like: Tensor) -> Rotation:
        base = self.shape.rotation_base
        frequencies = plain_frequencies(self.shape.head_dim, base, like.device)
        return Rotation.of(frequencies, like.shape[1], like.dtype)


def num_weights(sizes: TargetSizes, options: dict[str, int]) -> int:
    """See recipe.num_weights."""
    within("--steps", options.get("num_steps", NUM_STEPS), MAX_STEPS)
    return sum(map(math.prod, shape_for(sizes, options).shapes(sizes.hidden_size).values()))


def make(teacher: Teacher, options: dict[str, int], seed: int) -> MtpRecipe:
    """options: ffn_size, num_heads, num_steps. The module starts close to passing the state on."""
    shape, width = shape_for(teacher.sizes, options), teacher.sizes.hidden_size
    generator = torch.Generator().manual_seed(seed)
    module = trainable_parts(shape.shapes(width), shape.norm_epsilon, generator)
    with torch.no_grad():
        weights = dict(module.named_parameters())
        for name in ("output", "down", "input"):
            weights[f"{name}.weight"].mul_(QUIET)
        weights["input.weight"][:, :width] += torch.eye(width)
    num_steps = options.get("num_steps", NUM_STEPS)
    return MtpRecipe(KIND, (LAST,), module, shape, teacher.sizes, num_steps)


def loaded(teacher: Teacher, folder: Path) -> MtpRecipe:
    """A module as it was saved. Raises ModelError, and ConfigError for one with biases, which can
    be drafted with and is not what is trained here."""
    files = read_head(folder, KIND, teacher.sizes)
    shape = MtpShape.of(files.settings, folder.name)
    if shape.has_bias:
        raise ConfigError(f"Training knows no biases, and {folder.name} has some.")
    sizes = shape.shapes(teacher.sizes.hidden_size)
    module = trainable_parts(sizes, shape.norm_epsilon, torch.Generator())
    fill(module, files, folder.name)
    return MtpRecipe(KIND, (LAST,), module, shape, teacher.sizes, NUM_STEPS)
