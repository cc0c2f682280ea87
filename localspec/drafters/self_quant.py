"""The target drafts for itself, quantised, in its own KV cache.

Contract: a copy of the target with 4-bit or int8 layers drafts token by token from where the
target's cache stands, so it needs no prefill, no catching up and no second cache. It writes
slots after `sequence.tokens[:-1]` and leaves them there: the engine's rollback before
verification erases them, and verification writes each slot anew with the target's own keys and
values. Sampling and confidence are those of `draft_model.autoregress`. Holds the quantised
weights only.

Pays where the quantised step is really cheaper than the target's: the controller measures that.

Source: self-speculative drafting on a shared cache as in QuantSpec (arXiv 2502.10424), without
its quantised cache.
"""

from __future__ import annotations

from localspec.core import DraftPlan, Proposal, Sequence
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.draft_model import autoregress, captures_of, chunks_of
from localspec.drafters.parts import DrafterBase, Parts
from localspec.forward.graphs import Capturing
from localspec.forward.model import LanguageModel
from localspec.forward.quantise import Kind, cheapest_format, quantised_twin


class SelfQuantDrafter(DrafterBase):
    """Drafts with `model`, whose cache is the target's own."""

    name = "self_quant"
    shapes_itself = False

    def __init__(
        self, model: LanguageModel, weight_bytes: int, chunks: ChunkedDraft | None = None
    ) -> None:
        self.model = model
        self.chunks = chunks
        self._weight_bytes = weight_bytes

    @classmethod
    def build(cls, parts: Parts) -> SelfQuantDrafter:
        """Quantise by whichever format is cheaper here. Raises ModelError, MemoryShortage."""
        made = cls.of(parts.target, cheapest_format(parts.target).kind)
        return cls(made.model, made.memory_bytes, chunks_of(made.model, parts))

    @classmethod
    def of(cls, target: LanguageModel, kind: Kind) -> SelfQuantDrafter:
        """Quantise a copy of the target now. Raises ModelError where that cannot be done."""
        twin = quantised_twin(target, kind)
        return cls(twin.model, twin.weight_bytes)

    @property
    def memory_bytes(self) -> int:
        return self._weight_bytes + (0 if self.chunks is None else self.chunks.buffer_bytes)

    @property
    def captures(self) -> tuple[Capturing, ...]:
        return captures_of(self.model, self.chunks)

    def signal(self, sequence: Sequence) -> str | None:
        return "model" if self._room(sequence) > 0 else None

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        held = self.model.cache.length
        assert held == len(sequence.tokens) - 1, "the shared cache must stand at the root"
        shortened = plan.shortened(max(0, self._room(sequence)))
        captured = None if self.chunks is None else self.chunks.propose(sequence, shortened)
        if captured is not None:
            return captured
        return autoregress(self.model, sequence, shortened, self.model.vocab_size)

    def _room(self, sequence: Sequence) -> int:
        return self.model.cache.shape.capacity - len(sequence.tokens)
