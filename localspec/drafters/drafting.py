"""One draft under way: rows of logits in, tokens out, and what verification needs of them.

Contract: at temperature 0 a token is the likeliest of its row; above it every token is drawn from
the row under the request's own sampling, and that very row is handed on. A copied token was not
drawn: where others were, its row is one-hot, which is what it was "drawn" from. The draft ends
only after a token was taken, by a rule that has seen nothing later.

Not here: which rows (draft_model, chained), acceptance (engine.verify).
Source: speculative sampling, arXiv 2211.17192 and 2302.01318.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from localspec.core import DraftPlan, Proposal, SamplingParams, Sequence, chain
from localspec.engine.sampling import distributions, draw, peaks


class Drafting:
    """The tokens drafted so far after `sequence`, at most plan.num_draft_tokens.

    vocab_size: of the target; families pad their vocabularies differently, and a padded id can
    never be drawn.
    """

    def __init__(self, sequence: Sequence, plan: DraftPlan, vocab_size: int) -> None:
        self.tokens = list[int]()
        self._sequence = sequence
        self._plan = plan
        self._vocab_size = vocab_size
        self._is_greedy = sequence.sampling.temperature == 0.0
        self._sampling = drafted_with(sequence.sampling)
        self._confidences = list[float]()
        self._rows = list[torch.Tensor | None]()

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self._plan.num_draft_tokens

    def row(self, logits: torch.Tensor) -> torch.Tensor:
        """The distribution of the next token: logits [V_draft] -> [V]."""
        is_penalised = self._sampling.repetition_penalty != 1.0
        history = [*self._sequence.tokens, *self.tokens] if is_penalised else []
        row = fitted(logits, self._vocab_size)[None]  # [1, V]
        return distributions(row, self._sampling, [history])[0]

    def take(self, row: torch.Tensor) -> bool:
        """Take the next token from its row; False when the draft ends here."""
        (confidence,), (peak,) = peaks(row[None])
        if math.isnan(confidence):  # a damaged draft costs time, never correctness
            return False
        token = peak if self._is_greedy else draw(row, self._sequence.rng)
        return self._add(token, confidence, row)

    def copy(self, token: int, confidence: float) -> bool:
        """Take a token that was found, not drawn; False when the draft ends here."""
        return self._add(token, confidence, None)

    def proposal(self) -> Proposal:
        return chain(tuple(self.tokens), self._drawn_from(), tuple(self._confidences))

    def _add(self, token: int, confidence: float, row: torch.Tensor | None) -> bool:
        index = len(self.tokens)
        self.tokens.append(token)
        self._confidences.append(confidence)
        self._rows.append(row)
        if self.is_full:
            return False
        keep_drafting = self._plan.keep_drafting
        return keep_drafting is None or keep_drafting(index, confidence)

    def _drawn_from(self) -> torch.Tensor | None:
        """[n, V]; None where nothing was drawn."""
        drawn = [row for row in self._rows if row is not None]
        if self._is_greedy or not drawn:
            return None
        if len(drawn) == len(self._rows):
            return torch.stack(drawn)
        index = torch.tensor(self.tokens, device=drawn[0].device)
        certain = F.one_hot(index, self._vocab_size).to(drawn[0].dtype)  # [n, V]
        kept = zip(self._rows, certain, strict=True)
        return torch.stack([one_hot if row is None else row for row, one_hot in kept])


def drafted_with(sampling: SamplingParams) -> SamplingParams:
    """The request's own sampling; plain softmax when greedy, for its peak is the token then and
    its height the confidence."""
    if sampling.temperature > 0.0:
        return sampling
    return SamplingParams(1.0, repetition_penalty=sampling.repetition_penalty)


def fitted(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[..., V_draft] -> [..., V] of the target: what is missing can never be drawn."""
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[..., :vocab_size]
    return F.pad(logits, (0, missing), value=float("-inf"))
