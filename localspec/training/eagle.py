"""Trains an EAGLE head: one decoder layer over hidden states of the target and its embedding.

Contract: the trained weights are those of forward.heads.eagle, run by its own `OwnForm`; the
steps are those of `unrolled`, loss and acceptance those of `head_recipe`.
Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from localspec.forward.features import LAST
from localspec.forward.heads.eagle import KIND, EagleShape, OwnForm
from localspec.forward.heads.eagle_files import read_shape
from localspec.forward.heads.files import TargetSizes, read_head
from localspec.forward.heads.layer import module_parts, trainable_parts
from localspec.training.head_recipe import HeadRecipe
from localspec.training.recipe import MAX_STEPS, fill, layer_sizes, within
from localspec.training.target import Teacher
from localspec.training.unrolled import NUM_JUDGED, Unrolled

NUM_STEPS = 2  # a third step costs half as much again
START_SCALE = 0.1  # of the layer's first weights, relative to the stream it adds to


def read_layers(num_layers: int) -> tuple[int, ...]:
    """The layers read: a low one, a middle one, and what the output head reads."""
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


def num_weights(sizes: TargetSizes, options: dict[str, int]) -> int:
    within("--steps", options.get("num_steps", NUM_STEPS), MAX_STEPS)
    return sum(map(math.prod, shape_for(sizes, options).shapes().values()))


def make(teacher: Teacher, options: dict[str, int], seed: int) -> HeadRecipe:
    """options: ffn_size, num_heads, num_steps."""
    shape = shape_for(teacher.sizes, options)
    generator = torch.Generator().manual_seed(seed)
    module = trainable_parts(shape.shapes(), shape.norm_epsilon, generator)
    _initialise(module, shape)
    return _recipe(teacher.sizes, shape, module, options.get("num_steps", NUM_STEPS))


def load(teacher: Teacher, folder: Path) -> HeadRecipe:
    """A saved head. Raises ModelError."""
    files = read_head(folder, KIND, teacher.sizes)
    shape = read_shape(files.settings, folder, teacher.sizes)
    module = trainable_parts(shape.shapes(), shape.norm_epsilon, torch.Generator())
    fill(module, files, folder.name)
    return _recipe(teacher.sizes, shape, module, NUM_STEPS)


def _recipe(
    sizes: TargetSizes, shape: EagleShape, module: nn.ModuleDict, num_steps: int
) -> HeadRecipe:
    network = OwnForm.of(shape.layer(), module_parts(module))
    states = Unrolled(network, shape.layers, shape.head_dim, shape.rope_base)
    return HeadRecipe(
        KIND, shape.layers, module, sizes, shape.settings(), states, num_steps, NUM_JUDGED
    )


@torch.no_grad()
def _initialise(module: nn.ModuleDict, shape: EagleShape) -> None:
    """Pass the last hidden state through and let the layer add little, so that the target's output
    head reads what it was trained to read."""
    weights, identity = dict(module.named_parameters()), torch.eye(shape.hidden_size)
    for name in ("fuse.weight", "mix.weight", "output.weight", "down.weight"):
        weights[name].mul_(START_SCALE)
    last = shape.layers.index(LAST) * shape.hidden_size
    weights["fuse.weight"][:, last : last + shape.hidden_size] += identity
    weights["mix.weight"][:, shape.hidden_size :] += identity  # the embedding comes first
