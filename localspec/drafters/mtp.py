"""A multi-token-prediction module drafts token by token from the target's last state.

Contract: the module's cache holds one row for each pair of neighbouring tokens, made of the
target's state of the first and the embedding of the second. Rows that a draft made of the module's
own states are erased when the draft is done, also where its tokens are accepted: the target's
states replace them. Where the host would wait for each token it reads them when all are made, under
a stop rule a few at a time. How a token is taken and when the draft ends is `drafting.Drafting`'s.

Not here: how the module follows the text (head_drafter).
Source: multi-token prediction for drafting, DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

import torch

from localspec.core.decoding import DraftPlan, Proposal, Sequence
from localspec.drafters.drafting import HEAD_SHARE, Drafting, Unread
from localspec.drafters.head_drafter import HeadDrafter
from localspec.drafters.parts import Parts
from localspec.forward.heads.mtp import read_mtp


class MtpDrafter(HeadDrafter):
    name = "mtp"
    shapes_itself = False

    @classmethod
    def build(cls, parts: Parts) -> MtpDrafter:
        folder = parts.head(cls.name, "multi-token-prediction module")
        return cls(parts.target, parts.once(cls.name, lambda: read_mtp(folder, parts.target)))

    @torch.inference_mode()
    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        draft = Drafting(sequence, plan, self._target.vocab_size, HEAD_SHARE)
        if draft.is_full or self.signal(sequence) is None:
            return Proposal()
        state = self._head.start(sequence.tokens, self._features)  # [1, d]
        try:
            if self._reads_once and sequence.grammar is None:
                self._draft_unread(draft, state)
                return draft.proposal()
            while draft.take(draft.row(self._head.logits(state)[0])):
                state = self._head.extend(draft.tokens[-1], state)
        finally:
            self._head.forget(len(sequence.tokens) - 1)
        return draft.proposal()

    def _draft_unread(self, draft: Drafting, state: torch.Tensor) -> None:
        """Draft until the draft ends, with tokens that the host reads later."""
        size, device = self._target.vocab_size, self._target.device
        unread = Unread(draft.sequence, size, device, HEAD_SHARE)
        same = torch.zeros(1, dtype=torch.int64, device=device)
        token: torch.Tensor | None = None
        goes_on = True
        while goes_on:
            made = list[torch.Tensor]()
            for depth in range(len(draft.tokens), len(draft.tokens) + draft.num_unread):
                if token is not None:
                    unread.follow(token, same)
                    state = self._head.extend(token, state)
                confidence, token = unread.chances(self._head.logits(state), depth).max(dim=-1)
                made.append(torch.stack((token.to(confidence.dtype), confidence)))
            goes_on = draft.take_all(*torch.cat(made, dim=-1).tolist())
