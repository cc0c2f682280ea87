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

from localspec.errors import ConfigError
from localspec.forward.heads.autoregressive import HeadShape
from localspec.forward.heads.files import Settings, TargetSizes
from localspec.forward.heads.layer import module_parts, trainable_parts
from localspec.forward.heads.mtp import (
    KIND,
    MtpNetwork,
    read_shape,
    settings_of,
    tensor_shapes,
)
from localspec.training.recipe import HeadPlan, draft_steps, layer_shape
from localspec.training.unrolled import NUM_JUDGED, Unrolled

NUM_STEPS = 3
NORM_EPSILON = 1e-6
START_SCALE = 0.1  # of the layer's and the embedding's first weights, relative to the state


def plan(sizes: TargetSizes, options: Mapping[str, int]) -> HeadPlan:
    """options: ffn_size, num_heads, num_steps. Raises ConfigError."""
    shape = HeadShape(layer_shape(sizes, options, NORM_EPSILON))
    return _plan(shape, draft_steps(options, NUM_STEPS))


def read_plan(settings: Settings, sizes: TargetSizes) -> HeadPlan:
    """Raises ModelError, and ConfigError for a module with biases."""
    shape = read_shape(settings, sizes)
    if shape.has_bias:
        raise ConfigError(f"Training knows no biases, and {settings.folder.name} has some.")
    return _plan(shape, NUM_STEPS)


def _plan(shape: HeadShape, num_steps: int) -> HeadPlan:
    shapes = tensor_shapes(shape)

    def build(generator: torch.Generator) -> tuple[nn.Module, Unrolled]:
        module = trainable_parts(shapes, shape.layer.norm_epsilon, generator)
        _initialise(module, shape.layer.hidden_size)
        return module, Unrolled(MtpNetwork(shape.layer, module_parts(module)), shape)

    settings = settings_of(shape)
    return HeadPlan(KIND, shape.layers, settings, shapes, build, num_steps, NUM_JUDGED)


@torch.no_grad()
def _initialise(module: nn.ModuleDict, width: int) -> None:
    """Start close to passing the state on."""
    weights = dict(module.named_parameters())
    for name in ("output.weight", "down.weight", "input.weight"):
        weights[name].mul_(START_SCALE)
    weights["input.weight"][:, :width] += torch.eye(width)
