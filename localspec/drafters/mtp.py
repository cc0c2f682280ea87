"""A multi-token-prediction module drafts token by token from the target's last state.

Contract: the module's cache holds one row for each pair of neighbouring tokens, made of the
target's state of the first and the embedding of the second. It catches up by the longest common
prefix with the sequence, so rejection, edit and the next turn need nothing more. Rows that a draft
made of the module's own states are erased when the draft is done, also where its tokens are
accepted: the target's states replace them. How a token is taken and when the draft ends is
`drafting.Drafting`'s.

Source: multi-token prediction for drafting, DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

import torch

from localspec.core import DraftPlan, Proposal, Sequence
from localspec.drafters.drafting import Drafting
from localspec.drafters.parts import DrafterBase, Parts
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.mtp import read_mtp
from localspec.forward.model import LanguageModel


class MtpDrafter(DrafterBase):
    """Drafts with `head` on the states of `target`."""

    name = "mtp"
    shapes_itself = False

    def __init__(self, head: AutoregressiveHead, target: LanguageModel) -> None:
        self._head = head
        self._target = target
        self._features = target.follow(head.layers)

    @classmethod
    def build(cls, parts: Parts) -> MtpDrafter:
        folder, target = parts.head(cls.name, "multi-token-prediction module"), parts.target
        capacity = target.cache.shape.capacity
        return cls(AutoregressiveHead(read_mtp(folder, target), capacity), target)

    @property
    def memory_bytes(self) -> int:
        slots = (self._features.slots(layer) for layer in self._head.layers)
        return self._head.memory_bytes + sum(each.nbytes for each in slots)

    def signal(self, sequence: Sequence) -> str | None:
        """None while there is no state before the root."""
        return "head" if len(sequence.tokens) > 1 else None

    def prepare(self, sequence: Sequence) -> None:
        held = sequence.tokens[: self._target.cache.length + 1]  # a cancelled prefill ends early
        self._head.catch_up(held, self._features)

    @torch.inference_mode()
    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        draft = Drafting(sequence, plan, self._target.vocab_size)
        if draft.is_full or self.signal(sequence) is None:
            return Proposal()
        state = self._head.start(sequence.tokens, self._features)  # [1, d]
        try:
            while draft.take(draft.row(self._head.logits(state)[0])):
                state = self._head.extend(draft.tokens[-1], state)
        finally:
            self._head.forget(len(sequence.tokens) - 1)
        return draft.proposal()
