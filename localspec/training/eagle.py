"""Trains an EAGLE head: one decoder layer over hidden states of the target and its embedding.

Contract: the trained weights are those of forward.heads.eagle, run by its own `OwnForm`; the
steps are those of `unrolled`, loss and acceptance those of `recipe`.
Source: EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from localspec.forward.features import LAST
from localspec.forward.heads.eagle import KIND, EagleShape, OwnForm
from localspec.forward.heads.eagle_files import read_shape
from localspec.forward.heads.files import TargetSizes
from localspec.forward.heads.layer import module_parts, trainable_parts
from localspec.training.recipe import HeadPlan, draft_steps, layer_sizes
from localspec.training.unrolled import NUM_JUDGED, Unrolled

NUM_STEPS = 2  # a third step costs half as much again
START_SCALE = 0.1  # of the layer's first weights, relative to the stream it adds to


def read_layers(num_layers: int) -> tuple[int, ...]:
    """The layers read: a low one, a middle one, and what the output head reads."""
    inner = {num_layers // 4, num_layers // 2} - {num_layers - 1}
    return (*sorted(inner), LAST)


def plan(sizes: TargetSizes, options: Mapping[str, int]) -> HeadPlan:
    """options: ffn_size, num_heads, num_steps. Raises ConfigError."""
    layer = layer_sizes(sizes, options)
    shape = EagleShape(
        layers=read_layers(sizes.num_layers),
        hidden_size=sizes.hidden_size,
        ffn_size=layer.ffn_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_heads,
        head_dim=layer.head_dim,
        norm_epsilon=1e-5,
        rope_base=10000.0,
    )
    return _plan(shape, draft_steps(options, NUM_STEPS))


def read_plan(settings: Mapping[str, Any], folder: Path, sizes: TargetSizes) -> HeadPlan:
    """Raises ModelError."""
    return _plan(read_shape(settings, folder, sizes), NUM_STEPS)


def _plan(shape: EagleShape, num_steps: int) -> HeadPlan:
    def build(generator: torch.Generator) -> tuple[nn.Module, Unrolled]:
        module = trainable_parts(shape.shapes(), shape.norm_epsilon, generator)
        _initialise(module, shape)
        form = OwnForm.of(shape.layer(), module_parts(module))
        return module, Unrolled(
            form.enter, form.step, form.leave, shape.layers, shape.head_dim, shape.rope_base
        )

    return HeadPlan(
        KIND, shape.layers, shape.settings(), shape.shapes(), build, num_steps, NUM_JUDGED
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
