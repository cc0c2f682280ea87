"""Lookup drafts, the draft model reads along, and drafts on where the lookup ends.

Contract: the text that followed the last tokens earlier is put through the draft model in one
forward. Its tokens stand while the model finds each about as likely as its own favourite; from
the first that it does not, the model drafts on by itself. So a copied stretch costs one draft
step instead of one a token, and its end costs no round. Copied tokens are deterministic, whatever
the temperature: where to leave them is decided by the model's rows before them alone. Each token
names the one of the two that it comes from.

Not here: finding the match (ngram), the model's own loop (draft_model).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from localspec.core import DraftPlan, Proposal, Sequence
from localspec.drafters.draft_model import DraftModelDrafter, draft_on
from localspec.drafters.drafting import Drafting
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.parts import DrafterBase, Parts

KEPT_SHARE = 0.5  # of the model's favourite: below it the copy is left


class ChainedDrafter(DrafterBase):
    """n-gram lookup continued by the draft model. Shares the model with `draft_model`."""

    name = "chained"
    shapes_itself = False

    def __init__(self, lookup: NgramDrafter, drafting: DraftModelDrafter) -> None:
        self._lookup = lookup
        self._drafting = drafting
        self.model = drafting.model

    @classmethod
    def build(cls, parts: Parts) -> ChainedDrafter:
        return cls(NgramDrafter.build(parts), DraftModelDrafter.build(parts))

    @property
    def memory_bytes(self) -> int:
        return self._drafting.memory_bytes

    def signal(self, sequence: Sequence) -> Hashable:
        """The lookup's; without a match the draft model alone does the same."""
        if self._drafting.signal(sequence) is None:
            return None
        return self._lookup.signal(sequence)

    def prepare(self, sequence: Sequence) -> None:
        self._lookup.prepare(sequence)
        self._drafting.prepare(sequence)

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        # A draft may know a shorter context than its target.
        room = max(0, self.model.cache.shape.capacity - len(sequence.tokens))
        guess = self._lookup.foresee(sequence)[: min(plan.num_draft_tokens, room)]
        if not guess:
            found = self._drafting.propose(sequence, plan)
            return replace(found, makers=(self._drafting.name,) * len(found.tokens))
        self._drafting.catch_up(sequence)
        draft = Drafting(sequence, plan.shortened(room), self._drafting.target_vocab_size)
        pending = sequence.tokens[self.model.cache.length :]
        logits = self.model.forward([*pending, *guess], num_logits=len(guess) + 1)  # [g + 1, V]
        goes_on, num_kept = self._copy(draft, guess, logits)
        num_copied = len(draft.tokens)
        self.model.cache.rollback(len(sequence.tokens) + num_kept)
        if goes_on:
            draft_on(self.model, draft, logits[num_kept])
        return self._told(draft.proposal(), num_copied)

    def _told(self, proposal: Proposal, num_copied: int) -> Proposal:
        """The proposal with the makers of its tokens, the lookup's first, and the model's steps:
        one for all that was copied, which also gives the first token behind it."""
        num_drafted = len(proposal.tokens) - num_copied
        makers = (self._lookup.name,) * num_copied + (self._drafting.name,) * num_drafted
        return replace(proposal, makers=makers, num_steps=max(1, num_drafted))

    def _copy(
        self, draft: Drafting, guess: tuple[int, ...], logits: torch.Tensor
    ) -> tuple[bool, int]:
        """Take of the guess what the model agrees with; whether to draft on, and how many."""
        for index, token in enumerate(guess):
            row = draft.row(logits[index])  # [V]
            chance, peak = torch.stack((row[token], row.max())).tolist()
            if not chance >= KEPT_SHARE * peak:  # also leaves a damaged model's rows
                return True, index
            if not draft.copy(token, chance):
                return False, index + 1
        return True, len(guess)
