"""Trains a multi-token-prediction module: one decoder layer over the target's last hidden state.

Contract: the trained weights are those of forward.heads.mtp, run by its own `MtpNetwork`; the
steps are those of `unrolled`, loss and acceptance those of `recipe`.
Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); one module that reads its own outputs, as
FastMTP.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from localspec.forward.heads.autoregressive import HeadShape
from localspec.forward.heads.files import HeadSettings, TargetSizes
from localspec.forward.heads.mtp import (
    KIND,
    MtpNetwork,
    read_shape,
    settings_of,
    tensor_shapes,
)
from localspec.training.recipe import HeadPlan, draft_steps, layer_shape
from localspec.training.unrolled import unrolled_plan

NUM_STEPS = 3
NORM_EPSILON = 1e-6
START_SCALE = 0.1  # of the layer's and the embedding's first weights, relative to the state


def plan(sizes: TargetSizes, options: Mapping[str, int]) -> HeadPlan:
    """options: ffn_size, num_heads, num_steps. Raises ConfigError."""
    shape = HeadShape(layer_shape(sizes, options, NORM_EPSILON))
    return _plan(shape, draft_steps(options, NUM_STEPS))


def read_plan(settings: HeadSettings, sizes: TargetSizes) -> HeadPlan:
    """Raises ModelError."""
    return _plan(read_shape(settings, sizes), NUM_STEPS)


def _plan(shape: HeadShape, num_steps: int) -> HeadPlan:
    settings, shapes = settings_of(shape), tensor_shapes(shape)
    return unrolled_plan(KIND, shape, settings, shapes, MtpNetwork, _initialise, num_steps)


@torch.no_grad()
def _initialise(module: nn.ModuleDict, shape: HeadShape) -> None:
    """Start close to passing the state on."""
    weights, width = dict(module.named_parameters()), shape.layer.hidden_size
    for name in ("output.weight", "down.weight", "input.weight"):
        weights[name].mul_(START_SCALE)
    weights["input.weight"][:, :width] += torch.eye(width)
