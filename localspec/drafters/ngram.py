"""Lookup drafting: what followed the last few tokens when they stood here before.

Contract: proposes deterministic continuations (no probs) found earlier in the sequence, that is
in the prompt, earlier turns and the reply so far, or in past conversations: a tree where the plan
says what nodes cost, else the likeliest chain. Where the text ends in a repetition of itself the
copy goes round. The length of the match, and where it is, is the drafter's `signal`: acceptance
is learnt apart for each class of it. Holds no weights.

Not here: the index (lookup), which continuations are worth it (continuations).
Source: prompt lookup decoding (Saxena 2023), SAM-Decoding (arXiv 2411.10666), SuffixDecoding
(arXiv 2411.04975).
"""

from __future__ import annotations

from dataclasses import replace

from localspec.core import DraftPlan, Outcome, Proposal, Sequence
from localspec.drafters.continuations import best_chain, best_tree
from localspec.drafters.lookup import Lookup, is_own, length_of
from localspec.drafters.parts import Parts

FORESEEN = 8  # tokens
CLASSES = ((2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"))


def match_class(length: int) -> str:
    """The bucket of match lengths that `length` falls into."""
    return next((name for bound, name in CLASSES if length <= bound), "17+")


class NgramDrafter:
    """Suffix lookup over one sequence and the past. Shares its index with `chained`."""

    name = "ngram"
    shapes_itself = True

    def __init__(self, lookup: Lookup | None = None) -> None:
        self._lookup = Lookup() if lookup is None else lookup

    @classmethod
    def build(cls, parts: Parts) -> NgramDrafter:
        return cls(parts.lookup)

    @property
    def memory_bytes(self) -> int:
        return 0

    def signal(self, sequence: Sequence) -> str | None:
        place = self._lookup.follow(sequence.tokens)
        length = length_of(place)
        if not length:
            return None
        return match_class(length) if is_own(place) else f"past {match_class(length)}"

    def prepare(self, sequence: Sequence) -> None:
        self._lookup.follow(sequence.tokens)

    def foresee(self, sequence: Sequence) -> tuple[int, ...]:
        return best_chain(self._lookup, self._lookup.follow(sequence.tokens), FORESEEN).tokens

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        place, size = self._lookup.follow(sequence.tokens), plan.num_draft_tokens
        if plan.growth is not None:
            return best_tree(self._lookup, place, size, plan.growth)
        found = best_chain(self._lookup, place, size)
        return replace(found, num_steps=1) if found.tokens else found

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Nothing: the index is brought up to date when it is next asked."""
