"""A draft tree grown best-first: which tokens are worth their place, and which nodes to extend.

Contract: a node's worth is the estimated chance that it is accepted, the product of the chances
along its path. `grow` adds the best candidate while its worth exceeds the price of its place.
What may follow a node comes from its `Children`, one token after another, the best first.

Where children are free (a lookup, Medusa's heads) or known already (`Known`), `below` gives them as
soon as a node is added. Where they take a step of the drafter, `wanted` names the nodes to extend
next, all in one step, and none when what they are expected to bring does not pay for a step; `open`
sets their children. A candidate waits for a step that is expected to bring a better one. Nothing
follows the end of the text. `proposal` gives no tokens where they are not worth all that they cost.

Not here: the rows (the drafters), the prices (the controller), acceptance (engine.verify).
Source: best-first growth by expected acceptance as in OPT-Tree (arXiv 2406.17276) and EAGLE-2
(arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from localspec.core.decoding import Growth, Proposal

ROOT = -1
MAX_OPENED = 4  # nodes extended in one step
USUAL_NODES = 16
USUAL_TYPICAL = 0.8  # chance of a first child, before any tree was grown
SMOOTHING = 0.2  # of the typical chance, for each tree


def usual_growth(node_price: float, step_price: float, size: int = USUAL_NODES) -> Growth:
    """Prices where nothing was measured, with each confidence taken as the chance."""
    return Growth(lambda confidence: confidence, (node_price,) * size, step_price)


def steps_that_pay(typical: float, growth: Growth, most: int) -> int:
    """How many steps to run before anything is read of them, one at least. typical: chance of a
    first child, as of the last trees."""
    num_steps, worth = 1, typical * typical
    while num_steps < most and worth > growth.step_price:
        num_steps, worth = num_steps + 1, worth * typical
    return num_steps


class Children(Protocol):
    """What may follow one node, the best first."""

    confidence: float
    """The largest chance among the tokens that are left, or an upper bound; 0 when none is left."""

    def take(self) -> int | None:
        """The next child; None where `confidence` was a bound, which is closer afterwards."""
        ...

    def below(self, token: int) -> Children | None:
        """What may follow a child that was taken, None where that takes a step of the drafter."""
        ...


class Ranked:
    """Known tokens, the largest confidence first. order: the chance of a confidence, where the
    order by chance may differ."""

    def __init__(
        self,
        tokens: Sequence[int],
        confidences: Sequence[float],
        order: Callable[[float], float] | None = None,
    ) -> None:
        self._left = list(zip(confidences, tokens, strict=True))[::-1]
        if order is not None:
            self._left.sort(key=lambda each: order(each[0]))
        self.confidence = self._left[-1][0] if self._left else 0.0

    def take(self) -> int:
        _, token = self._left.pop()
        self.confidence = self._left[-1][0] if self._left else 0.0
        return token

    def below(self, token: int) -> Children | None:
        return None


@dataclass(eq=False)
class Node:
    """A drafted token. parent: index, ROOT for a child of the last accepted token."""

    token: int
    parent: int
    confidence: float
    worth: float


class Known(Ranked):
    """Known tokens, with what may follow those of them that are in `children`, and nothing after
    the others."""

    def __init__(
        self,
        tokens: Sequence[int],
        confidences: Sequence[float],
        children: Mapping[int, Ranked],
        order: Callable[[float], float] | None = None,
    ) -> None:
        super().__init__(tokens, confidences, order)
        self._children = children

    def below(self, token: int) -> Ranked:
        return self._children.get(token) or Known((), (), {})


class TreeGrowth:
    """A tree of at most `num_nodes` nodes under the prices of `growth`.

    root: what may follow the root, where all children are free. end_ids: tokens that end a text.
    forced: the tokens that must follow a drafted text, which no step has to guess.
    """

    def __init__(
        self,
        growth: Growth,
        num_nodes: int,
        root: Children | None = None,
        max_opened: int = MAX_OPENED,
        end_ids: frozenset[int] = frozenset(),
        forced: Callable[[Sequence[int]], Sequence[int]] = lambda text: (),
    ) -> None:
        self.nodes = list[Node]()
        self._growth = growth
        self._num_nodes = min(num_nodes, len(growth.node_prices))
        self._max_opened = max_opened
        self._end_ids = end_ids
        self._forced = forced
        self._is_free = root is not None
        self._open = dict[int, Children]()
        self._index = dict[tuple[int, int], int]()  # parent and token -> node
        self._candidates = list[tuple[float, int]]()  # minus a worth, and the node it is a child of
        self._sum_first = 0.0  # chances of the first children of all opened nodes
        if root is not None:
            self.open(ROOT, root)

    def start(self) -> list[int]:
        """The nodes to open in the first step: the root, unless something must follow it."""
        below = self._forced_below(ROOT)
        if below is None:
            return [ROOT]
        self.open(ROOT, below)
        self.grow()
        return self.wanted()

    def _forced_below(self, node: int) -> Children | None:
        """What must follow a node, one token below the other."""
        found: Ranked | None = None
        for token in reversed(self._forced(self.text(node))):
            found = (
                Ranked([token], [1.0]) if found is None else Known([token], [1.0], {token: found})
            )
        return found

    def open(self, node: int, children: Children) -> None:
        """Set what may follow `node`."""
        self._open[node] = children
        self._sum_first += self._offer(node)

    def add(self, parent: int, token: int, confidence: float) -> int:
        """Add a token whatever it is worth. A token that is there already is not added twice; it
        keeps the larger confidence."""
        worth = self._worth(parent) * self._growth.chance(confidence)
        return self._add(parent, token, confidence, worth)

    def grow(self, num_nodes: int | None = None) -> None:
        """Add what is worth its price, until the tree has `num_nodes` nodes or another step is
        expected to bring better ones."""
        end = self._num_nodes if num_nodes is None else min(num_nodes, self._num_nodes)
        bar = self._best_expected()
        while self._candidates and len(self.nodes) < end:
            minus_worth, parent = self._candidates[0]
            if -minus_worth <= self._price(0) or -minus_worth < bar:
                return
            heappop(self._candidates)
            children = self._open[parent]
            confidence, token = children.confidence, children.take()
            if token is None or not self._growth.is_chain:
                self._offer(parent)
            if token is None:
                continue
            node = self._add(parent, token, confidence, -minus_worth)
            below = None
            if token not in self._end_ids:
                below = children.below(token) or self._forced_below(node)
            if below is None:
                bar = self._best_expected()
            elif node not in self._open:
                self.open(node, below)

    def wanted(self) -> list[int]:
        """The nodes to open in the next step, in order; none when a step does not pay."""
        room = min(self._max_opened, self._num_nodes - len(self.nodes))
        if room <= 0 or self._is_free:
            return []
        unopened = [node for node in range(len(self.nodes)) if self._may_open(node)]
        best = sorted(unopened, key=lambda node: -self.nodes[node].worth)[:room]
        typical = self.typical
        gains = {
            node: self.nodes[node].worth * typical - self._price(place)
            for place, node in enumerate(best)
        }
        chosen = sorted(node for node, gain in gains.items() if gain > 0.0)
        pays = sum(gains[node] for node in chosen) > self._growth.step_price
        return chosen if pays else []

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to `node`."""
        found = list[int]()
        while node != ROOT:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def text(self, node: int) -> list[int]:
        return [self.nodes[step].token for step in self.path(node)]

    def proposal(self, num_steps: int) -> Proposal:
        """The tree; no tokens where they are not worth all that they cost."""
        if not self._growth.pays(node.worth for node in self.nodes):
            return Proposal(num_steps=num_steps)
        return self.whole(num_steps)

    def whole(self, num_steps: int) -> Proposal:
        """The tree, whatever it is worth."""
        return Proposal(
            tuple(node.token for node in self.nodes),
            tuple(node.parent for node in self.nodes),
            tuple(node.confidence for node in self.nodes),
            num_steps,
        )

    def _add(self, parent: int, token: int, confidence: float, worth: float) -> int:
        node = self._index.setdefault((parent, token), len(self.nodes))
        if node < len(self.nodes):
            found = self.nodes[node]
            found.confidence = max(found.confidence, confidence)
            found.worth = max(found.worth, worth)
        else:
            self.nodes.append(Node(token, parent, confidence, worth))
        return node

    @property
    def typical(self) -> float:
        """Chance of a first child, by those seen in this round."""
        return self._sum_first / len(self._open) if self._open else 1.0

    def _price(self, later: int) -> float:
        """Of the place that is filled after `later` others."""
        place = min(len(self.nodes) + later, len(self._growth.node_prices) - 1)
        return self._growth.node_prices[place]

    def _best_expected(self) -> float:
        """What the best child behind an unopened node is expected to be worth."""
        best = max((self.nodes[node].worth for node in self.wanted()), default=0.0)
        return self.typical * best

    def _may_open(self, node: int) -> bool:
        return node not in self._open and self.nodes[node].token not in self._end_ids

    def _worth(self, node: int) -> float:
        return 1.0 if node == ROOT else self.nodes[node].worth

    def _offer(self, node: int) -> float:
        """Make the node's next child a candidate; returns its chance."""
        confidence = self._open[node].confidence
        chance = self._growth.chance(confidence)
        if confidence > 0.0:
            heappush(self._candidates, (-self._worth(node) * chance, node))
        return chance
