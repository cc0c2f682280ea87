"""A draft model of another family, with other tokens, drafts for the target.

Contract: the draft reads the target's text in its own vocabulary (retokenise) and drafts on in one
of two ways, both exact.

Re-encoded: its most likely tokens, as text, become the target's tokens. Nothing is
drawn, so they are judged by the target's chance alone, whatever the temperature.

Translated: its rows, on the tokens both have (SharedTokens), warped as the request asks, are
what tokens are drawn from, one of the draft for one of the target; those rows are handed on. A row
most of which is on tokens that the target lacks ends the draft before a token is drawn.

Which way: greedily the first, for it can say everything. Sampled, a translated token is accepted
as often as the draft says, if the target's next token is one of the draft's at all; a re-encoded
one as often as the target itself draws the draft's favourite. So the share of the target's tokens
that are one token of the draft, of the text so far, is held against the height of the draft's
peaks, and the larger wins. Both are known before the round, so the choice sees nothing of the
draft, and both are learnt anew in each turn, so that a seed gives the same reply again.

Source: universal assisted generation (transformers) and token-level intersection
(arXiv 2502.05202); deterministic drafts accepted with p(x) as in engine.verify.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from localspec.core import DraftPlan, Proposal, SamplingParams, Sequence, chain
from localspec.drafters.drafting import Drafting
from localspec.drafters.parts import DrafterBase, Foreign, Parts
from localspec.drafters.retokenise import DraftText, Retokeniser, TargetToken
from localspec.drafters.vocabularies import SharedTokens, special_pairs
from localspec.engine.sampling import distributions, peaks
from localspec.errors import ModelError
from localspec.forward.model import prefill

RE_ENCODED, TRANSLATED = "re-encoded", "translated"
ENOUGH_SHARED = 0.5  # of a row's mass; below it most of what the draft means cannot be said
STEPS_A_TOKEN = 3  # of the draft for one token of the target, at most
FIRST_PEAK, PEAK_RATE = 0.5, 0.05  # how high peaks are taken to be, and how fast that is learnt
TAKEN_ALONG = 8  # tokens that the first draft step takes in


class CrossTokenizerDrafter(DrafterBase):
    """Drafts with `model`, whose tokens are not the target's."""

    name = "cross_tokenizer"
    shapes_itself = False

    def __init__(self, parts: Foreign, target_vocab_size: int) -> None:
        self.model = parts.model
        self._targets = parts.targets
        self._table = parts.own.token_bytes()
        self._targets_table = parts.targets.token_bytes()[:target_vocab_size]
        both = (parts.own, parts.model.vocab_size, parts.targets, target_vocab_size)
        specials = special_pairs(*both)  # the target's id -> the draft's
        self._specials = {own: theirs for theirs, own in specials.items()}
        self._shared = SharedTokens.between(*both, parts.model.device)
        self._text = DraftText(parts.own, self._table, self._targets_table, specials)
        self._peak = FIRST_PEAK
        self._said: str | None = None  # what it last signalled

    @classmethod
    def build(cls, parts: Parts) -> CrossTokenizerDrafter:
        if parts.foreign is None:
            raise ModelError(parts.foreign_refusal)
        return cls(parts.foreign, parts.target.vocab_size)

    @property
    def memory_bytes(self) -> int:
        return self.model.weight_bytes + self.model.cache.kv_bytes + self._shared.held_bytes

    def signal(self, sequence: Sequence) -> str | None:
        """Which way the draft would go: each is accepted in its own measure. By the text as far as
        it was read for the last draft of the turn, and until there was one as in the turn before:
        reading takes time, and is for those who draft."""
        if self._text.is_reading(sequence.tokens):
            self._said = self._way(sequence)
            return self._said
        may_translate = sequence.sampling.temperature > 0.0 and self._said == TRANSLATED
        return TRANSLATED if may_translate else RE_ENCODED

    def _way(self, sequence: Sequence) -> str | None:
        if self._room <= 0 or not self._text.ids:
            return None
        return TRANSLATED if self._translates(sequence.sampling) else RE_ENCODED

    def prepare(self, sequence: Sequence) -> None:
        self._follow(sequence)
        if self._way(sequence) is not None:
            self._catch_up()

    def _follow(self, sequence: Sequence) -> None:
        if self._text.follow(sequence.tokens):
            self._peak = FIRST_PEAK

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        self._follow(sequence)
        if self._way(sequence) is None or plan.num_draft_tokens == 0:
            return Proposal()
        self._catch_up()
        pending = self._text.ids[self.model.cache.length :]
        logits = self.model.forward(pending, num_logits=1)[0]  # [V_draft]
        if self._translates(sequence.sampling) and self._can_say(logits, sequence.sampling):
            return self._translated(sequence, plan.shortened(self._room), logits)
        return self._re_encoded(sequence, plan, logits)

    @property
    def _room(self) -> int:
        return self.model.cache.shape.capacity - len(self._text.ids)

    def _catch_up(self) -> None:
        """Hold all ids but the last few, which the first draft step takes along."""
        wanted = self._text.ids[:-1]
        missing = wanted[self.model.cache.reuse(wanted) :]
        if len(missing) > TAKEN_ALONG:
            prefill(self.model, missing)

    def _translates(self, sampling: SamplingParams) -> bool:
        if sampling.temperature == 0.0 or self._text.pending:
            return False
        return self._text.aligned_share > self._peak

    def _can_say(self, logits: torch.Tensor, sampling: SamplingParams) -> bool:
        return self._shared.mass(logits, sampling.temperature) >= ENOUGH_SHARED

    def _translated(self, sequence: Sequence, plan: DraftPlan, logits: torch.Tensor) -> Proposal:
        """Draw from the shared part of the draft's rows; `logits` are those of the first."""
        draft, num_steps = Drafting(sequence, plan, self._shared.targets_size), 1
        while draft.take(draft.row(self._shared.translated(logits))):
            own = self._shared.own_of[draft.tokens[-1]]
            if own in self._specials:  # a turn ends here, or begins
                break
            logits = self.model.forward([own], num_logits=1)[0]
            num_steps += 1
            if not self._can_say(logits, sequence.sampling):
                break
        proposal = draft.proposal()
        self._learn_peaks(proposal.confidences or ())
        return replace(proposal, num_steps=num_steps) if proposal.tokens else proposal

    def _re_encoded(self, sequence: Sequence, plan: DraftPlan, logits: torch.Tensor) -> Proposal:
        """Tell the draft's most likely text in the target's tokens."""
        text, asked = self._text, _Asked(plan)
        retokeniser = Retokeniser(self._targets, self._targets_table, text.tail, text.pending)
        drafted, end = list[int](), list[TargetToken]()
        for _ in range(min(self._room, STEPS_A_TOKEN * plan.num_draft_tokens)):
            if drafted:
                logits = self.model.forward(drafted[-1:], num_logits=1)[0]
            confidence, token = self._best(logits, sequence.sampling, drafted)
            piece = self._table[token] if token < len(self._table) else None
            drafted.append(token)
            if token in self._specials and not math.isnan(confidence):
                end = [TargetToken(self._specials[token], 0, confidence)]
                break
            # A damaged draft, a token that only it knows, or one that the target has ruled out.
            if math.isnan(confidence) or piece is None or not retokeniser.add(piece, confidence):
                break
            if asked.is_answered(retokeniser.whole()):
                break
        return _proposal(asked, retokeniser, end, len(drafted))

    def _best(
        self, logits: torch.Tensor, sampling: SamplingParams, drafted: list[int]
    ) -> tuple[float, int]:
        """The draft's favourite and its chance under the request's sampling."""
        if sampling.temperature == 0.0:
            sampling = SamplingParams(1.0, repetition_penalty=sampling.repetition_penalty)
        is_penalised = sampling.repetition_penalty != 1.0
        history = [*self._text.ids, *drafted] if is_penalised else []
        (confidence,), (token,) = peaks(distributions(logits[None], sampling, [history]))
        if not math.isnan(confidence):
            self._learn_peaks((confidence,))
        return confidence, token

    def _learn_peaks(self, confidences: Iterable[float]) -> None:
        for confidence in confidences:
            self._peak += PEAK_RATE * (confidence - self._peak)


class _Asked:
    """How many whole tokens are wanted, and which of them the stop rule has seen."""

    def __init__(self, plan: DraftPlan) -> None:
        self.most = plan.num_draft_tokens
        self._plan = plan
        self._num_seen = 0

    def is_answered(self, whole: list[TargetToken]) -> bool:
        """Whether these are enough. The rule is asked once about each, in order."""
        while self._num_seen < min(len(whole), self.most):
            index = self._num_seen
            self._num_seen += 1
            keep_drafting = self._plan.keep_drafting
            goes_on = keep_drafting is None or keep_drafting(index, whole[index].confidence)
            if self._num_seen == self.most or not goes_on:
                self.most = self._num_seen
                return True
        return False


def _proposal(
    asked: _Asked, retokeniser: Retokeniser, end: list[TargetToken], num_steps: int
) -> Proposal:
    """What was told whole; where nothing was, or text ended, all of it: nothing was drawn, and a
    guess more costs a row of the target's forward."""
    whole = [] if end else retokeniser.whole()
    told = (whole or [*retokeniser.told(), *end])[: asked.most]
    tokens = tuple(each.token for each in told)
    found = chain(tokens, None, tuple(each.confidence for each in told))
    return replace(found, num_steps=num_steps) if tokens else found
