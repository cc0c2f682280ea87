"""A draft tree that grows where the next token is worth most, and no further than it pays.

Contract: a node's worth is the estimated chance that it is accepted together with all above it.
`grow` adds the best child that can be had while its worth exceeds the price of its place;
`wanted` says which nodes to look behind next, all in one step of the drafter, and names none when
what they may bring does not pay for a step. A child that another step is expected to better
waits for that step. Children of a node come from `Children` one after another: `Ranked` gives the
likeliest, `Drawn` draws without replacement, so that each row is the one its token was drawn from.
A drawn token always stays, and whether another is drawn depends on what was drawn before alone.

Not here: the rows (draft_tree), the prices (engine.policy), acceptance (engine.verify).
Source: best-first growth by expected acceptance as in OPT-Tree (arXiv 2406.17276) and EAGLE-2
(arXiv 2406.16858); siblings without replacement as in arXiv 2402.14160.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from localspec.core import Growth, Proposal
from localspec.engine.sampling import draw

ROOT = -1
MAX_CHILDREN = 4  # of one node
MAX_OPENED = 4  # nodes looked behind in one step


class Children(Protocol):
    """What may follow one node, the best or the next drawn first."""

    confidence: float
    """The largest chance among the tokens that are left; 0 when there is none."""

    def take(self) -> tuple[int, torch.Tensor | None]:
        """The next child and the row [V] it was drawn from, None where it was not drawn."""
        ...


class Ranked:
    """The likeliest tokens in order. Deterministic."""

    def __init__(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        self._left = list(zip(chances, tokens, strict=True))[::-1]
        self.confidence = self._left[-1][0] if self._left else 0.0

    def take(self) -> tuple[int, torch.Tensor | None]:
        _, token = self._left.pop()
        self.confidence = self._left[-1][0] if self._left else 0.0
        return token, None


class Drawn:
    """Tokens drawn from a row [V] without replacement, at most MAX_CHILDREN."""

    def __init__(self, row: torch.Tensor, rng: torch.Generator) -> None:
        self._row = row
        self._rng = rng
        self._mass = 1.0  # of what is left, in the row as it was
        self._num_left = MAX_CHILDREN
        self.confidence = float(row.max())

    def take(self) -> tuple[int, torch.Tensor | None]:
        row = self._row
        token = draw(row, self._rng)
        left = row.clone()
        left[token] = 0.0
        mass = float(left.sum())
        self._mass *= mass
        self._num_left -= 1
        if mass > 0.0 and self._num_left > 0:  # after top-k 1 nothing is left
            self._row = left / mass
            self.confidence = self._mass * float(self._row.max())
        else:
            self.confidence = 0.0
        return token, row


@dataclass(frozen=True)
class Node:
    """A drafted token. parent: index, ROOT for a child of the last accepted token."""

    token: int
    parent: int
    confidence: float
    worth: float
    row: torch.Tensor | None


class Growing:
    """A tree of at most `num_nodes` nodes under the prices of `growth`."""

    def __init__(self, growth: Growth, num_nodes: int) -> None:
        self.nodes = list[Node]()
        self._growth = growth
        self._num_nodes = min(num_nodes, len(growth.node_prices))
        self._open = dict[int, Children]()
        self._firsts = list[float]()  # chance of each opened node's first child

    def open(self, node: int, children: Children) -> None:
        """Tell what may follow `node`."""
        self._open[node] = children
        self._firsts.append(self._growth.chance(children.confidence))

    def grow(self) -> None:
        """Add what is worth its price, until another step is expected to bring better."""
        bar = self._best_expected()
        while not self._is_full and self._open:
            worth, parent = max((self._worth_of_next(node), -node) for node in self._open)
            if worth <= self._price(0) or worth < bar:
                return
            if not self.nodes and not self._growth.may_pay(worth):
                return  # decided before anything is drawn
            self._add(-parent, worth)
            bar = self._best_expected()

    def wanted(self) -> list[int]:
        """The nodes to open in the next step, in order; none when a step does not pay."""
        if self._is_full:
            return []
        unopened = [node for node in range(len(self.nodes)) if node not in self._open]
        unopened.sort(key=lambda node: -self.nodes[node].worth)
        room = min(MAX_OPENED, self._num_nodes - len(self.nodes))
        gains = {
            node: self.nodes[node].worth * self._typical - self._price(place)
            for place, node in enumerate(unopened[:room])
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

    def proposal(self, num_steps: int) -> Proposal:
        nodes = self.nodes
        rows = [node.row for node in nodes if node.row is not None]
        return Proposal(
            tuple(node.token for node in nodes),
            tuple(node.parent for node in nodes),
            torch.stack(rows) if rows else None,
            tuple(node.confidence for node in nodes),
            num_steps,
        )

    @property
    def _is_full(self) -> bool:
        return len(self.nodes) >= self._num_nodes

    @property
    def _typical(self) -> float:
        """Chance of a first child, by those seen in this round."""
        return sum(self._firsts) / len(self._firsts) if self._firsts else 1.0

    def _price(self, later: int) -> float:
        """Of the place that is filled after `later` others."""
        place = min(len(self.nodes) + later, len(self._growth.node_prices) - 1)
        return self._growth.node_prices[place]

    def _best_expected(self) -> float:
        """What the best child behind an unopened node is expected to be worth."""
        wanted = self.wanted()
        return self._typical * max((self.nodes[node].worth for node in wanted), default=0.0)

    def _worth_of_next(self, node: int) -> float:
        confidence = self._open[node].confidence
        above = 1.0 if node == ROOT else self.nodes[node].worth
        return above * self._growth.chance(confidence) if confidence > 0.0 else 0.0

    def _add(self, parent: int, worth: float) -> None:
        confidence = self._open[parent].confidence
        token, row = self._open[parent].take()
        self.nodes.append(Node(token, parent, confidence, worth, row))
