"""Heads on the target's last state guess several places at once; the best combinations are tried.

Contract: one evaluation a round gives every head's distribution. A tree is grown from them best
first: a node at depth k holds a token of head k, whatever stands above it, and is worth the
product of the chances along its path. Its tokens are looked up, not drawn, so any choice of them
is exact. Holds no keys and values, so there is nothing to catch up.

A token's confidence is its head's softmax at temperature 1, above 1 at the request's own. A low
temperature sharpens what the target says in its place, but not what the head does not know of it,
so sharpening the head would make it too sure. On the demo target this predicts acceptance best, by
log loss, at 0.5, 0.7, 1 and 1.5 (at 0 as well as any); the rest the controller learns.

Source: Medusa (arXiv 2401.10774), its tree grown round by round instead of fixed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch

from localspec.core import DraftPlan, Growth, Outcome, Proposal, Sequence
from localspec.drafters.parts import Parts
from localspec.errors import ModelError
from localspec.forward.features import LAST
from localspec.forward.heads.medusa import MedusaHeads, read_medusa
from localspec.forward.model import LanguageModel

MAX_BRANCHES = 10  # of one head; beyond them hardly anything is ever accepted


@dataclass(frozen=True)
class Guess:
    """A token of one head. chance: what its confidence is worth here."""

    token: int
    confidence: float
    chance: float


class MedusaDrafter:
    """Drafts with `heads` on the states of `target`."""

    name = "medusa"
    shapes_itself = True

    def __init__(self, heads: MedusaHeads, target: LanguageModel) -> None:
        self._heads = heads
        self._target = target
        self._features = target.follow([LAST])

    @classmethod
    def build(cls, parts: Parts) -> MedusaDrafter:
        folder = parts.heads.get(cls.name)
        if folder is None:
            raise ModelError(
                "There are no Medusa heads for this target. Train some: "
                "python -m localspec train medusa."
            )
        return cls(read_medusa(folder, parts.target), parts.target)

    @property
    def memory_bytes(self) -> int:
        slots = self._features.slots(LAST)
        return self._heads.weight_bytes + slots.numel() * slots.element_size()

    def signal(self, sequence: Sequence) -> str | None:
        """None while there is no state before the root."""
        return "heads" if len(sequence.tokens) > 1 else None

    def prepare(self, sequence: Sequence) -> None:
        """Nothing: the states are the target's."""

    def foresee(self, sequence: Sequence) -> tuple[int, ...]:
        return ()

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        newest = len(sequence.tokens) - 2  # the state that predicted the root
        if newest < 0 or plan.num_draft_tokens < 1:
            return Proposal()
        row = self._features.rows(LAST, newest, newest + 1)  # [1, d]
        logits = self._heads.logits(row, self._target.head)  # [K, V]
        heat = max(1.0, sequence.sampling.temperature)
        levels = guesses(logits / heat, plan.num_draft_tokens, plan.growth)
        return grown(levels, plan.num_draft_tokens, plan.growth)

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Nothing: the next state is there when it is asked for."""


@torch.inference_mode()
def guesses(logits: torch.Tensor, max_nodes: int, growth: Growth | None) -> list[tuple[Guess, ...]]:
    """The likeliest tokens of each row, [K, V], those of the best chance first."""
    count = min(MAX_BRANCHES, max_nodes, logits.shape[-1])
    heights, ids = torch.softmax(logits, dim=-1).topk(count, dim=-1)  # [K, count]
    found = list[tuple[Guess, ...]]()
    both = torch.stack((heights.double(), ids.double())).tolist()  # one copy from a device
    for confidences, tokens in zip(*both, strict=True):
        level = [
            Guess(int(token), confidence, growth.chance(confidence) if growth else confidence)
            for token, confidence in zip(tokens, confidences, strict=True)
            if confidence > 0.0  # damaged heads say NaN: they cost time, never correctness
        ]
        found.append(tuple(sorted(level, key=lambda guess: guess.chance, reverse=True)))
    return found


def grown(levels: Several[tuple[Guess, ...]], max_nodes: int, growth: Growth | None) -> Proposal:
    """The most valuable tree of at most `max_nodes` nodes, each worth more than its price.

    levels[k]: guesses for depth k + 1, best first. Node worths fall along siblings and down
    paths, so that the best node not yet taken is always the next sibling or the first child of
    one that is.
    """
    prices = growth.node_prices if growth else (0.0,) * max_nodes
    tokens, parents = list[int](), list[int]()
    confidences, worths = list[float](), list[float]()
    waiting = list[tuple[float, int, int, int, int, float]]()

    def offer(parent: int, depth: int, rank: int, above: float) -> None:
        """Put one node on the heap; of equal ones the shallower and likelier comes first."""
        if depth < len(levels) and rank < len(levels[depth]):
            worth = above * levels[depth][rank].chance
            heapq.heappush(waiting, (-worth, depth, rank, parent, len(tokens), above))

    offer(-1, 0, 0, 1.0)
    while waiting and len(tokens) < min(max_nodes, len(prices)):
        negative, depth, rank, parent, _, above = heapq.heappop(waiting)
        if -negative <= prices[len(tokens)]:
            break
        node = len(tokens)
        tokens.append(levels[depth][rank].token)
        parents.append(parent)
        confidences.append(levels[depth][rank].confidence)
        worths.append(-negative)
        offer(parent, depth, rank + 1, above)
        offer(node, depth + 1, 0, -negative)
    if not tokens or (growth and not growth.pays(worths)):
        return Proposal()
    return Proposal(tuple(tokens), tuple(parents), None, tuple(confidences), num_steps=1)
