"""What the target says after each token of a round, in the cheapest form that decides it.

Contract: `target_rows` turns logits into `Rows`. Verification asks them three things: how likely a
drafted token is, what is left of a row once a token was rejected, and the next token. A greedy
row is one-hot and is kept as the id of its one; a sampled row is kept as probabilities. A row that
holds no numbers is refused with NumericsError by whoever chooses from it: one behind a draft token
that is never reached costs nothing. Its chances are NaN.

Not here: the acceptance rule (verify), the warps (sampling).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from localspec.core import SamplingParams
from localspec.engine.sampling import distributions, draw, no_numbers, peaks, penalised


class Row(Protocol):
    """One distribution over the next token; rejections may have taken something from it."""

    def chance(self, token: int) -> float: ...

    def without(self, token: int, drawn_from: torch.Tensor | None) -> Row:
        """What is left after `token` was rejected. drawn_from: [V] it was drawn from, or None."""
        ...

    def draw(self, rng: torch.Generator) -> int: ...


class Rows(Protocol):
    """Row 0 follows the root, row i + 1 follows draft node i."""

    def chances(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """The chance of each token in its row."""
        ...

    def row(self, index: int) -> Row:
        """Raises NumericsError, unless choosing from it does."""
        ...

    def entropies(self) -> list[float]:
        """H of each row, in nats."""
        ...

    @property
    def probs(self) -> torch.Tensor:
        """[n + 1, V], for rules that need whole rows."""
        ...


@dataclass(frozen=True)
class OneHotRow:
    """All chance on one token. What is rejected had none, so nothing can be taken from it."""

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
    """best: the likeliest token of each row, of vocab_size tokens. damaged: the rows that hold no
    numbers."""

    def __init__(
        self, best: Sequence[int], vocab_size: int, damaged: frozenset[int] = frozenset()
    ) -> None:
        self.best = best
        self.vocab_size = vocab_size
        self.damaged = damaged

    def chances(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        found = zip(rows, tokens, strict=True)
        chances = [1.0 if self.best[row] == token else 0.0 for row, token in found]
        if not self.damaged:
            return chances
        return [
            math.nan if row in self.damaged else chance
            for row, chance in zip(rows, chances, strict=True)
        ]

    def row(self, index: int) -> OneHotRow:
        if index in self.damaged:
            raise no_numbers()
        return OneHotRow(self.best[index])

    def entropies(self) -> list[float]:
        return [0.0] * len(self.best)

    @property
    def probs(self) -> torch.Tensor:
        made = torch.zeros(len(self.best), self.vocab_size)
        made.scatter_(1, torch.tensor(self.best)[:, None], 1.0)
        made[sorted(self.damaged)] = math.nan
        return made


class SampledRows:
    """probs: [n + 1, V]."""

    def __init__(self, probs: torch.Tensor) -> None:
        self._probs = probs

    def chances(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        if not tokens:
            return []
        device = self._probs.device
        index = torch.tensor([rows, tokens], device=device)
        found: list[float] = self._probs[index[0], index[1]].tolist()
        return found

    def row(self, index: int) -> DenseRow:
        return DenseRow(self._probs[index])

    def entropies(self) -> list[float]:
        found: list[float] = torch.special.entr(self._probs).sum(dim=-1).tolist()
        return found

    @property
    def probs(self) -> torch.Tensor:
        return self._probs


def target_rows(
    logits: torch.Tensor, sampling: SamplingParams, histories: Sequence[Sequence[int]]
) -> GreedyRows | SampledRows:
    """The rows of a round. logits: [n + 1, V] fp32; histories: see sampling.distributions.

    Host copies: one when greedy, none when sampled.
    """
    if sampling.temperature > 0.0:
        return SampledRows(distributions(logits, sampling, histories))
    logits = penalised(logits, sampling, histories)
    heights, best = peaks(logits)
    damaged = [row for row, height in enumerate(heights) if not math.isfinite(height)]
    return GreedyRows(best, logits.shape[-1], frozenset(damaged))
