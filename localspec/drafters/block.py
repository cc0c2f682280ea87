"""A block drafter guesses several tokens in one forward: DFlash, DFlash2 and DSpark.

Its tokens are chosen one after the other from the rows of the block, each with the noise of its
place. A block costs one step whatever is drafted of it, so a longer draft costs only what the
target takes to check it.

Not here: the forward and its layouts (forward.heads.block).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from localspec.core.decoding import DraftPlan, Sequence
from localspec.drafters.drafting import DraftSteps
from localspec.drafters.head_drafter import ChainDrafter, pool_for
from localspec.drafters.parts import Parts
from localspec.forward.graphs import GraphPool
from localspec.forward.heads.block import BlockHead
from localspec.forward.heads.block_files import read_block
from localspec.forward.heads.block_layout import KIND
from localspec.forward.heads.block_parts import BlockParts
from localspec.forward.model import LanguageModel


class BlockDrafter(ChainDrafter):
    """Drafts with a block drafter on the hidden states of `target`."""

    name = KIND

    def __init__(
        self,
        target: LanguageModel,
        parts: BlockParts,
        reads_once: bool | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        self._block = BlockHead(parts, target.cache.shape.capacity)
        super().__init__(target, self._block, reads_once, pool)
        self.block_length = self._block.num_drafts

    @classmethod
    def build(cls, parts: Parts) -> BlockDrafter:
        folder = parts.head(cls.name, "block drafter")
        block = parts.once(
            cls.name, lambda: read_block(folder, parts.target).narrowed(parts.vocabulary)
        )
        return cls(parts.target, block, pool=pool_for(parts, block.output))

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        proposal = yield from super().steps(sequence, plan.shortened(self._block.num_drafts))
        if not proposal.tokens:  # a damaged draft may have left what is no number
            self._block.cache.zero_beyond()
            return proposal
        return replace(proposal, num_steps=1)

    def stated(self) -> torch.Tensor | None:
        """See ChainDrafter."""
        return self._block.stated()
