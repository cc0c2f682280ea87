"""Which draft tokens a lenient rule accepts although the target would have chosen another.

Contract: a token that is the target's choice is accepted under every rule, and `verify` prefers it
to a sibling that a rule allows. Where nothing is allowed the target's own choice follows.

    Threshold   Allowed if the drafter's confidence is above the threshold.
    Typical     Allowed if p(x) > min(epsilon, delta * exp(-H(p))), p being the target's whole row
                under the request's sampling. Greedy rows are one-hot: exact.
    Factor      Allowed if the token would be the choice were its p(x) larger by the factor. At
                temperature 0: exact.

Not here: the walk (verify), choosing a rule (workloads). Sources: localspec.core.leniency.
"""

from __future__ import annotations

import math

import torch

from localspec.core import decoding
from localspec.core.decoding import Proposal
from localspec.core.leniency import Factor, Leniency, Threshold, Typical
from localspec.engine.sampling import distributions
from localspec.forward.upload import indices


def allowed(
    rule: Leniency,
    proposal: Proposal,
    sequence: decoding.Sequence,
    logits: torch.Tensor,
    scores: torch.Tensor,
) -> list[bool]:
    """Of each draft token. logits, scores: [1 + n, V], of the target, -inf where a grammar forbids
    a token: no rule allows that. One host copy at most."""
    device = logits.device
    rows = indices([parent + 1 for parent in proposal.parents], device)
    tokens = indices(proposal.tokens, device)
    match rule:
        case Threshold(threshold):
            confidences = proposal.confidences or (0.0,) * len(proposal.tokens)
            may_be: list[bool] = (logits[rows, tokens] > -math.inf).tolist()
            return [c > threshold and may for c, may in zip(confidences, may_be, strict=True)]
        case Typical(epsilon, delta):
            histories = ([*sequence.tokens, *text] for text in ([], *proposal.texts))
            p = distributions(logits, sequence.sampling, histories, sequence.prompt_length)
            entropy = torch.special.entr(p).sum(dim=-1)  # [1 + n]
            bar = (delta * torch.exp(-entropy)).clamp(max=epsilon)
            is_likely: list[bool] = (p[rows, tokens] > bar[rows]).tolist()
            return is_likely
        case Factor(factor):
            raised = scores + sequence.sampling.temperature * math.log(factor)
            best = scores.amax(dim=-1)
            is_near: list[bool] = (raised[rows, tokens] > best[rows]).tolist()
            return is_near
