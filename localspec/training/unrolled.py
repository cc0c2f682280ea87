"""Training a head that drafts on its own outputs: what a row sees, its loss, its acceptance.

Contract: a lesson is gone through several times over, first from the target's own states, then
from the head's outputs, one place later each time, as a draft of that length would (training-time
test). `steps` holds for each step the rows that the target's head reads, [B, n, d]: row i of step
s (from 0) predicts token i + 2 as token s of a draft that starts at i - s, so its first s rows
belong to none.

Not here: the networks (eagle, mtp).
Source: EAGLE-3's training-time test (arXiv 2503.01840), as HASS (2408.15766).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from localspec.forward.features import LAST
from localspec.training.recipe import Lesson, Teacher


class UnrolledAttention:
    """What a draft of s tokens would see: of the text all before its start, of itself one row a
    step. Called once a step; remembers the keys and values of the steps before."""

    def __init__(self) -> None:
        self._keys = list[Tensor]()
        self._values = list[Tensor]()

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """queries [B, n, heads, size], keys and values [B, n, kv_heads, size] -> [B, n, out]."""
        self._keys.append(keys.transpose(1, 2))
        self._values.append(values.transpose(1, 2))
        mask = visible(queries.shape[1], len(self._keys), queries.device)
        seen = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            torch.cat(self._keys, dim=2),
            torch.cat(self._values, dim=2),
            attn_mask=mask,
            enable_gqa=queries.shape[2] != keys.shape[2],
        )
        return seen.transpose(1, 2).flatten(2)


def visible(length: int, num_steps: int, device: torch.device) -> Tensor:
    """[n, steps * n]: what a row of the last step sees of all steps, True = seen. A row before
    its draft's start would see nothing; it sees itself, and is not counted."""
    place = torch.arange(length, device=device)
    ahead = place[:, None] - place  # [n, n], how far a column lies before a row
    parts = [ahead >= num_steps - 1]
    parts += [ahead == num_steps - 1 - step for step in range(1, num_steps)]
    return torch.cat(parts, dim=1)


def unroll(
    first: Tensor, step: Callable[[Tensor, UnrolledAttention], Tensor], num_steps: int
) -> list[Tensor]:
    """The outputs [B, n, d] of each step: the first from `first`, every other from the outputs of
    the one before, which stand one place later."""
    attend, made, rows = UnrolledAttention(), list[Tensor](), first
    for _ in range(num_steps):
        rows = step(rows, attend)
        made.append(rows)
        rows = functional.pad(rows[:, :-1], (0, 0, 1, 0))  # what comes before each place
    return made


def unrolled_loss(teacher: Teacher, lesson: Lesson, steps: Sequence[Tensor]) -> Tensor:
    """Cross-entropy with the target's own distribution, mean over the steps."""
    weights = lesson.weights[:, 1:]  # of token i + 2
    wanted = weights > 0
    with torch.no_grad():
        said = teacher.head(lesson.features[LAST][:, 1:][wanted])  # [N, V]
        target = torch.softmax(said, dim=-1)
    total = said.new_zeros(())
    for step, rows in enumerate(steps):
        counted = weights.clone()
        counted[:, :step] = 0.0
        counted = counted[wanted]  # [N]
        logits = teacher.head(rows[:, :-1][wanted])  # [N, V]
        missed = functional.cross_entropy(logits, target, reduction="none")
        total = total + (missed * counted).sum() / counted.sum().clamp_min(1e-6)
    return total / len(steps)


@torch.no_grad()
def unrolled_acceptance(
    teacher: Teacher, lesson: Lesson, steps: Sequence[Tensor]
) -> list[tuple[float, float]]:
    """See Recipe.acceptance. A guess is tried where the text follows all earlier ones: elsewhere
    the target's choice, made after the text, would not be the choice after them."""
    choice = teacher.head(lesson.features[LAST]).argmax(-1)[:, 1:]  # [B, n - 1], of token i + 2
    follows = choice[:, :-1] == lesson.tokens[:, 2:-1]
    alive, found = torch.ones_like(choice, dtype=torch.bool), list[tuple[float, float]]()
    for step, rows in enumerate(steps):
        alive[:, :step] = False
        hits = teacher.head(rows[:, :-1]).argmax(-1) == choice
        tried = lesson.weights[:, 1:] * alive
        found.append((float((tried * hits).sum()), float(tried.sum())))
        # A draft's earlier tokens count only where they were tried, that is, weighed.
        alive = functional.pad(((tried > 0) & hits)[:, :-1] & follows, (1, 0))
    return found
