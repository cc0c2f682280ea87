"""What a lookup expects next: the likeliest chain, or the tree of continuations that pays.

Contract: of a context that n places share, a token that followed c of them has the chance
(c - discount) / n; what the discounts leave is for tokens that never followed there, and is given
to the next shorter context's, without those already named. A chain takes the likeliest token of
the longest context each time. A tree adds the node that is worth most while that is more than it
costs. Both are found, not drawn: deterministic, whatever the temperature.

Not here: contexts and their counts (lookup).
Source: prediction by partial matching with absolute discounting; a tree by worth as in
SuffixDecoding (arXiv 2411.04975). The discounts were fitted to what followed in 600,000 tokens of
the training corpus: of 33,649 contexts of two tokens that one other place shared, 0.38 went on
alike.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from localspec.core import Growth, Proposal, chain
from localspec.drafters.lookup import Lookup, Place, length_of

# By the length of the match, where only one token ever followed.
DISCOUNTS = ((1, 0.75), (2, 0.64), (4, 0.53), (8, 0.39), (16, 0.23))
LONGEST_DISCOUNT = 0.09
DIVIDED_DISCOUNT = 0.7  # where several did, at any length
MAX_SIBLINGS = 4  # of one context
MAX_CONTEXTS = 3  # asked for the children of one node
LEAST_CHANCE = 0.02


def discount_of(length: int, num_followers: int) -> float:
    """What each of a context's followers gives up to those that were never seen."""
    if num_followers > 1:
        return DIVIDED_DISCOUNT
    for bound, discount in DISCOUNTS:
        if length <= bound:
            return discount
    return LONGEST_DISCOUNT


def best_chain(lookup: Lookup, place: Place, size: int) -> Proposal:
    """At most `size` tokens, each the likeliest after those before it."""
    tokens, confidences = list[int](), list[float]()
    while len(tokens) < size and (followers := lookup.followers(place)):
        count, _, token = followers[0]
        total = count if len(followers) == 1 else sum(each[0] for each in followers)
        tokens.append(token)
        confidences.append((count - discount_of(length_of(place), len(followers))) / total)
        place = lookup.after(place, token)
    return chain(tuple(tokens), confidences=tuple(confidences))


def best_tree(lookup: Lookup, place: Place, size: int, growth: Growth) -> Proposal:
    """The nodes that are worth more than they cost, at most `size`, best first."""
    prices = growth.node_prices[:size]
    tree = _Tree(lookup, growth, floor=min(prices, default=0.0))
    tree.offer(_Offer(place, -1, 1.0, 1.0, frozenset(), 1))
    for price in prices:
        if not tree.grow(price):
            break
    return tree.proposal()


class _Offer(NamedTuple):
    """Where candidates come from. place: where the text stands after the node `parent`, or a
    shorter context there. worth: of that node. share: what of the chance there is left for this
    context; named: the tokens that longer contexts named; depth: which context it is, from 1."""

    place: Place
    parent: int
    worth: float
    share: float
    named: frozenset[int]
    depth: int


# Minus its worth, order of arrival, where from, token and chance; no token for all that a shorter
# context may say.
Candidate = tuple[float, int, _Offer, int | None, float]


class _Tree:
    """Nodes so far, and the candidates for the next one."""

    def __init__(self, lookup: Lookup, growth: Growth, floor: float) -> None:
        """floor: no node is worth less than this."""
        self._lookup = lookup
        self._growth = growth
        self._worths = list[float]()
        self._floor = floor
        self._candidates = list[Candidate]()
        self._tokens = list[int]()
        self._parents = list[int]()
        self._confidences = list[float]()
        self._num_put = 0

    def offer(self, offer: _Offer) -> None:
        """Put up what the context says, and what shorter ones may."""
        place, parent, worth, left, named, depth = offer
        followers = self._lookup.followers(place)
        if named:
            followers = [each for each in followers if each[2] not in named]
        if followers:
            total = sum([each[0] for each in followers])
            discount = discount_of(length_of(place), len(followers))
            share = left / total
            left = share * discount * len(followers)
            for count, _, token in followers[:MAX_SIBLINGS]:
                self._put(offer, token, share * (count - discount))
        if depth < MAX_CONTEXTS and left >= LEAST_CHANCE:
            named = named.union([each[2] for each in followers])
            self._put(_Offer(place, parent, worth, left, named, depth + 1), None, left)

    def grow(self, price: float) -> bool:
        """Add the best node; False where none is worth more than `price`."""
        while self._candidates and -self._candidates[0][0] > price:
            minus_worth, _, offer, token, chance = heappop(self._candidates)
            if token is not None:
                self._add(offer, token, chance, -minus_worth)
                return True
            shorter = self._lookup.shorter(offer.place)
            if length_of(shorter):
                self.offer(_Offer(shorter, *offer[1:]))
        return False

    def proposal(self) -> Proposal:
        if not self._tokens or not self._growth.pays(self._worths):
            return Proposal()
        shape = tuple(self._tokens), tuple(self._parents)
        return Proposal(*shape, None, tuple(self._confidences), num_steps=1)

    def _add(self, offer: _Offer, token: int, chance: float, worth: float) -> None:
        place = self._lookup.after(offer.place, token)
        self.offer(_Offer(place, len(self._tokens), worth, 1.0, frozenset(), 1))
        self._tokens.append(token)
        self._parents.append(offer.parent)
        self._confidences.append(chance)
        self._worths.append(worth)

    def _put(self, offer: _Offer, token: int | None, chance: float) -> None:
        if chance < LEAST_CHANCE:
            return
        worth = offer.worth * self._growth.chance(chance)
        if worth > self._floor:
            self._num_put += 1
            heappush(self._candidates, (-worth, self._num_put, offer, token, chance))
