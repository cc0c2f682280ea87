"""A draft model of another family, with other tokens, drafts for the target.

Contract: the draft reads the target's text in its own vocabulary (`DraftText`) and drafts in one of
two ways, both exact.

Re-encoded: the draft's most likely tokens, as text, become the target's tokens (`Retokeniser`).
Translated: tokens are chosen from the draft's rows, restricted to the tokens that both have
(`SharedTokens`), with the turn's noise. A row with less than ENOUGH_SHARED of its mass on shared
tokens ends the draft.

Greedy drafts are re-encoded. When sampling, a translated token is accepted about as often as the
target's next token is one token of the draft; a re-encoded token about as often as the draft's
peaks are high. The way with the larger estimate is taken. Both estimates come from the text before
the round and begin anew with each turn.

Why both: two draft tokens a round of the demo target's foreign draft, replies of 48 tokens to 16
prompts of Spec-Bench, gave 1.51 tokens a round translated and 1.51 re-encoded at T = 0, 1.68 and
1.59 at 0.7, 1.53 and 1.29 at 1. In the text of prompts 88 to 91 % of that target's tokens are one
token of the draft; of GPT-2's, Llama 2's, Qwen 1.5's and SmolLM's 51 to 95 % are one token of
another of them, and the others can be guessed re-encoded only.

Not here: the bytes of tokens, what two vocabularies share (vocabularies).
Source: universal assisted generation (transformers since 4.46) and token-level intersection
(arXiv 2502.05202).
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from localspec.core.decoding import DraftPlan, Proposal, SamplingParams, Sequence, chain
from localspec.core.draft_window import num_read, read_part
from localspec.core.errors import ModelError
from localspec.drafters.drafting import Drafting, DraftSteps, catch_up
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.vocabularies import (
    Foreign,
    SharedTokens,
    Table,
    Vocabulary,
    complete_text,
    last_seam,
    last_word,
    starts_of,
)
from localspec.engine.batch import Stepwise
from localspec.engine.sampling import distributions, peaks
from localspec.forward.cache import KVCache
from localspec.forward.passes import Rows

RE_ENCODED, TRANSLATED = "re-encoded", "translated"
ENOUGH_SHARED = 0.5
STEPS_A_TOKEN = 3  # of the draft for one token of the target, at most
FIRST_PEAK, PEAK_RATE = 0.5, 0.05  # height of the peaks before any was seen, and the learning rate
REMEMBERED = 512  # tokens of the target after which the counts of older ones are halved
LONG_WORD = 24  # bytes after which a word's tokens count as whole, all but the last


class CrossTokenizerDrafter(Stepwise, DrafterBase):
    """Drafts with `model`, whose tokens are not the target's."""

    name = "cross_tokenizer"
    shapes_itself = False

    def __init__(self, parts: Foreign, target_vocab_size: int) -> None:
        self.model = parts.model
        self._targets = parts.targets
        self._table = parts.own.token_bytes
        self._targets_table = parts.targets.token_bytes[:target_vocab_size]
        self._shared = SharedTokens.between(
            parts.own, parts.model.vocab_size, parts.targets, target_vocab_size, parts.model.device
        )
        specials = self._shared.specials  # the target's id -> the draft's
        self._specials = {own: target for target, own in specials.items()}
        self._text = DraftText(parts.own, self._targets_table, specials)
        self._peak = FIRST_PEAK
        self._last_signal: str | None = None

    @classmethod
    def build(cls, parts: Parts) -> CrossTokenizerDrafter:
        if parts.foreign is None:
            raise ModelError(parts.foreign_refusal)
        return cls(parts.foreign, parts.target.vocab_size)

    @property
    def caches(self) -> tuple[KVCache, ...]:
        return (self.model.cache,)

    @property
    def memory_bytes(self) -> int:
        return self.model.weight_bytes + self.model.cache.kv_bytes + self._shared.held_bytes

    def signal(self, sequence: Sequence) -> str | None:
        """Which way the draft would go: acceptance is learnt apart for each. Until the first draft
        of a turn it is the way of the turn before: reading the text takes time, so that is left to
        rounds that draft."""
        if self._text.is_reading(sequence.tokens):
            self._last_signal = self._way(sequence)
            return self._last_signal
        may_translate = sequence.sampling.temperature > 0.0 and self._last_signal == TRANSLATED
        return TRANSLATED if may_translate else RE_ENCODED

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        if self._text.follow(sequence.tokens):
            self._peak = FIRST_PEAK
        way = self._way(sequence)
        if way is None or plan.num_draft_tokens == 0:
            return Proposal()
        text = read_part(self._text.ids, self.model.cache.shape.capacity)
        yield from catch_up(self.model, text)
        temperature = sequence.sampling.temperature
        pending = text[self.model.cache.length :]
        (logits,) = yield Rows(self.model, pending, num_logits=1)  # [V_draft]
        if way == TRANSLATED and self._shared.mass(logits, temperature) >= ENOUGH_SHARED:
            return (yield from self._translated(sequence, plan.shortened(self._room), logits))
        return (yield from self._re_encoded(sequence, plan, logits))

    @property
    def _room(self) -> int:
        capacity = self.model.cache.shape.capacity
        return capacity - num_read(len(self._text.ids), capacity)

    def _way(self, sequence: Sequence) -> str | None:
        if self._room <= 0 or not self._text.ids:
            return None
        return TRANSLATED if self._translates(sequence.sampling) else RE_ENCODED

    def _translates(self, sampling: SamplingParams) -> bool:
        if sampling.temperature == 0.0 or self._text.pending:
            return False
        return self._text.aligned_share > self._peak

    def _translated(self, sequence: Sequence, plan: DraftPlan, logits: torch.Tensor) -> DraftSteps:
        """Choose from the shared part of the draft's rows; `logits` are those of the first."""
        draft, num_steps = Drafting(sequence, plan, self._shared.targets_size), 1
        while draft.take(draft.row(self._shared.translated(logits))):
            own = self._shared.own_of[draft.tokens[-1]]
            if own in self._specials:  # a turn ends here, or begins
                break
            (logits,) = yield Rows(self.model, [own], num_logits=1)
            num_steps += 1
            if self._shared.mass(logits, sequence.sampling.temperature) < ENOUGH_SHARED:
                break
        proposal = draft.proposal()
        self._learn_peaks(proposal.confidences or ())
        return replace(proposal, num_steps=num_steps)

    def _re_encoded(self, sequence: Sequence, plan: DraftPlan, logits: torch.Tensor) -> DraftSteps:
        """The draft's most likely text in the target's tokens; `logits` are those of the first."""
        text, draft = self._text, Drafting(sequence, plan, self._shared.targets_size)
        retokeniser = Retokeniser(self._targets, self._targets_table, text.tail, text.pending)
        drafted, special = list[int](), list[TargetToken]()
        for _ in range(min(self._room, STEPS_A_TOKEN * plan.num_draft_tokens)):
            if drafted:
                (logits,) = yield Rows(self.model, drafted[-1:], num_logits=1)
            confidence, token = self._likeliest(logits, sequence.sampling, drafted)
            piece = self._table[token] if token < len(self._table) else None
            drafted.append(token)
            if token in self._specials and not math.isnan(confidence):
                special = [TargetToken(self._specials[token], 0, confidence)]
                break
            # A damaged draft, a token that only the draft has, or one that the target ruled out.
            if math.isnan(confidence) or piece is None or not retokeniser.add(piece, confidence):
                break
            new = retokeniser.whole()[len(draft.tokens) :]
            if not draft.take_all([one.token for one in new], [one.confidence for one in new]):
                break
        # Where no token is whole, or the text ended, all tokens are submitted.
        whole = [] if special else retokeniser.whole()[: len(draft.tokens)]
        found = (whole or [*retokeniser.encoded(), *special])[: plan.num_draft_tokens]
        confidences = tuple(each.confidence for each in found)
        made = chain(tuple(each.token for each in found), confidences)
        return replace(made, num_steps=len(drafted))

    def _likeliest(
        self, logits: torch.Tensor, sampling: SamplingParams, drafted: list[int]
    ) -> tuple[float, int]:
        """The draft's favourite and its chance under the request's sampling, at temperature 1 when
        greedy."""
        sampling = replace(sampling, temperature=sampling.temperature or 1.0)
        row = distributions(logits[None], sampling, [[*self._text.ids, *drafted]])  # [1, V_draft]
        (confidence,), (token,) = peaks(row)
        if not math.isnan(confidence):
            self._learn_peaks((confidence,))
        return confidence, token

    def _learn_peaks(self, confidences: Iterable[float]) -> None:
        for confidence in confidences:
            self._peak += PEAK_RATE * (confidence - self._peak)


