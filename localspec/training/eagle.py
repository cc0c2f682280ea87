"""Trains an EAGLE head: one decoder layer over hidden states of the target and its embedding.

Contract: the trained weights are those of forward.heads.eagle, run by its own `OwnNetwork`; the
steps are those of `unrolled`, loss and acceptance those of `recipe`.
Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import HeadShape
from localspec.forward.heads.eagle import (
    KIND,
    OwnNetwork,
    read_shape,
    settings_of,
    tensor_shapes,
)
from localspec.forward.heads.files import HeadSettings, TargetSizes
from localspec.training.recipe import HeadPlan, draft_steps, layer_shape
from localspec.training.unrolled import unrolled_plan

NUM_STEPS = 2  # a third step costs half as much again
NORM_EPSILON = 1e-5
START_SCALE = 0.1  # of the layer's first weights, relative to the stream it adds to


def read_layers(num_layers: int) -> tuple[int, ...]:
    """The layers read: a low one, a middle one, and what the output head reads."""
    inner = {num_layers // 4, num_layers // 2} - {num_layers - 1}
    return (*sorted(inner), LAST)


def plan(sizes: TargetSizes, options: Mapping[str, int]) -> HeadPlan:
    """options: ffn_size, num_heads, num_steps. Raises ConfigError."""
    shape = HeadShape(layer_shape(sizes, options, NORM_EPSILON), read_layers(sizes.num_layers))
    return _plan(shape, draft_steps(options, NUM_STEPS))


def read_plan(settings: HeadSettings, sizes: TargetSizes) -> HeadPlan:
    """Raises ModelError."""
    return _plan(read_shape(settings, sizes), NUM_STEPS)


def _plan(shape: HeadShape, num_steps: int) -> HeadPlan:
    settings, shapes = settings_of(shape), tensor_shapes(shape)
    return unrolled_plan(KIND, shape, settings, shapes, OwnNetwork, _initialise, num_steps)


@torch.no_grad()
def _initialise(module: nn.ModuleDict, shape: HeadShape) -> None:
    """Pass the last hidden state through and let the layer add little, so that the target's output
    head reads what it was trained to read."""
    weights, width = dict(module.named_parameters()), shape.layer.hidden_size
    for name in ("fuse.weight", "mix.weight", "output.weight", "down.weight"):
        weights[name].mul_(START_SCALE)
    last = shape.layers.index(LAST) * width
    weights["fuse.weight"][:, last : last + width] += torch.eye(width)
    weights["mix.weight"][:, width:] += torch.eye(width)  # the embedding comes first
