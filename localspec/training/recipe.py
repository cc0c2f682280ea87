"""What the training of a head needs of its target, of a batch and of the head's kind.

Contract: a `Recipe` holds the trained weights alone, says which of the target's hidden states it
reads, and gives a loss and its held-out acceptance on a `Lesson`; the loop around it (`frame`) is
the same for every kind. The target is frozen: a `Teacher` is its sizes, its embedding and its
head. `RECIPES` names the module of each kind; it is imported only when asked for. What was saved is
taken up by `load_recipe`.

Not here: where the lessons come from (collect, teacher), the loop, the files of a head
(forward.heads.files).
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


@dataclass(frozen=True)
class Teacher:
    """The frozen target. embed: ids [...] int64 -> input embeddings [..., d]. head: normalised
    rows [..., d] -> logits [..., V] fp32, differentiable with respect to the rows."""

    sizes: TargetSizes
    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Lesson:
    """A batch with what the target computed on it.

    tokens: [B, n + 1] int64. weights: [B, n], of the predicted tokens tokens[:, 1:]. features:
    layer -> [B, n, d] fp32, of tokens[:, :-1]; layers as in forward.features (LAST is what the
    head reads). Filling stands at the end of a row and has no weight.
    """

    tokens: Tensor
    weights: Tensor
    features: Mapping[int, Tensor]


class Recipe(Protocol):
    """One kind of head while it is trained. layers: the hidden states it reads; LAST is always
    among a lesson's features. module: the trained weights only, fp32."""

    kind: str
    layers: tuple[int, ...]
    module: nn.Module

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        """What is to be made small, a scalar; a mean over weights, so that batches compare."""
        ...

    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        """For each draft position (sum of the weights where the greedy guess is the target's own
        greedy choice, sum of the weights tried), tried only where all earlier guesses agreed."""
        ...

    def save(self, folder: Path) -> None:
        """Write the head's folder, by forward.heads.files.write_head."""
        ...


Make = Callable[[Teacher, dict[str, int], int], Recipe]
Load = Callable[[Teacher, Path], Recipe]

Count = Callable[[TargetSizes, dict[str, int]], int]

# kind -> module with make(teacher, options, seed) -> Recipe and num_weights(sizes, options) -> int.
RECIPES: dict[str, str] = {
    "medusa": "localspec.training.medusa",
    "eagle": "localspec.training.eagle",
    "mtp": "localspec.training.mtp",
}


def make_recipe(kind: str, teacher: Teacher, options: dict[str, int], seed: int) -> Recipe:
    """A fresh recipe. Raises ConfigError for a kind that is not known or a shape that cannot be."""
    return cast("Make", _of(kind, "make"))(teacher, options, seed)


def num_weights(kind: str, sizes: TargetSizes, options: dict[str, int]) -> int:
    """How many weights `make_recipe` would make, without making them. Raises ConfigError as it
    does, and for options of the training itself."""
    return cast("Count", _of(kind, "num_weights"))(sizes, options)


def _of(kind: str, function: str) -> object:
    if kind not in RECIPES:
        raise ConfigError(
            f"{kind!r} is no kind of head that can be trained. Choose one of: "
            f"{', '.join(sorted(RECIPES))}."
        )
    return vars(import_module(RECIPES[kind]))[function]


def load_recipe(kind: str, teacher: Teacher, folder: Path) -> Recipe:
    """A head of our own format as it was saved, to be measured. Raises ModelError."""
    return cast("Load", _of(kind, "loaded"))(teacher, folder)


def fill(module: nn.Module, files: HeadFiles, where: str) -> None:
    """Put a head's tensors into a module of its shape. Raises ModelError."""
    shapes = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    cpu = torch.device("cpu")
    module.load_state_dict(take(files.tensors, shapes, where, torch.float32, cpu))


def halved(module: nn.Module) -> dict[str, Tensor]:
    """The weights as they are saved: bf16."""
    return {name: weight.to(torch.bfloat16) for name, weight in module.state_dict().items()}
