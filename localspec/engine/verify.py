"""Accept or reject a Proposal against the target. Knows nothing of models, caches or text.

Rule (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318), extended to
siblings: at a node try its children in order; a child x drawn from q is accepted with
probability min(1, p(x) / q(x)); after a rejection p becomes the normalised positive part of
p - q. A child that was not drawn (argmax, lookup: no q) is accepted with p(x), then p(x) becomes
0. When no child is left the next token is drawn from what p has become. The output is
distributed exactly as p, for chains and trees, sampled and deterministic drafts; greedy is
the case of a one-hot p. Checked by exact enumeration in tests/engine/test_verify.py.
"""

from __future__ import annotations

import torch

from localspec.core import Proposal, Verdict
from localspec.engine.sampling import draw, uniforms
from localspec.forward.tree import children


def verify(proposal: Proposal, target_probs: torch.Tensor, rng: torch.Generator) -> Verdict:
    """Walk down the draft from the root as far as the target's own chance allows.

    target_probs: [n + 1, V]; row 0 follows the root, row i + 1 follows draft node i.
    Host copies: one for all p(x) and q(x), one for each residual beyond a node's first child.
    """
    p_of, q_of = _gathered(proposal, target_probs)
    chances = uniforms(len(proposal.tokens), rng)
    below = children(proposal.parents)
    node, path = -1, list[int]()
    while True:
        row = target_probs[node + 1]  # p after this node, [V]
        accepted = None
        for rank, child in enumerate(below.get(node, ())):
            p = p_of[child] if rank == 0 else float(row[proposal.tokens[child]])
            if chances[child] * q_of[child] < p:
                accepted = child
                break
            row = _residual(row, proposal, child)
        if accepted is None:
            return Verdict(tuple(path), draw(row, rng))
        path.append(accepted)
        node = accepted


def _gathered(proposal: Proposal, target_probs: torch.Tensor) -> tuple[list[float], list[float]]:
    """p(x) and q(x) of every draft token; q is 1 where nothing was drawn."""
    size = len(proposal.tokens)
    if size == 0:
        return [], []
    device = target_probs.device
    tokens = torch.tensor(proposal.tokens, device=device)
    rows = torch.tensor(proposal.parents, device=device) + 1
    p_values = target_probs[rows, tokens]  # [n]
    if proposal.probs is None:
        return p_values.tolist(), [1.0] * size
    q_values = proposal.probs[torch.arange(size, device=device), tokens]  # [n]
    both = torch.stack((p_values, q_values)).tolist()
    return both[0], both[1]


def _residual(row: torch.Tensor, proposal: Proposal, child: int) -> torch.Tensor:
    """What p becomes when `child` was rejected, normalised: [V]."""
    if proposal.probs is None:
        left = row.clone()
        left[proposal.tokens[child]] = 0.0
    else:
        left = (row - proposal.probs[child]).clamp_(min=0.0)
    total = float(left.sum())
    # p and q may agree to rounding; the rejection was then rounding too, and p itself is right.
    return left / total if total > 0.0 else row
