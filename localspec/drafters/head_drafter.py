"""What the drafters share that draft with a head on the target's hidden states.

A head follows the text by the states that the target left beside its cache, or by the target's own
keys and values. So rejection, edit and the next turn need nothing more.

`ChainDrafter` is a drafter whose head gives one token after the other. Where the host would wait
for each token it reads them when all are made, under a stop rule a few at a time. How a token is
taken and when the draft ends is `drafting.Drafting`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Tokens
from typing import Any, Generic, Protocol, TypeVar

import torch

from localspec.core.decoding import DraftPlan, Proposal, Sequence
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.drafting import HEAD_SHARE, Drafting, DraftSteps
from localspec.drafters.fixed import FixedDrafts
from localspec.drafters.head_chunks import HeadChunks
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.review import itself
from localspec.engine.batch import Stepwise
from localspec.forward.decoder import Decoder
from localspec.forward.features import Features
from localspec.forward.graphs import Capturing, GraphPool
from localspec.forward.heads.fixed import FixedHead
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import OutputHead
from localspec.forward.passes import Pass


class DraftingHead(FixedHead, Protocol):
    """A head over one text. What it is asked to run it returns as a pass, which the drafter yields.
    layers: whose hidden states of the target it reads. reads_last_row: whether it reads them of the
    last token alone. output: of its tokens, None where these are chosen anew for each row.
    kv_bytes: of a cache of its own."""

    reads_last_row: bool

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def output(self) -> OutputHead | None: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    def start(self, tokens: Tokens[int], features: Features) -> Pass:
        """Give the output that a draft after `tokens` starts from, [1, d]; the target has read all
        but the last of them."""
        ...

    def extend(self, token: int | torch.Tensor, rows: torch.Tensor) -> Pass:
        """Give the output after one more token, [1, d]. rows: the output before it. token: a tensor
        is [1]."""
        ...

    def logits(self, rows: torch.Tensor) -> Pass:
        """Give logits [n, V] fp32 of outputs [n, d]."""
        ...

    def forget(self, num_pairs: int) -> None:
        """Erase what was kept after so many pairs of tokens."""
        ...


Head = TypeVar("Head", bound=DraftingHead)
Fixed = TypeVar("Fixed", bound=FixedDrafts[Any, Any])


class HeadDrafter(Stepwise, DrafterBase, ABC, Generic[Head, Fixed]):
    """Drafts with a head on the hidden states of `target`. reads_once: whether the host reads a
    draft when it is whole, None for where each read would be a wait. pool: where such drafts are
    captured, None where nothing is."""

    def __init__(
        self,
        target: LanguageModel,
        head: Head,
        reads_once: bool | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        self._target = target
        self._head = head
        self._features = target.follow(head.layers, head.reads_last_row)
        is_waiting = target.device.type != "cpu" or pool is not None
        reads_once = is_waiting if reads_once is None else reads_once
        self._fixed = self._fixed_drafts(pool) if reads_once else None

    @abstractmethod
    def _fixed_drafts(self, pool: GraphPool | None) -> Fixed:
        """Return the drafts that are read when they are whole."""

    @property
    def captures(self) -> tuple[Capturing, ...]:
        return () if self._fixed is None else (self._fixed,)

    @property
    def output(self) -> OutputHead | None:
        return self._head.output

    @property
    def memory_bytes(self) -> int:
        return self._head.memory_bytes + self._own_bytes

    @property
    def beside_bytes(self) -> int:
        return self._head.kv_bytes + self._own_bytes

    @property
    def _own_bytes(self) -> int:
        buffers = 0 if self._fixed is None else self._fixed.buffer_bytes
        return self._features_bytes + buffers

    @property
    def _features_bytes(self) -> int:
        return sum(self._features.slots(layer).nbytes for layer in self._head.layers)

    def signal(self, sequence: Sequence) -> str | None:
        return "head" if len(sequence.tokens) > 1 else None  # the first pair is of two tokens


class ChainDrafter(HeadDrafter[DraftingHead, HeadChunks]):
    """Drafts chains with a head."""

    name: str
    shapes_itself = False

    def stated(self) -> torch.Tensor | None:
        """Return the head's own chance of the newest token, [1] fp32; None where it is the height
        of the token's chance among all."""
        return None

    def _fixed_drafts(self, pool: GraphPool | None) -> HeadChunks:
        target = self._target
        return HeadChunks(self._head, self._features, target.vocab_size, target.device, pool)

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. The target's states of the reply are still held."""
        return itself(self)

    @torch.inference_mode()
    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        draft = Drafting(sequence, plan, self._target.vocab_size, HEAD_SHARE)
        if draft.is_full or self.signal(sequence) is None:
            return Proposal()
        try:
            if self._fixed is not None and sequence.grammar is None:
                if (missing := self._head.missing(sequence.tokens, self._features)) is not None:
                    yield missing
                self._fixed.draft_on(draft)
                return draft.proposal()
            state = yield self._head.start(sequence.tokens, self._features)  # [1, d]
            (logits,) = yield self._head.logits(state)
            while draft.take(draft.row(logits), self.stated()):
                state = yield self._head.extend(draft.tokens[-1], state)
                (logits,) = yield self._head.logits(state)
        finally:
            self._head.forget(len(sequence.tokens) - 1)
        return draft.proposal()


def pool_for(parts: Parts, output: OutputHead | None, reads_host: bool = False) -> GraphPool | None:
    """Return where a head's drafts are captured; None where nothing is, or no graph can hold them.
    output: of the head. reads_host: whether its layers wait for the device."""
    reads_host = reads_host or (output is not None and output.layer.reads_host)
    return parts.pool if isinstance(parts.target, Decoder) and not reads_host else None