class DraftText:
    """One sequence of the target in the draft's ids.

    A round encodes only the text since the last *seam* (vocabularies.last_seam), so it costs the
    same in a long conversation as in a short one. A special token of the target becomes the draft's
    of the same text ("<|im_start|>" in all ChatML models); any other is left out. Nothing is merged
    across it. Bytes that are not UTF-8 become U+FFFD; a character whose last bytes are missing
    waits in `pending`.

    own: the draft's vocabulary. targets_table: bytes of the target's ids. specials: the draft's
    special id for a special id of the target."""

    def __init__(self, own: Vocabulary, targets_table: Table, specials: Mapping[int, int]) -> None:
        self._own = own
        self._targets_table = targets_table
        self._specials = specials
        self._source: list[int] | None = None  # the list that is followed
        self._begin()

    def _begin(self) -> None:
        self.ids = list(self._own.opening)
        self._num_read = 0
        self._num_settled = len(self.ids)  # of ids: those before the last seam
        self._num_seen = self._num_aligned = 0.0  # tokens of the target
        self._decoder: codecs.IncrementalDecoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open("", [0])

    def _open(self, tail: str, ends: list[int]) -> None:
        self.tail = tail  # the text since the last seam
        self._ends = ends  # of the target's tokens in the tail, in bytes

    @property
    def pending(self) -> bytes:
        """The first bytes of a character that is not complete."""
        return self._decoder.getstate()[0]

    @property
    def aligned_share(self) -> float:
        """Share of the target's tokens in this text that are one token of the draft too; a half
        before any was read."""
        return (self._num_aligned + 1.0) / (self._num_seen + 2.0)

    def is_reading(self, tokens: list[int]) -> bool:
        """Whether `tokens` is the list that is followed; within a turn it only grows."""
        return tokens is self._source and len(tokens) >= self._num_read

    def follow(self, tokens: list[int]) -> bool:
        """Read what was added to `tokens` since the last call; all of it if it is another list.
        Returns whether it is."""
        is_another = not self.is_reading(tokens)
        if is_another:
            self._begin()
            self._source = tokens
        if len(tokens) == self._num_read:
            return is_another
        for token in tokens[self._num_read :]:
            piece = self._targets_table[token] if token < len(self._targets_table) else None
            if piece is None:
                self._close(self._specials.get(token))
            else:
                self._add(self._decoder.decode(piece))
        self._num_read = len(tokens)
        self._encode()
        return is_another

    def _add(self, text: str) -> None:
        self.tail += text
        self._ends.append(self._ends[-1] + len(text.encode()))

    def _close(self, special: int | None) -> None:
        """A special token of the target: settle what is before it."""
        unfinished = self._decoder.decode(b"", final=True)
        if unfinished:
            self._add(unfinished)
        self._encode()
        is_doubled = self.ids == self._own.opening and self.ids[-1:] == [special]
        if special is not None and not is_doubled:
            self.ids.append(special)
        self._num_settled = len(self.ids)
        self._open("", [0])

    def _encode(self) -> None:
        """Encode the tail and settle what is before its last seam."""
        self.ids[self._num_settled :] = self._own.encode(self.tail) if self.tail else []
        raw = self.tail.encode()
        starts = starts_of(self.ids[self._num_settled :], self._own.token_bytes)
        if starts is None or starts[-1] != len(raw):  # the draft's tokens are not this very text
            self._num_settled = len(self.ids)
            self._open("", [0])
            return
        seam = last_seam(raw, starts)
        if seam:
            self._count_aligned(starts[: seam + 1])
        self._num_settled += seam
        place = starts[seam]
        self._open(raw[place:].decode(), [end - place for end in self._ends if end >= place])

    def _count_aligned(self, starts: list[int]) -> None:
        """Count the target's tokens that are one token of the draft; starts: of those of the draft
        that are settled now."""
        ends = [end for end in self._ends if end <= starts[-1]]
        targets = {(begin, end) for begin, end in pairwise(ends) if end > begin}
        if self._num_seen > REMEMBERED:
            self._num_seen, self._num_aligned = self._num_seen / 2.0, self._num_aligned / 2.0
        self._num_seen += len(targets)
        self._num_aligned += len(targets & set(pairwise(starts)))


