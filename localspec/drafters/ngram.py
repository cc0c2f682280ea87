"""Lookup drafting: what followed the last few tokens when they occurred before.

Contract: proposes continuations found earlier in the sequence (the prompt, earlier turns, the reply
so far), in the reply that was predicted, or in past conversations: a tree where the plan gives
prices, else the likeliest chain. Where the text ends in a repetition of itself, the copy repeats
it. The length of the match, and where it is, is the drafter's `signal`: acceptance is learnt apart
for each class of lengths. Holds no weights. Where a grammar forces what follows, that is the draft.

It also goes on where the chain of another drafter ends (`fill`): a head's block is short, and a
few more tokens of text often tell where the copy comes from. A token is appended while the chance
that it is reached and right is worth its place in the target's forward.

A token that followed a context c of n times has the chance (c - discount) / n. What the discounts
leave is for tokens that never followed there; it is given to the followers of the next shorter
context, without those already named.

Not here: the index (lookup), the tree (tree_growth).
Source: prompt lookup decoding (Saxena 2023), SAM-Decoding (arXiv 2411.10666), SuffixDecoding (arXiv
2411.04975); prediction by partial matching with absolute discounting. The discounts were fitted to
what followed in 600,000 tokens of the training corpus: of 33,649 contexts of two tokens that had
occurred once before, 0.38 were followed by the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from localspec.core.decoding import DraftPlan, Proposal, Sequence, chain
from localspec.core.filling import Fill, Filling
from localspec.core.hindsight import ReviewSteps
from localspec.drafters.lookup import Lookup, Matches, is_own, length_of
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.review import itself
from localspec.drafters.tree_growth import TreeGrowth

FORCED = "forced"  # signal
GRAMMAR = "grammar"  # provenance of a draft token that the grammar forces
CLASSES = ((2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"))
# By the length of the match, where only one token ever followed.
DISCOUNTS = ((1, 0.75), (2, 0.64), (4, 0.53), (8, 0.39), (16, 0.23))
LONGEST_DISCOUNT = 0.09
DIVIDED_DISCOUNT = 0.7  # where several did, at any length
MAX_SIBLINGS = 4  # of one context
MAX_CONTEXTS = 3  # looked up for the children of one node
LEAST_CHANCE = 0.02


def match_class(length: int) -> str:
    """The bucket of match lengths that `length` falls into."""
    return next((name for bound, name in CLASSES if length <= bound), "17+")


def discount_of(length: int, num_followers: int) -> float:
    """What is taken from the count of each follower of a context, for tokens never seen there."""
    if num_followers > 1:
        return DIVIDED_DISCOUNT
    return next((d for bound, d in DISCOUNTS if length <= bound), LONGEST_DISCOUNT)


class NgramDrafter(DrafterBase):
    """Suffix lookup over one sequence and the past. Shares its index with `chained`."""

    name = "ngram"
    shapes_itself = True

    def __init__(self, lookup: Lookup | None = None) -> None:
        self._lookup = Lookup() if lookup is None else lookup

    @classmethod
    def build(cls, parts: Parts) -> NgramDrafter:
        return cls(parts.lookup)

    def signal(self, sequence: Sequence) -> str | None:
        if sequence.forced_after():
            return FORCED
        return signal_at(self._lookup.follow(sequence.tokens, sequence.prediction))

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. The index of the reply stays as it is, so another one is made."""
        return itself(self.beside())

    def beside(self) -> NgramDrafter:
        """Return a drafter of the same past, for another sequence."""
        return NgramDrafter(self._lookup.beside())

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        size, end_ids = plan.num_draft_tokens, sequence.end_ids
        if forced := sequence.forced_after()[:size]:
            found = chain(forced, (1.0,) * len(forced))
            return replace(found, num_steps=1, makers=(GRAMMAR,) * len(forced))
        place = self._lookup.follow(sequence.tokens, sequence.prediction)
        if plan.growth is None:
            return replace(best_chain(self._lookup, place, size, end_ids), num_steps=1)
        growth = plan.growth_or(plan.growth)
        root = Continuations(self._lookup, place, growth.chance)
        tree = TreeGrowth(growth, size, root, end_ids=end_ids)
        tree.grow()
        return tree.proposal(num_steps=1)

    def fill(self, sequence: Sequence, proposal: Proposal, filling: Filling) -> Fill:
        """See Filler."""
        end_ids = sequence.end_ids
        if proposal.tokens[-1] in end_ids:
            return Fill(self.name, None, Proposal())
        place = self._lookup.follow(sequence.tokens, sequence.prediction)
        for token in proposal.tokens:
            place = self._lookup.after(place, token)
        followers = likeliest_followers(self._lookup, place, end_ids)
        return Fill(self.name, signal_at(place), filling.paid(proposal, followers))


