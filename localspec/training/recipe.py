"""What is trained: the `Recipe` of a draft or a head, and the one that all heads share.

Contract: a `Recipe` holds the trained weights alone and names the hidden states it reads; the loop
(train_loop) is the same for every kind. A kind of head is a module of `HEADS`, imported when it is
asked for. Its `plan` describes a fresh head by the target's sizes, so that a shape that cannot be
is refused (ConfigError, with the flag and its limits) before the target is loaded; its `read_plan`
describes a saved head by its settings.

`states` computes the rows that the target's output head reads, [B, n, d] for each draft position s
(from 0): row i predicts token i + 2 as token s of a draft that starts at i - s, so the first s rows
belong to no draft. The loss is the cross-entropy with the target's distribution; the target's
embedding and output head are shared and frozen.

Not here: the draft model (draft), how rows are made (medusa; unrolled with eagle and mtp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.core.errors import ConfigError
from localspec.forward.features import LAST
from localspec.forward.heads.files import (
    MAX_SIZE,
    Shapes,
    TargetSizes,
    read_head,
    take,
    write_head,
)
from localspec.forward.heads.layer import LayerShape
from localspec.training.target import TaughtBatch, Teacher

HEADS = {kind: f"localspec.training.{kind}" for kind in ("medusa", "eagle", "mtp")}
MAX_STEPS = 16  # draft steps in training; the cost of attention grows with their square
States = Callable[[Teacher, TaughtBatch, int], Sequence[Tensor]]


class Recipe(Protocol):
    """A draft or head while it is trained. module: the trained weights only, fp32."""

    module: nn.Module

    @property
    def layers(self) -> tuple[int, ...]:
        """The hidden states it reads; LAST is always among a batch's features."""
        ...

    def loss(self, teacher: Teacher, batch: TaughtBatch) -> Tensor:
        """A scalar to minimise: the mean by weight, so that batches compare."""
        ...

    def acceptance(self, teacher: Teacher, batch: TaughtBatch) -> list[tuple[float, float]]:
        """For each draft position: the sum of the weights where the greedy draft token is the
        target's greedy choice, and the sum of the weights tried. A position is tried only where
        all earlier draft tokens were accepted."""
        ...

    def save(self, folder: Path) -> None:
        """Write the folder that a drafter loads."""
        ...


@dataclass(frozen=True)
class HeadPlan:
    """A head before it has weights. settings: of head.json. shapes: of its tensors. build: the
    module with its first weights, and the states it computes. num_steps: draft positions in the
    loss. num_judged: draft positions in the acceptance. decay: weight of a position in the loss
    relative to the one before."""

    kind: str
    layers: tuple[int, ...]
    settings: Mapping[str, Any]
    shapes: Shapes
    build: Callable[[torch.Generator], tuple[nn.Module, States]]
    num_steps: int
    num_judged: int
    decay: float = 1.0

    @property
    def num_weights(self) -> int:
        return sum(map(math.prod, self.shapes.values()))


class HeadRecipe:
    def __init__(self, plan: HeadPlan, sizes: TargetSizes, seed: int) -> None:
        self.plan, self.sizes = plan, sizes
        self.module, self.states = plan.build(torch.Generator().manual_seed(seed))

    @property
    def layers(self) -> tuple[int, ...]:
        return self.plan.layers

    def loss(self, teacher: Teacher, batch: TaughtBatch) -> Tensor:
        """The mean over the draft positions."""
        weights = batch.weights[:, 1:]  # of token i + 2
        wanted = weights > 0
        with torch.no_grad():
            target = torch.softmax(teacher.head(batch.features[LAST][:, 1:][wanted]), -1)  # [N, V]
        total, sum_of_shares = target.new_zeros(()), 0.0
        for step, rows in enumerate(self.states(teacher, batch, self.plan.num_steps)):
            counted = weights.clone()
            counted[:, :step] = 0.0
            counted = counted[wanted]  # [N]
            logits = teacher.head(rows[:, :-1][wanted])  # [N, V]
            losses = functional.cross_entropy(logits, target, reduction="none")
            share = self.plan.decay**step
            total = total + share * (losses * counted).sum() / counted.sum().clamp_min(1e-6)
            sum_of_shares += share
        return total / sum_of_shares

    @torch.no_grad()
    def acceptance(self, teacher: Teacher, batch: TaughtBatch) -> list[tuple[float, float]]:
        choice = teacher.head(batch.features[LAST]).argmax(-1)[:, 1:]  # [B, n - 1], of token i + 2
        steps = self.states(teacher, batch, self.plan.num_judged)
        hits = (teacher.head(rows[:, :-1]).argmax(-1) == choice for rows in steps)
        follows = choice == batch.tokens[:, 2:]
        return acceptance_by_position(hits, follows, batch.weights[:, 1:])

    def save(self, folder: Path) -> None:
        """In bf16."""
        weights = {n: weight.to(torch.bfloat16) for n, weight in self.module.state_dict().items()}
        write_head(folder, self.plan.kind, self.sizes, self.plan.settings, weights)


