"""Trains a multi-token-prediction module: one decoder layer over the target's last hidden state.

Contract: the trained weights are those of forward.heads.mtp, run by its own `MtpModule`; the
steps are those of `unrolled`, loss and acceptance those of `head_recipe`.
Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); one module that reads its own outputs, as
FastMTP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from localspec.errors import ConfigError
from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes, read_head
from localspec.forward.heads.layer import Attend, module_parts, trainable_parts
from localspec.forward.heads.mtp import KIND, MtpModule, MtpShape
from localspec.training.head_recipe import HeadRecipe
from localspec.training.recipe import MAX_STEPS, fill, layer_sizes, within
from localspec.training.target import Teacher
from localspec.training.unrolled import NUM_JUDGED, Unrolled

NUM_STEPS = 3
START_SCALE = 0.1  # of the layer's and the embedding's first weights, relative to the state


@dataclass(frozen=True)
class MtpNetwork:
    """The module as an UnrolledNetwork: its rows are already what the output head reads."""

    module: MtpModule

    def enter(self, features: Sequence[Tensor], /) -> Tensor:
        return features[0]

    def step(
        self, rows: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attend: Attend, /
    ) -> Tensor:
        return self.module(rows, embedded, cos, sin, attend)

    def leave(self, rows: Tensor, /) -> Tensor:
        return rows


def shape_for(sizes: TargetSizes, options: dict[str, int]) -> MtpShape:
    """options: ffn_size, num_heads. Raises ConfigError."""
    layer = layer_sizes(sizes, options)
    return MtpShape(layer.ffn_size, layer.num_heads, layer.num_heads, layer.head_dim)


def num_weights(sizes: TargetSizes, options: dict[str, int]) -> int:
    within("--steps", options.get("num_steps", NUM_STEPS), MAX_STEPS)
    return sum(map(math.prod, shape_for(sizes, options).shapes(sizes.hidden_size).values()))


def make(teacher: Teacher, options: dict[str, int], seed: int) -> HeadRecipe:
    """options: ffn_size, num_heads, num_steps. The module starts close to passing the state on."""
    shape, width = shape_for(teacher.sizes, options), teacher.sizes.hidden_size
    generator = torch.Generator().manual_seed(seed)
    module = trainable_parts(shape.shapes(width), shape.norm_epsilon, generator)
    with torch.no_grad():
        weights = dict(module.named_parameters())
        for name in ("output", "down", "input"):
            weights[f"{name}.weight"].mul_(START_SCALE)
        weights["input.weight"][:, :width] += torch.eye(width)
    return _recipe(teacher.sizes, shape, module, options.get("num_steps", NUM_STEPS))


def load(teacher: Teacher, folder: Path) -> HeadRecipe:
    """A saved module. Raises ModelError, and ConfigError for one with biases, which can draft but
    cannot be trained here."""
    files = read_head(folder, KIND, teacher.sizes)
    shape = MtpShape.of(files.settings, folder.name)
    if shape.has_bias:
        raise ConfigError(f"Training knows no biases, and {folder.name} has some.")
    sizes = shape.shapes(teacher.sizes.hidden_size)
    module = trainable_parts(sizes, shape.norm_epsilon, torch.Generator())
    fill(module, files, folder.name)
    return _recipe(teacher.sizes, shape, module, NUM_STEPS)


def _recipe(
    sizes: TargetSizes, shape: MtpShape, module: nn.ModuleDict, num_steps: int
) -> HeadRecipe:
    network = MtpNetwork(MtpModule.of(shape.layer(sizes.hidden_size), module_parts(module)))
    states = Unrolled(network, (LAST,), shape.head_dim, shape.rotation_base)
    return HeadRecipe(KIND, (LAST,), module, sizes, shape.settings(), states, num_steps, NUM_JUDGED)
