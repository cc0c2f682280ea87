"""The target drafts for itself, quantised, in its own KV cache.

Contract: a copy of the target with 4-bit layers drafts as a draft model does, from where
the target's cache stands. So it needs no prefill, no catching up and no second cache, and holds the
quantised weights only. It writes slots after `sequence.tokens[:-1]` and leaves them there: the
engine's rollback before verification erases them, and verification writes each slot anew with the
target's own keys and values.

It pays where the quantised step is cheaper than the target's, which the controller measures.

Source: self-speculative drafting on a shared cache as in QuantSpec (arXiv 2502.10424), without
its quantised cache.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Self

from localspec.core.decoding import DraftPlan, Sequence
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.drafting import DraftSteps, room_of
from localspec.drafters.parts import Parts
from localspec.forward.decoder import Decoder
from localspec.forward.model import LanguageModel
from localspec.forward.quantise import quantised_twin


class SelfQuantDrafter(DraftModelDrafter):
    """Drafts with `model`, whose cache is the target's own."""

    name = "self_quant"

    def __init__(
        self, model: LanguageModel, weight_bytes: int, chunks: ChunkedDraft | None = None
    ) -> None:
        super().__init__(model, model.vocab_size, chunks)
        self._weight_bytes = weight_bytes

    @classmethod
    def build(cls, parts: Parts) -> Self:
        """Quantise a copy now. Raises ModelError where that cannot be done, MemoryShortage."""
        twin = parts.once(cls.name, lambda: quantised_twin(parts.target))
        model = twin.model
        if isinstance(model, Decoder):  # one copy, over each sequence's own cache
            assert isinstance(parts.target, Decoder)
            model = Decoder(
                model.weights, parts.target.cache, model.is_fastest, reader=parts.target
            )
        return cls(model, twin.weight_bytes, parts.chunks(model))

    @property
    def memory_bytes(self) -> int:
        return self._weight_bytes + (0 if self.chunks is None else self.chunks.buffer_bytes)

    def room_after(self, sequence: Sequence) -> int:
        """See DraftModelDrafter."""
        return room_of(self.model, len(sequence.tokens))

    def text_of(self, sequence: Sequence) -> Several[int]:
        """Return the whole sequence, which the target's cache holds."""
        return sequence.tokens

    def review(self, sequence: Sequence) -> None:
        """It drafts in the target's cache, which must keep what the target wrote there."""

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        held = self.model.cache.length
        assert held == len(sequence.tokens) - 1, "the shared cache must stand at the root"
        return (yield from super().steps(sequence, plan))
