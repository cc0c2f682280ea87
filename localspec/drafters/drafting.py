"""A chain of draft tokens under way, and the loop of a model that drafts token by token.

Contract: a token is the one that the draft's own logits choose with the turn's noise, as the
target's choose theirs. So a draft whose distribution is near the target's names the same token at
every temperature. The softmax of the scores estimates which token the target chooses; its peak is
the confidence.

A head or an early exit gives unlikely tokens too much, and large noise lifts those, so it guesses
better with a share of the noise. On the demo target's sampled replies to 48 prompts the first draft
token was right, with HEAD_SHARE and with all of the noise, at T = 0.7 and 1: the early exit .53/.51
and .50/.46, EAGLE .68/.65 and .58/.54, multi-token prediction .47/.45 and .42/.35, Medusa .36/.33
and .30/.26. A draft model gains nothing by it: 2.39 and 2.12 tokens a round with 0.8 of the noise,
2.41 and 2.16 with all of it.

What a grammar forces is taken as it stands, so that a model runs only for what it has to guess.

Not here: which rows (the drafters), acceptance (engine.verify).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from collections.abc import Sequence as Several
from dataclasses import replace

import torch
import torch.nn.functional as F

from localspec.core.decoding import DraftPlan, Proposal, Sequence, chain
from localspec.engine.sampling import (
    masked,
    peaks,
    scores,
)
from localspec.forward.model import LanguageModel
from localspec.forward.passes import Pass, Rows

Level = tuple[list[int], list[float]]  # tokens, chances
DraftSteps = Generator[Pass, torch.Tensor, Proposal]  # see engine.batch.Stepwise
HEAD_SHARE = 0.6  # of the noise, for heads and early exits
RULED_SIZE = 2  # tokens read at once under a stop rule, which wastes those beyond its stop
MAX_PENDING = 8  # Tokens that the first draft step takes along; more are read before it.


class Drafting:
    """The tokens drafted so far after `sequence`, at most plan.num_draft_tokens; a draft ends with
    the end of the text.

    vocab_size: of the target. Families pad their vocabularies differently, and an id that the
    target does not have can never be named. share: of the noise. text: what the model reads of the
    sequence (draft_window); all of it by default.
    """

    def __init__(
        self,
        sequence: Sequence,
        plan: DraftPlan,
        vocab_size: int,
        share: float = 1.0,
        text: Several[int] | None = None,
    ) -> None:
        self.tokens = list[int]()
        self.sequence = sequence
        self.text = sequence.tokens if text is None else text
        self.plan = plan
        self._vocab_size = vocab_size
        self.share = share
        self._confidences = list[float]()
        self._num_forced = 0

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.plan.num_draft_tokens

    def row(self, logits: torch.Tensor) -> torch.Tensor:
        """How likely each token is to be chosen next: logits [V_draft] -> [V]."""
        return self.rows(logits[None], [self.tokens])[0]

    def rows(self, logits: torch.Tensor, texts: Several[Several[int]]) -> torch.Tensor:
        """The same after each of the drafted `texts`: [n, V_draft] -> [n, V]."""
        return chances(logits, self._vocab_size, self.sequence, texts, self.share)

    def pending(self, num_read: int) -> list[int]:
        """Return the tokens of the text and of the draft behind the first `num_read`."""
        num_drafted = max(0, num_read - len(self.text))
        return [*self.text[num_read:], *self.tokens[num_drafted:]]

    @property
    def num_unread(self) -> int:
        """How many tokens to make before the host reads them, where a read is a wait."""
        missing = self.plan.num_draft_tokens - len(self.tokens)
        return missing if self.plan.keep_drafting is None else min(missing, RULED_SIZE)

    def take(self, row: torch.Tensor, stated: torch.Tensor | None = None) -> bool:
        """Take the next token from its row; False when the draft ends here. stated: the confidence
        in it, [1], None for its chance. One host copy."""
        if stated is None:
            (confidence,), (token,) = peaks(row[None])
        else:
            height, place = row.max(dim=-1)
            chance = torch.where(height.isnan(), height, stated[0])
            confidence, token = torch.stack((chance, place.to(height.dtype))).tolist()
        # A damaged draft costs time, never correctness.
        return not math.isnan(confidence) and self.add(int(token), confidence)

    def take_forced(self) -> bool:
        """Take what the turn's grammar forces next, which no step has to guess; False when the
        draft ends among it."""
        for token in self.sequence.forced_after(self.tokens):
            self._num_forced += 1
            if not self.add(token, 1.0):
                return False
        return True

    def take_all(self, tokens: Several[float], confidences: Several[float]) -> bool:
        """Take tokens that were made without a word of the stop rule, up to the first at which the
        draft ends; False when it ends among them."""
        for token, confidence in zip(tokens, confidences, strict=True):
            if math.isnan(confidence) or not self.add(int(token), confidence):
                return False
        return True

    def add(self, token: int, confidence: float) -> bool:
        """Add a token; False when the draft ends here."""
        index = len(self.tokens)
        self.tokens.append(token)
        self._confidences.append(confidence)
        if self.is_full or token in self.sequence.end_ids:
            return False
        keep_drafting = self.plan.keep_drafting
        return keep_drafting is None or keep_drafting(index, confidence)

    def proposal(self) -> Proposal:
        found = chain(tuple(self.tokens), tuple(self._confidences))
        if not self._num_forced:
            return found
        return replace(found, num_steps=len(self.tokens) - self._num_forced)


def chances(
    logits: torch.Tensor,
    vocab_size: int,
    sequence: Sequence,
    texts: Several[Several[int]],
    share: float = 1.0,
) -> torch.Tensor:
    """How likely each token of the target is to be chosen after `sequence` and each of the drafted
    `texts`: logits [n, V_draft] -> [n, V]. The peak of a row is the draft's own choice."""
    logits = masked(fitted(logits, vocab_size), sequence, texts)
    return torch.softmax(scores(logits, sequence, texts, share), dim=-1)


