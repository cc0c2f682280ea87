"""The target's distributions of one round, in the cheapest form that decides it.

Contract: `target_rows` turns logits into rows. Verification asks them how likely a draft token is,
what is left of a row after a rejection, and for the next token. A greedy row is one-hot and is kept
as the id of its one token; a sampled row is kept as probabilities. A row that holds no numbers is
refused with NumericsError by whatever chooses a token from it, so that a row behind a draft token
that is never reached costs nothing. Its chances are NaN.

Not here: the acceptance rule (verify), the warps (sampling).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from localspec.core import SamplingParams
from localspec.engine.sampling import distributions, draw, no_numbers, peaks, penalised


@dataclass(frozen=True)
class OneHotRow:
    """All chance on one token. A rejected token had none, so a rejection takes nothing from it."""

    best: int

    def chance(self, token: int) -> float:
        return 1.0 if token == self.best else 0.0

    def without(self, token: int, drawn_from: torch.Tensor | None) -> OneHotRow:
        return self

    def draw(self, rng: torch.Generator) -> int:
        return self.best


@dataclass(frozen=True)
class DenseRow:
    """weights: [V], not negative; they need not sum to 1 to be drawn from."""

    weights: torch.Tensor

    def chance(self, token: int) -> float:
        return float(self.weights[token])

    def without(self, token: int, drawn_from: torch.Tensor | None) -> DenseRow:
        """What is left after `token` was rejected. drawn_from: [V] it was drawn from, or None."""
        if drawn_from is None:
            left = self.weights.clone()
            left[token] = 0.0
        else:
            left = (self.weights - drawn_from).clamp_(min=0.0)
        total = float(left.sum())
        # p and q may agree to rounding; the rejection was then rounding too, and p itself is right.
        return DenseRow(left / total) if total > 0.0 else self

    def draw(self, rng: torch.Generator) -> int:
        return draw(self.weights, rng)


class GreedyRows:
    """Row 0 follows the root, row i + 1 follows draft token i. best: the likeliest token of each
    row, of vocab_size tokens. damaged: the rows that hold no numbers."""

    def __init__(
        self, best: Sequence[int], vocab_size: int, damaged: frozenset[int] = frozenset()
    ) -> None:
        self.best = best
        self.vocab_size = vocab_size
        self.damaged = damaged

    def chances(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """The chance of each token in its row."""
        return [
            math.nan if row in self.damaged else float(self.best[row] == token)
            for row, token in zip(rows, tokens, strict=True)
        ]

    def row(self, index: int) -> OneHotRow:
        """Raises NumericsError."""
        if index in self.damaged:
            raise no_numbers()
        return OneHotRow(self.best[index])

    def entropies(self) -> list[float]:
        return [0.0] * len(self.best)

    @property
    def probs(self) -> torch.Tensor:
        """[n + 1, V]."""
        made = torch.zeros(len(self.best), self.vocab_size)
        made.scatter_(1, torch.tensor(self.best)[:, None], 1.0)
        made[sorted(self.damaged)] = math.nan
        return made


@dataclass(frozen=True)
class SampledRows:
    """The same rows as probabilities. probs: [n + 1, V]."""

    probs: torch.Tensor

    def chances(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """The chance of each token in its row."""
        if not tokens:
            return []
        index = torch.tensor([rows, tokens], device=self.probs.device)
        found: list[float] = self.probs[index[0], index[1]].tolist()
        return found

    def row(self, index: int) -> DenseRow:
        return DenseRow(self.probs[index])

    def entropies(self) -> list[float]:
        """H of each row, in nats."""
        found: list[float] = torch.special.entr(self.probs).sum(dim=-1).tolist()
        return found


Row = OneHotRow | DenseRow
Rows = GreedyRows | SampledRows


def target_rows(
    logits: torch.Tensor, sampling: SamplingParams, histories: Iterable[Sequence[int]]
) -> Rows:
    """The rows of a round. logits: [n + 1, V] fp32; histories: see sampling.distributions.

    Host copies: one when greedy, none when sampled.
    """
    if sampling.temperature > 0.0:
        return SampledRows(distributions(logits, sampling, histories))
    logits = penalised(logits, sampling, histories)
    heights, best = peaks(logits)
    damaged = [row for row, height in enumerate(heights) if not math.isfinite(height)]
    return GreedyRows(best, logits.shape[-1], frozenset(damaged))
