"""From answers to token rows, split into those to train on and those held out, and to batches.

Contract: a row is one answer with its prompt before it, cut to a length. All rows of one group (a
conversation and its other answers) are trained on or held out together. Which groups are held out
depends on their names alone, so that it stays the same when more answers are collected. Batches
hold rows of similar length, padded at the end with weight 0; their order is a function of seed and
epoch, so that a checkpoint resumes at the same place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localspec.core.errors import ConfigError

PROMPT_WEIGHT = 0.1  # prompts are trained on a little; answers are what will be drafted
HELD_OUT_SHARE = 0.1
WINDOW = 256  # rows that are sorted by length together
MIN_GROUPS = 2


@dataclass(frozen=True)
class Answer:
    """An answer as token ids. temperature: None for a logged one."""

    group: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float | None


@dataclass(frozen=True)
class TokenRow:
    """tokens [n + 1]; weights [n], of the predicted tokens."""

    tokens: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.weights)


@dataclass(frozen=True)
class SplitRows:
    """train: the rows to train on."""

    train: tuple[TokenRow, ...]
    held_out: tuple[TokenRow, ...]

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for row in (*self.train, *self.held_out):
            digest.update(row.tokens.tobytes())
        return digest.hexdigest()


def split_rows(answers: Sequence[Answer], length: int) -> SplitRows:
    """Rows of at most `length` predicted tokens. Raises ConfigError for a single group."""
    groups = sorted({answer.group for answer in answers}, key=_fraction)
    if len(groups) < MIN_GROUPS:
        raise ConfigError(
            f"There are answers to {len(groups)} conversation(s), and at least {MIN_GROUPS} are "
            "needed: one is held out, to measure on. Give more prompts, or more --answer-minutes."
        )
    held_out = {group for group in groups if _fraction(group) < HELD_OUT_SHARE} or {groups[0]}
    if len(held_out) == len(groups):
        held_out = {groups[0]}
    rows = [
        (answer.group in held_out, row) for answer in answers for row in to_rows(answer, length)
    ]
    return SplitRows(
        tuple(row for is_held_out, row in rows if not is_held_out),
        tuple(row for is_held_out, row in rows if is_held_out),
    )


def to_rows(answer: Answer, length: int) -> list[TokenRow]:
    """One row of the answer behind the end of its prompt. A longer answer makes several rows that
    overlap by half; each token has its weight in one of them."""
    tokens = [*answer.prompt[-max(1, length + 1 - len(answer.answer)) :], *answer.answer]
    start = len(tokens) - len(answer.answer)
    weights = [PROMPT_WEIGHT] * start + [1.0] * len(answer.answer)
    rows, done = [_row(tokens[: length + 1], weights[: length + 1])], length + 1
    while done < len(tokens):
        first = done - length // 2
        piece = weights[first : first + length + 1]
        piece[: done - first] = [0.0] * (done - first)
        rows.append(_row(tokens[first : first + length + 1], piece))
        done = first + length + 1
    return rows


def make_batches(
    rows: Sequence[TokenRow], tokens_at_once: int, order: Random
) -> list[list[TokenRow]]:
    """Groups of rows that hold at most `tokens_at_once` tokens each once padded."""
    shuffled = order.sample(rows, len(rows))
    batches = list[list[TokenRow]]()
    for start in range(0, len(shuffled), WINDOW):
        batches.append([])
        for row in sorted(shuffled[start : start + WINDOW], key=len):
            if batches[-1] and len(row) * (len(batches[-1]) + 1) > tokens_at_once:
                batches.append([])
            batches[-1].append(row)
    order.shuffle(batches)
    return batches


def padded(rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """One batch, every row padded to the longest with its last token: tokens [B, n + 1] int64,
    weights [B, n] fp32."""
    length = max(map(len, rows))
    tokens = [np.pad(row.tokens, (0, length - len(row)), mode="edge") for row in rows]
    weights = [np.pad(row.weights, (0, length - len(row))) for row in rows]
    return torch.from_numpy(np.stack(tokens).astype(np.int64)), torch.from_numpy(np.stack(weights))


def _row(tokens: Sequence[int], weights: Sequence[float]) -> TokenRow:
    return TokenRow(np.asarray(tokens, dtype=np.int32), np.asarray(weights[1:], dtype=np.float32))


def _fraction(group: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2.0**64
