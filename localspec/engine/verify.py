"""Accept or reject a Proposal against the target. Knows nothing of models, caches or text.

Rule (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318), extended to
siblings: the children of a node are tried in order. A child x that was drawn from q is accepted
with probability min(1, p(x) / q(x)); after a rejection p becomes the normalised positive part of
p - q. A child that was not drawn (argmax, lookup) has no q: it is accepted with p(x), then p(x)
becomes 0. When no child is left, the next token is drawn from what p has become. The output is
distributed exactly as p, for chains and trees, drawn and found drafts. Greedy is the case of a
one-hot p.

A chain whose every token was drawn is judged as a block instead (Sun et al. 2024, arXiv
2403.10444): it accepts at least as many tokens on average and is as exact. A tree without branches
is not judged as a block: the rule must not depend on what was drawn. tests/engine/test_verify.py
checks both rules by exact enumeration, test_verify_trees.py checks trees that grow as they are
drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from localspec.core import Proposal, Verdict
from localspec.engine.distributions import DenseRow, Row, Rows
from localspec.engine.sampling import no_numbers, uniforms
from localspec.forward.tree import children

ROOT = -1
Judge = Callable[[int, float], tuple[float, bool]]
"""Of a draft token, and of its chance in what is left of the row: the probability to accept it,
and whether a rejection takes it out of the row."""


def verify(proposal: Proposal, target: Rows, rng: torch.Generator) -> Verdict:
    """Walk down the draft from the root as far as the target's own chance allows.

    target: row 0 follows the root, row i + 1 follows draft token i. Host copies when sampling: one
    for all p(x) and q(x), one for each residual beyond a node's first child, one for the draw.
    """
    if not proposal.tokens:  # plain decoding pays for no draft
        return Verdict((), target.row(0).draw(rng))
    if proposal.cannot_branch and proposal.probs is not None:
        return _verify_block(proposal, proposal.probs, target.probs, rng)
    walk = Walk(proposal, target, rng)
    return walk.verdict(walk.exact)


class Walk:
    """The rule token by token, for trees and for drafts that were not drawn."""

    def __init__(self, proposal: Proposal, target: Rows, rng: torch.Generator) -> None:
        self.q = drawn_with(proposal)
        self._proposal = proposal
        self._target = target
        self._rng = rng
        self._p = target.chances([parent + 1 for parent in proposal.parents], proposal.tokens)
        self._uniforms = uniforms(len(proposal.tokens), rng)
        self._children = children(proposal.parents)

    def exact(self, token: int, p: float) -> tuple[float, bool]:
        """The Judge of the exact rule."""
        return chance_of(p, self.q[token]), True

    def verdict(self, judge: Judge) -> Verdict:
        """Accept tokens by `judge`, from the root down, and draw the token after them."""
        path, chances = list[int](), dict[int, float]()
        node, row = self.choose(ROOT, judge, chances)
        while node is not None:
            path.append(node)
            node, row = self.choose(node, judge, chances)
        stated = tuple(chances.get(token) for token in range(len(self.q)))
        is_whole = not any(map(math.isnan, self._p))
        return Verdict(tuple(path), row.draw(self._rng), chances=stated, is_whole=is_whole)

    def choose(self, node: int, judge: Judge, chances: dict[int, float]) -> tuple[int | None, Row]:
        """The child of `node` that is accepted, None where none is, and what is left of the row.
        Adds the probability of each child that was tried to `chances`."""
        row = whole = self._target.row(node + 1)
        for child in self._children.get(node, ()):
            token = self._proposal.tokens[child]
            p = self._p[child] if row is whole else row.chance(token)
            if math.isnan(p):  # only rows that are reached must hold numbers
                raise no_numbers()
            chances[child], is_taken_out = judge(child, p)
            if self._uniforms[child] < chances[child]:
                return child, row
            if is_taken_out:
                probs = self._proposal.probs
                row = row.without(token, None if probs is None else probs[child])
        return None, row


def chance_of(p: float, q: float) -> float:
    """min(1, p / q), which is 0 for p = 0 even where q is 0 to rounding."""
    return p / q if p < q else float(p > 0.0)


def drawn_with(proposal: Proposal) -> list[float]:
    """q(x) of every draft token; 1 where nothing was drawn."""
    if proposal.probs is None or not proposal.tokens:
        return [1.0] * len(proposal.tokens)
    index = torch.tensor(proposal.tokens, device=proposal.probs.device)
    found: list[float] = proposal.probs.gather(1, index[:, None])[:, 0].tolist()
    return found


def _verify_block(
    proposal: Proposal, probs: torch.Tensor, target_probs: torch.Tensor, rng: torch.Generator
) -> Verdict:
    """The block rule for a drawn chain of n tokens.

    w_i is the product of p / q over the first i tokens, capped at 1 after each factor. A prefix of
    length i is accepted with the probability that makes its total probability w_i times its own;
    the longest one accepted is kept. The token after it is drawn from the positive part of
    w_i * p - q, at the end of the draft from p. The draft may have ended by any rule that saw only
    its own prefix. It ends here before a row of the target that holds no numbers.
    """
    p_of, q_of = _chances_in_chain(proposal, probs, target_probs)
    size, num_drafted = len(p_of), len(proposal.tokens)
    probs, target_probs = probs[:size], target_probs[: size + 1]
    weights = [1.0]
    for p, q in zip(p_of, q_of, strict=True):
        weights.append(min(1.0, weights[-1] * p / q))  # a drawn token has q > 0
    scale = torch.tensor(weights[:-1], device=probs.device, dtype=probs.dtype)  # [n]
    excess = (scale[:, None] * target_probs[:-1] - probs).clamp_(min=0.0)  # [n, V]
    masses = excess.sum(dim=-1).tolist()
    random_numbers = uniforms(size, rng)
    kept = 0
    for length in range(size, 0, -1):
        if random_numbers[length - 1] < _block_chance(length, weights, masses):
            kept = length
            break
    # Neither at the end of the draft, nor where p and q agree to rounding, is there a residual.
    is_residual = kept < size and masses[kept] > 0.0
    row = DenseRow(excess[kept] if is_residual else target_probs[kept])  # [V]
    stated = _stated_by_block(kept, weights, masses) + (None,) * (num_drafted - size)
    is_whole = size == num_drafted
    return Verdict(tuple(range(kept)), row.draw(rng), chances=stated, is_whole=is_whole)


def _block_chance(length: int, weights: list[float], masses: list[float]) -> float:
    """Probability to keep `length` tokens, given that no more are kept."""
    if length == len(masses):
        return weights[length]
    rest = masses[length] + 1.0 - weights[length]
    return masses[length] / rest if rest > 0.0 else 1.0


def _stated_by_block(
    kept: int, weights: list[float], masses: list[float]
) -> tuple[float | None, ...]:
    """Of each token the probability that the prefix that it ends is kept, given that the one before
    is; None beyond the first token that was not kept."""
    size = len(masses)
    reached = [0.0] * size  # probability that at least this many tokens and one more are kept
    missed = 1.0
    for length in range(size, 0, -1):
        missed *= 1.0 - _block_chance(length, weights, masses)
        reached[length - 1] = 1.0 - missed
    stated: list[float | None] = [None] * size
    before = 1.0
    for place in range(min(kept + 1, size)):
        stated[place] = reached[place] / before if before > 0.0 else 0.0
        before = reached[place]
    return tuple(stated)


def _chances_in_chain(
    proposal: Proposal, probs: torch.Tensor, target_probs: torch.Tensor
) -> tuple[list[float], list[float]]:
    """p(x) and q(x) of a chain in one copy, up to the first row of the target that holds no
    numbers. Raises NumericsError where that is the root's."""
    index = torch.tensor(proposal.tokens, device=target_probs.device)[:, None]
    both = torch.cat((target_probs[:-1].gather(1, index), probs.gather(1, index)), dim=1).tolist()
    size = next((place for place, (p, _) in enumerate(both) if math.isnan(p)), len(both))
    if size == 0:
        raise no_numbers()
    return [p for p, _ in both[:size]], [q for _, q in both[:size]]
