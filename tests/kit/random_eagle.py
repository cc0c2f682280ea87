"""A random EAGLE head of our own format that fits a tiny target."""

from __future__ import annotations

from pathlib import Path

import torch

from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import HeadShape
from localspec.forward.heads.eagle import KIND, settings_of, tensor_shapes
from localspec.forward.heads.files import TargetSizes, write_head
from localspec.forward.heads.layer import LayerShape
from localspec.forward.model import LanguageModel


def shape_for(target: LanguageModel) -> HeadShape:
    width = TargetSizes.of(target).hidden_size
    layer = LayerShape(
        width,
        width,
        ffn_size=2 * width,
        num_heads=4,
        num_kv_heads=2,
        head_dim=width // 4,
        norm_epsilon=1e-5,
    )
    return HeadShape(layer, layers=(0, LAST))


def random_tensors(shape: HeadShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """The stream starts from what the target's head reads and the rest is added to it, so that
    guesses lie near the target's last choice and hold where a text repeats itself."""
    rng, width = torch.Generator().manual_seed(seed), shape.layer.hidden_size
    made = {}
    for name, size in tensor_shapes(shape).items():
        drawn = torch.randn(size, generator=rng)
        made[name] = 1.0 + 0.1 * drawn if len(size) == 1 else 0.5 * drawn * size[-1] ** -0.5
    for name in ("fuse.weight", "mix.weight"):  # the last layer and the hidden state stand last
        made[name][:, -width:] += torch.eye(width)
    return made


def write_random(folder: Path, target: LanguageModel) -> None:
    shape = shape_for(target)
    write_head(folder, KIND, TargetSizes.of(target), settings_of(shape), random_tensors(shape))
