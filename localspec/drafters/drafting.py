"""A chain of draft tokens under way, and the loop of a model that drafts token by token.

Contract: at temperature 0 a token is the likeliest of its row. Above it the token is drawn from the
row under the request's own sampling, and that row is handed over with it. A copied token was not
drawn: beside drawn ones its row is one-hot. The draft ends only after a token was taken, by a rule
that has seen nothing later.

Not here: which rows (the drafters), acceptance (engine.verify).
Source: speculative sampling, arXiv 2211.17192 and 2302.01318.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from localspec.core import DraftPlan, Proposal, SamplingParams, Sequence, chain
from localspec.engine.sampling import distributions, draw, peaks
from localspec.forward.model import LanguageModel, prefill

MAX_PENDING = 8  # tokens that the first draft step takes along; more are prefilled before it


class Drafting:
    """The tokens drafted so far after `sequence`, at most plan.num_draft_tokens.

    vocab_size: of the target. Families pad their vocabularies differently, and an id that the
    target does not have can never be drawn.
    """

    def __init__(self, sequence: Sequence, plan: DraftPlan, vocab_size: int) -> None:
        self.tokens = list[int]()
        self._sequence = sequence
        self._plan = plan
        self._vocab_size = vocab_size
        self._is_greedy = sequence.sampling.temperature == 0.0
        self._sampling = guessed_with(sequence.sampling)
        self._confidences = list[float]()
        self._rows = list[torch.Tensor | None]()

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self._plan.num_draft_tokens

    def row(self, logits: torch.Tensor) -> torch.Tensor:
        """The distribution of the next token: logits [V_draft] -> [V]."""
        row = fitted(logits, self._vocab_size)[None]  # [1, V]
        return distributions(row, self._sampling, self._histories())[0]

    def take(self, row: torch.Tensor) -> bool:
        """Take the next token from its row; False when the draft ends here."""
        (confidence,), (peak,) = peaks(row[None])
        if math.isnan(confidence):  # a damaged draft costs time, never correctness
            return False
        return self.add(peak if self._is_greedy else draw(row, self._sequence.rng), confidence, row)

    def add(self, token: int, confidence: float, row: torch.Tensor | None) -> bool:
        """Add a token and the row that it was drawn from, None for a copied one; False when the
        draft ends here."""
        index = len(self.tokens)
        self.tokens.append(token)
        self._confidences.append(confidence)
        self._rows.append(row)
        keep_drafting = self._plan.keep_drafting
        return not self.is_full and (keep_drafting is None or keep_drafting(index, confidence))

    def proposal(self) -> Proposal:
        return chain(tuple(self.tokens), self._drawn_from(), tuple(self._confidences))

    def _histories(self) -> Iterator[list[int]]:
        """Of one row; a list is made only where a penalty reads it."""
        yield [*self._sequence.tokens, *self.tokens]

    def _drawn_from(self) -> torch.Tensor | None:
        """[n, V]; None where nothing was drawn."""
        drawn = [row for row in self._rows if row is not None]
        if self._is_greedy or not drawn:
            return None
        if len(drawn) == len(self._rows):
            return torch.stack(drawn)
        index = torch.tensor(self.tokens, device=drawn[0].device)
        certain = F.one_hot(index, self._vocab_size).to(drawn[0].dtype)  # [n, V]
        pairs = zip(self._rows, certain, strict=True)
        return torch.stack([one_hot if row is None else row for row, one_hot in pairs])


def guessed_with(sampling: SamplingParams) -> SamplingParams:
    """The request's sampling. When greedy, plain softmax: its peak is the token, and the height of
    the peak is the confidence."""
    if sampling.temperature > 0.0:
        return sampling
    return SamplingParams(1.0, repetition_penalty=sampling.repetition_penalty)


def fitted(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[..., V_draft] -> [..., V] of the target; ids that the draft lacks get no chance."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return F.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocab_size]


def room_of(model: LanguageModel, sequence: Sequence) -> int:
    """Tokens that may be drafted after `sequence` within the model's context."""
    return max(0, model.cache.shape.capacity - len(sequence.tokens))


def catch_up(model: LanguageModel, tokens: list[int]) -> None:
    """Hold all of `tokens` but the last few, which the first draft step takes along."""
    wanted = tokens[:-1]
    missing = wanted[model.cache.reuse(wanted) :]
    if len(missing) > MAX_PENDING:
        prefill(model, missing)


def autoregress(
    model: LanguageModel, sequence: Sequence, plan: DraftPlan, target_vocab_size: int
) -> Proposal:
    """Draft up to plan.num_draft_tokens tokens from where the model's cache stands."""
    draft = Drafting(sequence, plan, target_vocab_size)
    if not draft.is_full:
        pending = sequence.tokens[model.cache.length :]
        draft_on(model, draft, model.forward(pending, num_logits=1)[0])
    return draft.proposal()


def draft_on(model: LanguageModel, draft: Drafting, logits: torch.Tensor) -> None:
    """Draft until the draft ends. logits: [V_draft], those after all that the cache holds."""
    while not draft.is_full and draft.take(draft.row(logits)):
        logits = model.forward(draft.tokens[-1:], num_logits=1)[0]
