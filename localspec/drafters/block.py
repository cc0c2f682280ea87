"""A block drafter guesses several tokens in one forward: DFlash, DFlash2 and DSpark.

Its tokens are chosen one after the other from the rows of the block, each with the noise of its
place. A block costs one step whatever is drafted of it, so a longer draft costs only what the
target takes to check it.

Not here: the forward and its layouts (forward.heads.block).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from localspec.core.decoding import DraftPlan, Proposal, Sequence
from localspec.drafters.drafting import Drafting
from localspec.drafters.head_drafter import ChainDrafter
from localspec.drafters.parts import Parts
from localspec.forward.heads.block import BlockHead, BlockParts
from localspec.forward.heads.block_files import read_block
from localspec.forward.heads.block_layout import KIND
from localspec.forward.model import LanguageModel


class BlockDrafter(ChainDrafter):
    """Drafts with a block drafter on the hidden states of `target`."""

    name = KIND

    def __init__(
        self, target: LanguageModel, parts: BlockParts, reads_once: bool | None = None
    ) -> None:
        self._block = BlockHead(parts, target.cache.shape.capacity)
        super().__init__(target, self._block, reads_once)
        self.block_length = self._block.num_drafts

    @classmethod
    def build(cls, parts: Parts) -> BlockDrafter:
        folder = parts.head(cls.name, "block drafter")
        return cls(parts.target, parts.once(cls.name, lambda: read_block(folder, parts.target)))

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        proposal = super().propose(sequence, plan.shortened(self._block.num_drafts))
        return replace(proposal, num_steps=1) if proposal.tokens else proposal

    def num_unread(self, draft: Drafting) -> int:
        """All of them: they are there once the block has run."""
        return draft.plan.num_draft_tokens - len(draft.tokens)

    def stated(self) -> torch.Tensor | None:
        """See ChainDrafter."""
        return self._block.confidence()
