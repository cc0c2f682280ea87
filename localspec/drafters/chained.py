"""Lookup drafts, the draft model checks the copy, and drafts on where the copy ends.

Contract: the text that followed the last tokens earlier is put through the draft model in one
forward. A copied token is kept while the model finds it at least KEPT_SHARE as likely as its own
favourite, or does not know it; from the first other token the model drafts on. So a copied stretch
costs one draft step instead of one a token, and its end costs no round. The proposal names the
drafter that each token comes from.

Not here: finding the match (ngram), the model's own loop (drafting).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from localspec.core.decoding import DraftPlan, Sequence
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.drafting import Drafting, DraftSteps, catch_up, fitted
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.review import itself
from localspec.engine.batch import Stepwise
from localspec.forward.output_head import OutputHead
from localspec.forward.passes import Rows
from localspec.forward.upload import indices

KEPT_SHARE = 0.5


class ChainedDrafter(Stepwise, DrafterBase):
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
    def output(self) -> OutputHead | None:
        return self._drafting.output

    @property
    def memory_bytes(self) -> int:
        return self._drafting.memory_bytes

    def signal(self, sequence: Sequence) -> Hashable:
        """The lookup's; without a match the draft model alone does the same."""
        if self._drafting.signal(sequence) is None:
            return None
        return self._lookup.signal(sequence)

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. The index of the reply stays as it is, so another one is made."""
        return itself(ChainedDrafter(self._lookup.beside(), self._drafting))

    def steps(self, sequence: Sequence, plan: DraftPlan) -> DraftSteps:
        drafting = self._drafting
        plan, text = plan.shortened(drafting.room_after(sequence)), drafting.text_of(sequence)
        copied = self._lookup.propose(sequence, plan).tokens
        if not copied:
            alone = yield from drafting.steps(sequence, plan)
            return replace(alone, makers=(drafting.name,) * len(alone.tokens))
        yield from catch_up(self.model, text)
        draft = Drafting(sequence, plan, drafting.target_vocab_size, text=text)
        pending = text[self.model.cache.length :]
        read = [*pending, *copied]
        logits = yield Rows(self.model, read, num_logits=len(copied) + 1)  # [g + 1, V]
        goes_on, num_agreed = _copy(draft, copied, logits)
        num_copied = len(draft.tokens)
        self.model.cache.rollback(len(text) + num_agreed)
        if goes_on:
            yield from drafting.go_on(draft, logits[num_agreed])
        num_drafted = len(draft.tokens) - num_copied
        makers = (self._lookup.name,) * num_copied + (drafting.name,) * num_drafted
        # The step that checked the copy also gives the first token behind it.
        return replace(draft.proposal(), makers=makers, num_steps=max(1, num_drafted))


def _copy(draft: Drafting, copied: tuple[int, ...], logits: torch.Tensor) -> tuple[bool, int]:
    """Add the copied tokens that the model agrees with; whether to draft on, and how many the
    model's cache keeps. logits: [g + 1, V]. One host copy."""
    rows = draft.rows(logits[:-1], [copied[:place] for place in range(len(copied))])  # [g, V]
    places = indices(copied, rows.device)[:, None]
    own, favourite = rows.gather(1, places)[:, 0], rows.amax(dim=-1)
    # Of a token that it does not know the model says nothing against the copy.
    is_unknown = fitted(logits[:-1], rows.shape[1]).gather(1, places)[:, 0].isneginf()
    own = torch.where(is_unknown, KEPT_SHARE * favourite, own)
    pairs = torch.stack((own, favourite), dim=-1).tolist()
    for place, (token, (chance, peak)) in enumerate(zip(copied, pairs, strict=True)):
        if not chance >= KEPT_SHARE * peak:  # also leaves a damaged model's rows
            return True, place
        if not draft.add(token, chance):
            return False, place + 1
    return True, len(copied)