def acceptance_by_position(
    hits: Iterable[Tensor], follows: Tensor, weights: Tensor
) -> list[tuple[float, float]]:
    """As Recipe.acceptance, over [B, m] predicted places. hits: for each draft position, where its
    token is the target's choice. follows: where the text is the target's choice. A position is
    tried only where the text agrees with all earlier draft tokens: elsewhere the target's choice
    was made after other tokens."""
    alive, found = torch.ones_like(follows), list[tuple[float, float]]()
    for hit in hits:
        tried = weights * alive
        found.append((float((tried * hit).sum()), float(tried.sum())))
        # A place without weight was not tried, so no draft continues from it; none reaches the
        # first places of a later position.
        alive = functional.pad(((tried > 0) & hit & follows)[:, :-1], (1, 0))
    return found


def head_plan(kind: str, sizes: TargetSizes, options: Mapping[str, int]) -> HeadPlan:
    """Raises ConfigError for an unknown kind or a shape that cannot be."""
    return cast("HeadPlan", _module(kind).plan(sizes, options))


def make_recipe(
    kind: str, teacher: Teacher, options: Mapping[str, int], seed: int = 0
) -> HeadRecipe:
    """A fresh head. Raises ConfigError as `head_plan` does."""
    return HeadRecipe(head_plan(kind, teacher.sizes, options), teacher.sizes, seed)


def load_recipe(kind: str, teacher: Teacher, folder: Path) -> HeadRecipe:
    """A saved head of our own format, to be measured. Raises ModelError, and ConfigError for one
    that can draft and cannot be trained."""
    files = read_head(folder, kind, teacher.sizes)
    plan: HeadPlan = _module(kind).read_plan(files.settings, teacher.sizes)
    recipe, cpu = HeadRecipe(plan, teacher.sizes, 0), torch.device("cpu")
    weights = take(files.tensors, plan.shapes, folder.name, torch.float32, cpu)
    recipe.module.load_state_dict(weights)
    return recipe


def _module(kind: str) -> Any:
    if kind not in HEADS:
        raise ConfigError(
            f"{kind!r} is no kind of head that can be trained. Choose one of: "
            f"{', '.join(sorted(HEADS))}."
        )
    return import_module(HEADS[kind])


def layer_shape(sizes: TargetSizes, options: Mapping[str, int], norm_epsilon: float) -> LayerShape:
    """The one decoder layer of a head. options: ffn_size, num_heads; the defaults follow the
    target's width. Raises ConfigError."""
    width = sizes.hidden_size
    default = max(1, width // 64)
    num_heads = within("--num-heads", options.get("num_heads", default), width // 2)
    if (width // num_heads) % 2:
        raise ConfigError(
            f"{num_heads} attention heads on a target of width {width} would be "
            f"{width // num_heads} wide each, but that must be an even number. Choose another "
            f"--num-heads; the default is {default}."
        )
    ffn_size = within("--ffn-size", options.get("ffn_size", 16 * (13 * width // 64)), MAX_SIZE)
    head_dim = width // num_heads
    return LayerShape(width, width, ffn_size, num_heads, num_heads, head_dim, norm_epsilon)


def draft_steps(options: Mapping[str, int], default: int) -> int:
    """options: num_steps. Raises ConfigError."""
    return within("--steps", options.get("num_steps", default), MAX_STEPS)


def within(flag: str, value: int, most: int) -> int:
    """The value. Raises ConfigError unless it lies between 1 and `most`."""
    if not 1 <= value <= most:
        raise ConfigError(f"{flag} is {value}, but must lie between 1 and {most} here.")
    return value
