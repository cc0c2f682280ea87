"""A draft tree grown best-first: which nodes are worth their place, and which to go on from.

Contract: a node's worth is the estimated chance that it is accepted, the product of chances along
its path, so it never exceeds its parent's. The tree is the best nodes while each is worth more
than its place costs (plan.growth), or simply the best where no prices are known. One step of the
drafter adds the children of several nodes at once, and is run while what it may bring, judged by
the steps before it, exceeds its price. Deterministic: nothing here is drawn.

Not here: where tokens and confidences come from.
Source: dynamic draft trees, EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.core import DraftPlan, Proposal

ROOT = -1


class BestFirst:
    """Candidates of one round. Nodes are numbered as they were added."""

    def __init__(self, plan: DraftPlan) -> None:
        self._limit = plan.num_draft_tokens
        self._growth = plan.growth
        self._worths = list[float]()
        self._expanded = set[int]()
        self._worth_expanded = 0.0
        self._worth_brought = 0.0
        self.tokens = list[int]()
        self.parents = list[int]()
        self.confidences = list[float]()

    def add(self, parent: int, tokens: Sequence[int], confidences: Sequence[float]) -> None:
        """The likeliest children of a node, or of the root."""
        worth = 1.0 if parent == ROOT else self._worths[parent]
        floor = self._floor()
        self._expanded.add(parent)
        self._worth_expanded += worth
        for token, confidence in zip(tokens, confidences, strict=True):
            child = worth * self._chance(confidence)
            self._worth_brought += max(0.0, child - floor)
            self.tokens.append(token)
            self.parents.append(parent)
            self.confidences.append(confidence)
            self._worths.append(child)

    def chosen(self) -> list[int]:
        """The nodes that pay for their places, best first; a parent before its children."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self._worths[node], node))
        best = order[: self._limit]
        if self._growth is None:
            return best
        prices = self._growth.node_prices
        count = 0
        while count < min(len(best), len(prices)) and self._worths[best[count]] > prices[count]:
            count += 1
        return best[:count]

    def frontier(self, width: int) -> list[int]:
        """At most `width` chosen nodes to go on from, the best that have no children yet; none
        where going on does not pay."""
        floor = self._floor()
        leaves = [n for n in self.chosen() if n not in self._expanded and self._worths[n] > floor]
        best = leaves[:width]
        if self._growth is None or not best:
            return best
        if not self._growth.may_pay(self._worths[best[0]]):
            return []
        yield_so_far = self._worth_brought / self._worth_expanded
        brings = yield_so_far * sum(self._worths[node] for node in best)
        return best if brings > self._growth.step_price else []

    def proposal(self, num_steps: int) -> Proposal:
        chosen = self.chosen()
        if self._growth and not self._growth.pays(self._worths[node] for node in chosen):
            return Proposal(num_steps=num_steps)
        place = {node: index for index, node in enumerate(chosen)} | {ROOT: ROOT}
        return Proposal(
            tokens=tuple(self.tokens[node] for node in chosen),
            parents=tuple(place[self.parents[node]] for node in chosen),
            confidences=tuple(self.confidences[node] for node in chosen),
            num_steps=num_steps,
        )

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child to `node`."""
        found = list[int]()
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def _chance(self, confidence: float) -> float:
        known = confidence if self._growth is None else self._growth.chance(confidence)
        return min(1.0, max(0.0, known))

    def _floor(self) -> float:
        """What a further node must be worth to come into the tree as it stands."""
        chosen = self.chosen()
        if len(chosen) >= self._limit:
            return self._worths[chosen[-1]]
        if self._growth is None:
            return 0.0
        prices = self._growth.node_prices
        return prices[len(chosen)] if len(chosen) < len(prices) else 1.0
