"""What a kind of draft or head brings to its training: weights, loss, held-out acceptance, files.

Contract: a `Recipe` holds the trained weights alone and names the hidden states it reads; the loop
(train_loop) is the same for every kind. `HEADS` names the module of each kind of head; the module
is imported when it is asked for and has `make`, `load` and `num_weights`. Sizes are checked
against the target's config before the target is loaded: a shape that cannot be is a ConfigError
that names the flag and its limits, which are those of the readers in forward.heads.

Not here: the draft model (draft), which is no head; the files of a head (forward.heads.files).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from localspec.errors import ConfigError
from localspec.forward.heads.files import HeadFiles, TargetSizes, take
from localspec.forward.heads.mtp import MAX_SIZE
from localspec.training.target import Lesson, Teacher

MAX_STEPS = 16  # draft steps in training; the cost of attention grows with their square


class Recipe(Protocol):
    """One kind of draft or head while it is trained. layers: the hidden states it reads; LAST is
    always among a lesson's features. module: the trained weights only, fp32."""

    kind: str
    layers: tuple[int, ...]
    module: nn.Module

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        """A scalar to minimise: the mean by weight, so that batches compare."""
        ...

    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        """For each draft position: the sum of the weights where the greedy draft token is the
        target's greedy choice, and the sum of the weights tried. A position is tried only where
        all earlier draft tokens were accepted."""
        ...

    def save(self, folder: Path) -> None:
        """Write the folder that a drafter loads."""
        ...


Make = Callable[[Teacher, dict[str, int], int], Recipe]
Load = Callable[[Teacher, Path], Recipe]
Count = Callable[[TargetSizes, dict[str, int]], int]

HEADS: dict[str, str] = {
    "medusa": "localspec.training.medusa",
    "eagle": "localspec.training.eagle",
    "mtp": "localspec.training.mtp",
}


def make_recipe(kind: str, teacher: Teacher, options: dict[str, int], seed: int) -> Recipe:
    """A fresh head. Raises ConfigError for an unknown kind or a shape that cannot be."""
    return cast("Make", _function(kind, "make"))(teacher, options, seed)


def num_weights(kind: str, sizes: TargetSizes, options: dict[str, int]) -> int:
    """The number of weights that `make_recipe` would make. Raises ConfigError as it does."""
    return cast("Count", _function(kind, "num_weights"))(sizes, options)


def load_recipe(kind: str, teacher: Teacher, folder: Path) -> Recipe:
    """A saved head of our own format, to be measured. Raises ModelError."""
    return cast("Load", _function(kind, "load"))(teacher, folder)


def _function(kind: str, name: str) -> object:
    if kind not in HEADS:
        raise ConfigError(
            f"{kind!r} is no kind of head that can be trained. Choose one of: "
            f"{', '.join(sorted(HEADS))}."
        )
    return vars(import_module(HEADS[kind]))[name]


def fill(module: nn.Module, files: HeadFiles, where: str) -> None:
    """Load a head's tensors into a module of its shape. Raises ModelError."""
    shapes = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    cpu = torch.device("cpu")
    module.load_state_dict(take(files.tensors, shapes, where, torch.float32, cpu))


def saved_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights in bf16, as they are written."""
    return {name: weight.to(torch.bfloat16) for name, weight in module.state_dict().items()}


@dataclass(frozen=True)
class LayerSizes:
    """The one decoder layer of a head. head_dim: width of each attention head, even."""

    ffn_size: int
    num_heads: int
    head_dim: int


def layer_sizes(sizes: TargetSizes, options: Mapping[str, int]) -> LayerSizes:
    """options: ffn_size, num_heads; the defaults follow the target's width. Raises
    ConfigError."""
    width = sizes.hidden_size
    default = max(1, width // 64)
    num_heads = within("--num-heads", options.get("num_heads", default), width // 2)
    if (width // num_heads) % 2:
        raise ConfigError(
            f"{num_heads} attention heads on a target of width {width} would be "
            f"{width // num_heads} wide each, but that must be an even number. Choose another "
            f"--num-heads; the default is {default}."
        )
    ffn_size = options.get("ffn_size", 16 * (13 * width // 64))
    return LayerSizes(within("--ffn-size", ffn_size, MAX_SIZE), num_heads, width // num_heads)


def within(flag: str, value: int, most: int) -> int:
    """The value. Raises ConfigError unless it lies between 1 and `most`."""
    if not 1 <= value <= most:
        raise ConfigError(f"{flag} is {value}, but must lie between 1 and {most} here.")
    return value