def signal_at(place: Matches) -> str | None:
    """Return the class of the match in use, and whether it is in the past; None without a match."""
    length = length_of(place)
    if not length:
        return None
    return match_class(length) if is_own(place) else f"past {match_class(length)}"


def best_chain(lookup: Lookup, place: Matches, size: int, end_ids: frozenset[int]) -> Proposal:
    """At most `size` tokens up to the end of the text, each the likeliest after those before it."""
    followers = [*islice(likeliest_followers(lookup, place, end_ids), size)]
    tokens = tuple(token for token, _ in followers)
    return chain(tokens, confidences=tuple(confidence for _, confidence in followers))


def likeliest_followers(
    lookup: Lookup, place: Matches, end_ids: frozenset[int]
) -> Iterator[tuple[int, float]]:
    """Yield tokens up to the end of the text, each the likeliest after the tokens before it, with
    their confidences."""
    while followers := lookup.followers(place):
        count, _, token = followers[0]
        total = count if len(followers) == 1 else sum(each[0] for each in followers)
        yield token, (count - discount_of(length_of(place), len(followers))) / total
        if token in end_ids:
            return
        place = lookup.after(place, token)


class Continuations:
    """What may follow a place, the best chance first: see tree_growth.Children. All followers of
    shorter contexts are one candidate; they are looked up when it is taken."""

    def __init__(self, lookup: Lookup, place: Matches, chance: Callable[[float], float]) -> None:
        """chance: see core.Growth."""
        self._lookup = lookup
        self._place = place
        self._chance = chance
        self._context = place
        self._num_looked_up = 0
        self._named: list[int] = []
        self._left: list[tuple[float, int | None]] = []  # confidences and tokens, the best first
        self._look_up(1.0)

    def take(self) -> int | None:
        confidence, token = self._left.pop(0)
        if token is None:
            self._context = self._lookup.shorter(self._context)
            self._look_up(confidence)
            return None
        self.confidence = self._left[0][0] if self._left else 0.0
        return token

    def below(self, token: int) -> Continuations:
        return Continuations(self._lookup, self._lookup.after(self._place, token), self._chance)

    def _look_up(self, share: float) -> None:
        """Add the followers of this context. share: the chance left for it and shorter ones."""
        followers, length = self._lookup.followers(self._context), length_of(self._context)
        if self._named:
            followers = [each for each in followers if each[2] not in self._named]
        if followers:
            discount = discount_of(length, len(followers))
            part = share / sum([count for count, _, _ in followers])
            share = part * discount * len(followers)
            for count, _, token in followers[:MAX_SIBLINGS]:
                confidence = part * (count - discount)
                if confidence >= LEAST_CHANCE:
                    self._left.append((confidence, token))
            self._named += [token for _, _, token in followers]
        self._num_looked_up += 1
        if self._num_looked_up < MAX_CONTEXTS and share >= LEAST_CHANCE and length:
            self._left.append((share, None))
        if len(self._left) > 1:
            self._left.sort(key=lambda each: -self._chance(each[0]))
        self.confidence = self._left[0][0] if self._left else 0.0
