"""Accept or reject a Proposal against the target. Knows nothing of models, caches or text.

Rule (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318), extended to
siblings: at a node try its children in order; a child x drawn from q is accepted with
probability min(1, p(x) / q(x)); after a rejection p becomes the normalised positive part of
p - q. A child that was not drawn (argmax, lookup: no q) is accepted with p(x), then p(x) becomes
0. When no child is left the next token is drawn from what p has become. The output is
distributed exactly as p, for chains and trees, sampled and deterministic drafts; greedy is
the case of a one-hot p.

A chain whose every token was drawn is judged as a block instead (Sun et al. 2024, arXiv
2403.10444): the longest prefix that may be kept is kept, never shorter on average and as exact.
A tree that came out without branches is not: judged as a block only then, it would be judged by
what was drawn. Both rules are checked by the same exact enumeration in tests/engine/test_verify.py,
trees that grow as they are drawn in test_verify_trees.py.
"""

from __future__ import annotations

import math

import torch

from localspec.core import Proposal, Verdict
from localspec.engine.distributions import Row, Rows
from localspec.engine.sampling import draw, no_numbers, uniforms
from localspec.forward.tree import children


def verify(proposal: Proposal, target: Rows, rng: torch.Generator) -> Verdict:
    """Walk down the draft from the root as far as the target's own chance allows.

    target: row 0 follows the root, row i + 1 follows draft node i. Host copies when sampling: one
    for all p(x) and q(x), one for each residual beyond a node's first child, one for the draw.
    """
    if not proposal.tokens:  # plain decoding pays for no draft
        return Verdict((), target.row(0).draw(rng))
    if proposal.cannot_branch and proposal.probs is not None:
        return _verify_block(proposal, proposal.probs, target.probs, rng)
    return _verify_nodes(proposal, target, rng)


def _verify_nodes(proposal: Proposal, target: Rows, rng: torch.Generator) -> Verdict:
    """The rule node by node, for trees and for drafts that were not drawn."""
    p_of = target.chances([parent + 1 for parent in proposal.parents], proposal.tokens)
    q_of = drawn_with(proposal)
    chances = uniforms(len(proposal.tokens), rng)
    below = children(proposal.parents)
    said: list[float | None] = [None] * len(proposal.tokens)
    node, path = -1, list[int]()
    while True:
        row: Row = target.row(node + 1)  # p after this node
        accepted = None
        for rank, child in enumerate(below.get(node, ())):
            p = p_of[child] if rank == 0 else row.chance(proposal.tokens[child])
            if math.isnan(p):  # this node was reached; below one that never is nobody looks
                raise no_numbers()
            said[child] = chance_of(p, q_of[child])
            if chances[child] * q_of[child] < p:
                accepted = child
                break
            drawn_from = None if proposal.probs is None else proposal.probs[child]
            row = row.without(proposal.tokens[child], drawn_from)
        if accepted is None:
            is_whole = not any(map(math.isnan, p_of))
            return Verdict(tuple(path), row.draw(rng), chances=tuple(said), is_whole=is_whole)
        path.append(accepted)
        node = accepted


def _verify_block(
    proposal: Proposal, probs: torch.Tensor, target_probs: torch.Tensor, rng: torch.Generator
) -> Verdict:
    """The block rule for a drawn chain of n tokens.

    With w_i the product, capped at 1 after each factor, of p / q over the first i tokens, a prefix
    of length i is offered with the chance that makes its total probability w_i times its own; the
    longest one taken wins. What follows it is drawn from the positive part of w_i * p - q, at the
    end of the draft from p. The draft may have ended by any rule that saw only its own prefix:
    such an end is a leaf of the same induction; so is a row that holds no numbers, before which
    the draft ends here.
    """
    p_of, q_of = _ratios(proposal, probs, target_probs)
    size, drafted = len(p_of), len(proposal.tokens)
    probs, target_probs = probs[:size], target_probs[: size + 1]
    weights = [1.0]
    for p, q in zip(p_of, q_of, strict=True):
        weights.append(min(1.0, weights[-1] * p / q))  # a drawn token has q > 0
    scale = torch.tensor(weights[:-1], device=probs.device, dtype=probs.dtype)  # [n]
    excess = (scale[:, None] * target_probs[:-1] - probs).clamp_(min=0.0)  # [n, V]
    masses = excess.sum(dim=-1).tolist()
    chances = uniforms(size, rng)
    kept = 0
    for length in range(size, 0, -1):
        if chances[length - 1] < _block_chance(length, weights, masses):
            kept = length
            break
    # Neither at the end of the draft, nor where p and q agree to rounding, is there a residual.
    is_residual = kept < size and masses[kept] > 0.0
    row = excess[kept] if is_residual else target_probs[kept]  # [V]
    said = _block_said(kept, weights, masses) + (None,) * (drafted - size)
    is_whole = size == drafted
    return Verdict(tuple(range(kept)), draw(row, rng), chances=said, is_whole=is_whole)


def _block_said(kept: int, weights: list[float], masses: list[float]) -> tuple[float | None, ...]:
    """Of each token the chance that the prefix that it ends is kept, given that the one before is;
    None beyond the first token that was not."""
    size = len(masses)
    reached = [0.0] * size  # chance that at least this many tokens and one more are kept
    missed = 1.0
    for length in range(size, 0, -1):
        missed *= 1.0 - _block_chance(length, weights, masses)
        reached[length - 1] = 1.0 - missed
    said: list[float | None] = [None] * size
    before = 1.0
    for place in range(min(kept + 1, size)):
        said[place] = reached[place] / before if before > 0.0 else 0.0
        before = reached[place]
    return tuple(said)


def chance_of(p: float, q: float) -> float:
    """min(1, p / q), which is 0 for p = 0 even where q is 0 to rounding."""
    return p / q if p < q else float(p > 0.0)


def _block_chance(length: int, weights: list[float], masses: list[float]) -> float:
    """Chance to keep `length` tokens, given that no more are kept."""
    if length == len(masses):
        return weights[length]
    rest = masses[length] + 1.0 - weights[length]
    return masses[length] / rest if rest > 0.0 else 1.0


def drawn_with(proposal: Proposal) -> list[float]:
    """q(x) of every draft token; 1 where nothing was drawn."""
    if proposal.probs is None or not proposal.tokens:
        return [1.0] * len(proposal.tokens)
    index = torch.tensor(proposal.tokens, device=proposal.probs.device)
    found: list[float] = proposal.probs.gather(1, index[:, None])[:, 0].tolist()
    return found


def _ratios(
    proposal: Proposal, probs: torch.Tensor, target_probs: torch.Tensor
) -> tuple[list[float], list[float]]:
    """p(x) and q(x) of a chain in one copy, up to the first row of the target without numbers;
    NumericsError where that is the root's."""
    index = torch.tensor(proposal.tokens, device=target_probs.device)[:, None]
    both = torch.cat((target_probs[:-1].gather(1, index), probs.gather(1, index)), dim=1).tolist()
    size = next((place for place, (p, _) in enumerate(both) if math.isnan(p)), len(both))
    if size == 0:
        raise no_numbers()
    return [p for p, _ in both[:size]], [q for _, q in both[:size]]