@dataclass(frozen=True)
class TargetToken:
    """A token of the target. end: in bytes from where the draft began. confidence: the draft's,
    of all its tokens that begin in this one."""

    token: int
    end: int
    confidence: float


class Retokeniser:
    """The bytes that the draft wrote as tokens of the target.

    The target's earlier tokens stand, so only tokens that begin where those end count. Where none
    does (the target itself cut a word in two), the new text is encoded by itself. A token is
    *whole* when more text is not likely to change it: its word is followed by another, or the draft
    wrote that word in one token so far. After " w" and "or" nothing is whole, as "ld" may come.
    After " w" alone it is: to ask the draft whether the word goes on would cost a step each round,
    and only the last token of a draft can be wrong by it.

    before: the text since a seam, which the target has written. pending: the first bytes of a
    character that the target began; what is drafted must begin with them."""

    def __init__(self, targets: Vocabulary, table: Table, before: str, pending: bytes) -> None:
        self._targets = targets
        self._table = table
        self._before = before.encode()
        self._pending = pending
        self._drafted = b""
        self._starts = list[int]()
        self._confidences = list[float]()

    def add(self, piece: bytes, confidence: float) -> bool:
        """Add a token of the draft; False where it contradicts the pending bytes."""
        self._starts.append(len(self._drafted))
        self._confidences.append(confidence)
        self._drafted += piece
        length = min(len(self._pending), len(self._drafted))
        return self._drafted[:length] == self._pending[:length]

    def encoded(self) -> list[TargetToken]:
        """All tokens of what was drafted; the last may go on."""
        known = len(self._before) + len(self._pending)
        ids, starts = self._encode(self._before + self._drafted)
        if known not in starts:
            if self._pending:  # half a character cannot be encoded by itself
                return []
            ids, starts = self._encode(self._drafted)
            known = 0
        first = starts.index(known)
        ends = [start - known + len(self._pending) for start in starts[first + 1 :]]
        begins = [0, *ends][: len(ends)]
        found = zip(ids[first:], begins, ends, strict=True)
        return [TargetToken(token, end, self._chance(begin, end)) for token, begin, end in found]

    def whole(self) -> list[TargetToken]:
        """The tokens that more text is not likely to change."""
        tokens = self.encoded()
        if not tokens:
            return []
        word = last_word(complete_text(self._drafted))
        if self._starts[-1] <= word and tokens[-1].end == len(self._drafted):
            return tokens
        if tokens[-1].end - word > LONG_WORD:
            return tokens[:-1]
        return [each for each in tokens if each.end <= word]

    def _encode(self, raw: bytes) -> tuple[list[int], list[int]]:
        """Ids of the complete characters of `raw`, and where they begin; none if the target's
        tokens are not this very text."""
        text = complete_text(raw)
        ids = self._targets.encode(text) if text else []
        starts = starts_of(ids, self._table)
        return (ids, starts) if starts and starts[-1] == len(text.encode()) else ([], [0])

    def _chance(self, begin: int, end: int) -> float:
        pairs = zip(self._starts, self._confidences, strict=True)
        return math.prod(chance for start, chance in pairs if begin <= start < end)
