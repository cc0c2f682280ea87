"""A smaller model of the same family drafts, token by token, in a cache of its own.

Contract: catches up with the sequence by its cache's longest common prefix, then drafts one token
after the other, in chunks on a device that captures. Of a text that is longer than its cache it
reads the first tokens and the latest (draft_window).

Not here: taking a token from its row (drafting).
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Several
from typing import Self

import torch

from localspec.core.decoding import DraftPlan, Proposal, Sequence
from localspec.core.draft_window import num_read, read_part
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.drafting import (
    Drafting,
    DraftSteps,
    autoregress,
    catch_up,
    draft_on,
    room_of,
)
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.review import teacher_forced
from localspec.engine.batch import Stepwise
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import CapturedDecoder, Capturing
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import OutputHead
from localspec.forward.passes import Pass


class DraftModelDrafter(Stepwise, DrafterBase):
    """Drafts with `model`, whose token ids are the target's. chunks: its captured draft loop.
    share: of the noise (drafting)."""

    name = "draft_model"
    shapes_itself = False
    share = 1.0

    def __init__(
        self, model: LanguageModel, target_vocab_size: int, chunks: ChunkedDraft | None = None
    ) -> None:
        self.model = model
        self.target_vocab_size = target_vocab_size
        self.chunks = chunks

    @classmethod
    def build(cls, parts: Parts) -> Self:
        model = parts.loaded_draft()
        return cls(model, parts.target.vocab_size, parts.draft_chunks)

    @property
    def output(self) -> OutputHead | None:
        return self.model.weights.output if isinstance(self.model, Decoder) else None

    @property
    def caches(self) -> tuple[KVCache, ...]:
        return (self.model.cache,)

    def num_kept(self, tokens: list[int]) -> int:
        """Return how many tokens of a text it need not read."""
        cache = self.model.cache
        part = read_part(tokens, cache.shape.capacity)
        num_kept = 0 if cache.prefixes is None else cache.prefixes.num_kept(cache, part)
        return len(tokens) - len(part) + num_kept

    @property
    def memory_bytes(self) -> int:
        held = 0 if self.chunks is None else self.chunks.buffer_bytes
        return held + self.model.weight_bytes + self.model.cache.kv_bytes

    @property
    def captures(self) -> tuple[Capturing, ...]:
        """The draft loop first: it saves more than the single step."""
        step = (self.model,) if isinstance(self.model, CapturedDecoder) else ()
        return step if self.chunks is None else (self.chunks, *step)

    def signal(self, sequence: Sequence) -> str | None:
        return "model" if self.room_after(sequence) else None

    def room_after(self, sequence: Sequence) -> int:
        """Return how many tokens may be drafted after the sequence."""
        capacity = self.model.cache.shape.capacity
        return room_of(self.model, num_read(len(sequence.tokens), capacity))

    def text_of(self, sequence: Sequence) -> Several[int]:
        """Return what the model reads of the sequence."""
        return read_part(sequence.tokens, self.model.cache.shape.capacity)

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        plan, text = plan.shortened(self.room_after(sequence)), self.text_of(sequence)
        draft = Drafting(sequence, plan, self.target_vocab_size, self.share, text)
        if draft.is_full:
            return Proposal()
        yield from catch_up(self.model, text)
        if self.chunks is None or not self.chunks.serves(draft):
            return (yield from autoregress(self.model, draft))
        self.chunks.draft_on(draft)
        return draft.proposal()

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight."""
        return teacher_forced(self, self.model, sequence, self.target_vocab_size, self.share)

    def go_on(self, draft: Drafting, logits: torch.Tensor) -> Generator[Pass, torch.Tensor]:
        """Draft until the draft ends. logits: [V_draft], those after all that the cache holds."""
        if self.chunks is None or not self.chunks.serves(draft):
            yield from draft_on(self.model, draft, logits)
            return
        self.model.cache.rollback(self.model.cache.length - 1)  # a chunk reads the last token
        self.chunks.draft_on(draft)
