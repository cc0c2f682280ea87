"""What the drafters share that draft with a head on the target's hidden states.

A head follows the text by the states that the target left beside its cache, or by the target's own
keys and values. So rejection, edit and the next turn need nothing more.

`ChainDrafter` is a drafter whose head gives one token after the other. Where the host would wait
for each token it reads them when all are made, under a stop rule a few at a time. How a token is
taken and when the draft ends is `drafting.Drafting`'s.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Tokens
from typing import Generic, Protocol, TypeVar

import torch

from localspec.core.decoding import DraftPlan, Proposal, Sequence
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.drafting import HEAD_SHARE, Drafting, DraftSteps, Unread
from localspec.drafters.parts import DrafterBase
from localspec.drafters.review import itself
from localspec.engine.batch import Stepwise
from localspec.forward.features import Features
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import OutputHead
from localspec.forward.passes import Pass


class DraftingHead(Protocol):
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


class HeadDrafter(Stepwise, DrafterBase, Generic[Head]):
    """Drafts with a head on the hidden states of `target`. reads_once: whether the host reads a
    draft when it is whole, None for where each read would be a wait."""

    def __init__(self, target: LanguageModel, head: Head, reads_once: bool | None = None) -> None:
        self._reads_once = target.device.type != "cpu" if reads_once is None else reads_once
        self._target = target
        self._head = head
        self._features = target.follow(head.layers, head.reads_last_row)

    @property
    def output(self) -> OutputHead | None:
        return self._head.output

    @property
    def memory_bytes(self) -> int:
        return self._head.memory_bytes + self._features_bytes

    @property
    def beside_bytes(self) -> int:
        return self._head.kv_bytes + self._features_bytes

    @property
    def _features_bytes(self) -> int:
        return sum(self._features.slots(layer).nbytes for layer in self._head.layers)

    def signal(self, sequence: Sequence) -> str | None:
        return "head" if len(sequence.tokens) > 1 else None  # the first pair is of two tokens


class ChainDrafter(HeadDrafter[DraftingHead]):
    """Drafts chains with a head."""

    name: str
    shapes_itself = False

    def num_unread(self, draft: Drafting) -> int:
        """Return how many tokens to make before the host reads them."""
        return draft.num_unread

    def stated(self) -> torch.Tensor | None:
        """Return the head's own chance of the newest token, [1] fp32; None where it is the height
        of the token's chance among all."""
        return None

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. The target's states of the reply are still held."""
        return itself(self)

    @torch.inference_mode()
    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        draft = Drafting(sequence, plan, self._target.vocab_size, HEAD_SHARE)
        if draft.is_full or self.signal(sequence) is None:
            return Proposal()
        try:
            state = yield self._head.start(sequence.tokens, self._features)  # [1, d]
            if self._reads_once and sequence.grammar is None:
                yield from self._draft_unread(draft, state)
                return draft.proposal()
            (logits,) = yield self._head.logits(state)
            while draft.take(draft.row(logits), self.stated()):
                state = yield self._head.extend(draft.tokens[-1], state)
                (logits,) = yield self._head.logits(state)
        finally:
            self._head.forget(len(sequence.tokens) - 1)
        return draft.proposal()

    @torch.inference_mode()
    def _draft_unread(
        self, draft: Drafting, state: torch.Tensor
    ) -> Generator[Pass, torch.Tensor, None]:
        """Draft until the draft ends, with tokens that the host reads later."""
        size, device = self._target.vocab_size, self._target.device
        unread = Unread(draft.sequence, size, device, HEAD_SHARE)
        same = torch.zeros(1, dtype=torch.int64, device=device)
        token: torch.Tensor | None = None
        goes_on = True
        while goes_on:
            made = list[torch.Tensor]()
            for depth in range(len(draft.tokens), len(draft.tokens) + self.num_unread(draft)):
                if token is not None:
                    unread.follow(token, same)
                    state = yield self._head.extend(token, state)
                logits = yield self._head.logits(state)
                peak, token = unread.chances(logits, depth).max(dim=-1)
                stated = self.stated()
                # A damaged draft ends where its chances are no numbers, whatever it states.
                confidence = peak if stated is None else torch.where(peak.isnan(), peak, stated)
                made.append(torch.stack((token.to(confidence.dtype), confidence)))
            goes_on = draft.take_all(*torch.cat(made, dim=-1).tolist())