def likeliest(chances: torch.Tensor, count: int) -> list[Level]:
    """The `count` likeliest tokens of each row, [n, V], with their chances; one host copy."""
    best = chances.topk(min(count, chances.shape[-1]), dim=-1)
    both = torch.stack((best.indices.to(best.values.dtype), best.values)).tolist()
    return [level_of(tokens, heights) for tokens, heights in zip(*both, strict=True)]


def level_of(tokens: Several[float], heights: Several[float]) -> Level:
    """Tokens as the device names them, and those of their chances that are any."""
    # A damaged draft gives NaN: it costs time, never correctness.
    pairs = [(int(token), height) for token, height in zip(tokens, heights, strict=True)]
    kept = [(token, height) for token, height in pairs if height > 0.0]
    return [token for token, _ in kept], [height for _, height in kept]


def fitted(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[..., V_draft] -> [..., V] of the target; ids that the draft lacks get no chance."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return F.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocab_size]


def room_of(model: LanguageModel, num_tokens: int) -> int:
    """Return how many tokens may be drafted after so many within the model's cache."""
    return max(0, model.cache.shape.capacity - num_tokens)


def catch_up(model: LanguageModel, tokens: Several[int]) -> Generator[Pass, torch.Tensor]:
    """Read all of `tokens` but the last few, which the first draft step takes along."""
    wanted = tokens[:-1]
    missing = wanted[model.cache.reuse(wanted) :]
    if len(missing) > MAX_PENDING:
        yield Rows(model, missing, num_logits=1, is_reading=True)


def autoregress(model: LanguageModel, draft: Drafting) -> DraftSteps:
    """Draft until the draft ends, from where the model's cache stands."""
    if not draft.is_full and draft.take_forced():
        pending = draft.pending(model.cache.length)
        logits = yield Rows(model, pending, num_logits=1)  # [1, V_draft]
        yield from draft_on(model, draft, logits[0])
    return draft.proposal()


def draft_on(
    model: LanguageModel, draft: Drafting, logits: torch.Tensor
) -> Generator[Pass, torch.Tensor]:
    """Draft until the draft ends. logits: [V_draft], those after all that the cache holds."""
    num_read = len(draft.tokens)
    while not draft.is_full and draft.take(draft.row(logits)) and draft.take_forced():
        (logits,) = yield Rows(model, draft.tokens[num_read:], num_logits=1)
        num_read = len(draft.tokens)
