"""Trains a multi-token-prediction module: one decoder layer over the target's last hidden state.

Contract: the trained weights are those of forward.heads.mtp, run by its own `MtpModule`; the
steps are those of `unrolled`, loss and acceptance those of `recipe`.
Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); one module that reads its own outputs, as
FastMTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from localspec.errors import ConfigError
from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes
from localspec.forward.heads.layer import module_parts, trainable_parts
from localspec.forward.heads.mtp import KIND, MtpModule, MtpShape
from localspec.training.recipe import HeadPlan, draft_steps, layer_sizes
from localspec.training.unrolled import NUM_JUDGED, Unrolled

NUM_STEPS = 3
START_SCALE = 0.1  # of the layer's and the embedding's first weights, relative to the state


def plan(sizes: TargetSizes, options: Mapping[str, int]) -> HeadPlan:
    """options: ffn_size, num_heads, num_steps. Raises ConfigError."""
    layer = layer_sizes(sizes, options)
    shape = MtpShape(layer.ffn_size, layer.num_heads, layer.num_heads, layer.head_dim)
    return _plan(shape, sizes.hidden_size, draft_steps(options, NUM_STEPS))


def read_plan(settings: Mapping[str, Any], folder: Path, sizes: TargetSizes) -> HeadPlan:
    """Raises ModelError, and ConfigError for a module with biases."""
    shape = MtpShape.of(settings, folder.name)
    if shape.has_bias:
        raise ConfigError(f"Training knows no biases, and {folder.name} has some.")
    return _plan(shape, sizes.hidden_size, NUM_STEPS)


def _plan(shape: MtpShape, width: int, num_steps: int) -> HeadPlan:
    shapes = shape.shapes(width)

    def build(generator: torch.Generator) -> tuple[nn.Module, Unrolled]:
        module = trainable_parts(shapes, shape.norm_epsilon, generator)
        _initialise(module, width)
        step = MtpModule.of(shape.layer(width), module_parts(module))
        # Its rows are already what the output head reads.
        return module, Unrolled(
            itemgetter(0), step, lambda rows: rows, (LAST,), shape.head_dim, shape.rotation_base
        )

    return HeadPlan(KIND, (LAST,), shape.settings(), shapes, build, num_steps, NUM_JUDGED)


@torch.no_grad()
def _initialise(module: nn.ModuleDict, width: int) -> None:
    """Start close to passing the state on."""
    weights = dict(module.named_parameters())
    for name in ("output.weight", "down.weight", "input.weight"):
        weights[name].mul_(START_SCALE)
    weights["input.weight"][:, :width] += torch.eye(width)
