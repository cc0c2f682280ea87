"""Tiny heads for tests: a teacher and batches from a tiny native target, and heads that have
learnt a little of what it writes, so that some of their guesses hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from localspec.formats.head_folder import CONFIG
from localspec.forward.decoder import Decoder, run_together
from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes
from localspec.forward.passes import Rows, forward_together
from localspec.training.recipe import Recipe
from localspec.training.target import TaughtBatch, Teacher

RATE = 5e-3


def teacher_of(target: Decoder) -> Teacher:
    """The target's embedding and head, plain and differentiable."""
    dense = target.weights.head.dense()
    assert dense is not None
    head, embedding = dense.weight.detach().clone(), target.weights.embedding

    def embed(ids: Tensor) -> Tensor:
        return F.embedding(ids, embedding)

    def logits(rows: Tensor) -> Tensor:
        return F.linear(rows, head)

    return Teacher(TargetSizes.of(target), embed, logits)


def written_by(target: Decoder, seed: int, count: int, length: int) -> list[list[int]]:
    """Texts the target writes at temperature 1 after one token each: greedy ones would soon go
    round in circles, and teach little else."""
    rng = torch.Generator().manual_seed(seed)
    texts: list[list[int]] = torch.randint(target.vocab_size, (count, 1), generator=rng).tolist()
    target.cache.rollback(0)
    models = [target, *(target.beside() for _ in texts[1:])]
    for _ in range(length - 1):
        parts = zip(models, texts, strict=True)
        rows = forward_together([Rows(model, text[-1:], num_logits=1) for model, text in parts])
        drawn = torch.cat(rows).softmax(-1).multinomial(1, generator=rng)
        for text, token in zip(texts, drawn.flatten().tolist(), strict=True):
            text.append(token)
    target.cache.rollback(0)
    return texts


def random_texts(vocab_size: int, seed: int, count: int, length: int) -> list[list[int]]:
    """Any tokens: what follows one can be learnt from them, what follows two cannot."""
    rng = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(vocab_size, (count, length), generator=rng).tolist()
    return found


def batch_of(target: Decoder, texts: Sequence[Sequence[int]]) -> TaughtBatch:
    """A batch of texts of one length, with the target's last states. Every token weighs 1."""
    states = []
    for text in texts:
        target.cache.rollback(0)
        (made,) = run_together([Rows(target, text[:-1])], [LAST])
        states.append(made.hidden[LAST].tolist())  # an inference tensor cannot be learnt from
        target.cache.rollback(0)
    tokens = torch.tensor(texts)
    return TaughtBatch(
        tokens, torch.ones(len(texts), tokens.shape[1] - 1), {LAST: torch.tensor(states)}
    )


def train(recipe: Recipe, teacher: Teacher, batch: TaughtBatch, num_steps: int) -> None:
    optimiser = torch.optim.Adam(recipe.module.parameters(), lr=RATE)
    for _ in range(num_steps):
        optimiser.zero_grad()
        recipe.loss(teacher, batch).backward()
        optimiser.step()


def rates(found: Sequence[tuple[float, float]]) -> list[float]:
    """Acceptance by position."""
    return [accepted / tried if tried else 0.0 for accepted, tried in found]


def identity_teacher(size: int) -> Teacher:
    """A target whose logits are its states, so that a state says which token it predicts."""
    return Teacher(
        TargetSizes(size, size, 1), lambda ids: torch.eye(size)[ids], lambda rows: 9.0 * rows
    )


def counting_batch(size: int, length: int) -> TaughtBatch:
    """A text that counts up modulo `size`, by a target that predicts it."""
    tokens = (torch.arange(length + 1) % size)[None]
    return TaughtBatch(tokens, torch.ones(1, length), {LAST: torch.eye(size)[tokens[:, 1:]]})


def change_config(folder: Path, part: str, **values: object) -> None:
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    content[part] |= values
    (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")
