"""A smaller model of the same family drafts, token by token, in a cache of its own.

Contract: catches up with the sequence by its cache's longest common prefix, then drafts one token
after the other; how each is taken and when the draft ends is Drafting's. Drafts nothing beyond the
context that the model knows.

Source: speculative sampling, arXiv 2211.17192 and 2302.01318.
"""

from __future__ import annotations

import torch

from localspec.core import DraftPlan, Proposal, Sequence
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.drafting import Drafting
from localspec.drafters.parts import DrafterBase, Parts
from localspec.errors import ModelError
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import CapturedDecoder, Capturing
from localspec.forward.model import LanguageModel, prefill


class DraftModelDrafter(DrafterBase):
    """Drafts with `model`, whose token ids are the target's."""

    name = "draft_model"
    shapes_itself = False

    def __init__(
        self,
        model: LanguageModel,
        target_vocab_size: int,
        chunks: ChunkedDraft | None = None,
    ) -> None:
        self.model = model
        self.chunks = chunks
        self.target_vocab_size = target_vocab_size

    @classmethod
    def build(cls, parts: Parts) -> DraftModelDrafter:
        if parts.draft is None:
            raise ModelError(parts.draft_refusal)
        return cls(parts.draft, parts.target.vocab_size, chunks_of(parts.draft, parts))

    @property
    def memory_bytes(self) -> int:
        held = 0 if self.chunks is None else self.chunks.buffer_bytes
        return held + self.model.weight_bytes + self.model.cache.kv_bytes

    @property
    def captures(self) -> tuple[Capturing, ...]:
        return captures_of(self.model, self.chunks)

    def signal(self, sequence: Sequence) -> str | None:
        room = self.model.cache.shape.capacity - len(sequence.tokens)
        return "model" if room > 0 else None

    def prepare(self, sequence: Sequence) -> None:
        if self.signal(sequence) is not None:
            self.catch_up(sequence)

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        room = self.model.cache.shape.capacity - len(sequence.tokens)
        if room <= 0:  # a draft may know a shorter context than its target
            return Proposal()
        self.catch_up(sequence)
        plan = plan.shortened(room)
        captured = None if self.chunks is None else self.chunks.propose(sequence, plan)
        if captured is not None:
            return captured
        return autoregress(self.model, sequence, plan, self.target_vocab_size)

    def catch_up(self, sequence: Sequence) -> None:
        """See the function."""
        catch_up(self.model, sequence)


def catch_up(model: LanguageModel, sequence: Sequence) -> None:
    """Hold all tokens but the last few, which the first draft step takes along."""
    wanted = sequence.tokens[:-1]
    missing = wanted[model.cache.reuse(wanted) :]
    if len(missing) > 8:
        prefill(model, missing)


def chunks_of(model: LanguageModel, parts: Parts) -> ChunkedDraft | None:
    """The model's captured draft loop; None where nothing is captured."""
    if parts.pool is None or not isinstance(model, Decoder):
        return None
    return ChunkedDraft(model, parts.target.vocab_size, parts.pool)


def captures_of(model: LanguageModel, chunks: ChunkedDraft | None) -> tuple[Capturing, ...]:
    """The draft loop first: it spares more than the single step."""
    step = (model,) if isinstance(model, CapturedDecoder) else ()
    return step if chunks is None else (chunks, *step)


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
    """Token by token from `logits` [V_draft], those after all that the model's cache holds."""
    while not draft.is_full and draft.take(draft.row(logits)):
        logits = model.forward(draft.tokens[-1:], num_logits=1)[0]
