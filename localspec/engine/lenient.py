"""Accept more of a Proposal than exact verification would, where a person asked for that.

Contract: the walk of `verify` with another probability to accept a draft token. A token that is not
accepted is either *rejected*, as by the exact rule (the row becomes the positive part of p - q,
without the token where it was not drawn), or *skipped* (the row stays as it was, so that the token
after it is drawn from the target's own row).

    Threshold   Confidence above the threshold: accepted. Below the floor: skipped. Between the
                two, or where the drafter gives no confidence: the exact rule decides. A drawn token
                counts with at most the chance it was drawn with: a sure drafter may draw an
                unlikely token.
    Typical     Accepted if p(x) > min(epsilon, delta * exp(-H(p))), p being the target's whole row
                under the request's sampling; else skipped. Greedy rows are one-hot: exact.
    Factor      Accepted with min(1, factor * p(x) / q(x)), a token that was not drawn with
                factor * p(x); else rejected. At temperature 0: exact.

`Verdict.lenient` holds the accepted places at which the exact rule, with the same random numbers,
would not have chosen the accepted token; when greedy these are the tokens other than the target's
argmax. Drawn chains are counted token by token as well, though exact verification judges them as
a block.

Not here: the exact rule (verify), choosing a rule (workloads). Sources: localspec.leniency.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch

from localspec.core import Proposal, Verdict
from localspec.engine.distributions import Rows
from localspec.engine.verify import ROOT, Judge, Walk, chance_of
from localspec.leniency import Factor, Leniency, Threshold, Typical


def verify_leniently(
    proposal: Proposal, target: Rows, rng: torch.Generator, rule: Leniency
) -> Verdict:
    """Walk down the draft as far as `rule` allows. target: as in `verify`. Host copies: those of
    `verify`, one more for the entropies of the typical rule."""
    if not proposal.tokens:
        return Verdict((), target.row(0).draw(rng))
    walk = Walk(proposal, target, rng)
    verdict = walk.verdict(_judge(rule, proposal, target, walk))
    lenient = list[int]()
    for place, (before, node) in enumerate(pairwise((ROOT, *verdict.path))):
        exact, _ = walk.choose(before, walk.exact, {})
        if exact is None or proposal.tokens[exact] != proposal.tokens[node]:
            lenient.append(place)
    return replace(verdict, lenient=tuple(lenient))


def _judge(rule: Leniency, proposal: Proposal, target: Rows, walk: Walk) -> Judge:
    """The probability to accept each token by `rule`, and whether it is rejected otherwise."""
    match rule:
        case Threshold(threshold, floor):
            confidences = _confidences(proposal, walk.q)

            def by_confidence(token: int, p: float) -> tuple[float, bool]:
                confidence = confidences[token]
                if confidence is None or floor <= confidence <= threshold:
                    return walk.exact(token, p)
                return (1.0 if confidence > threshold else 0.0), False

            return by_confidence
        case Typical(epsilon, delta):
            bars = [min(epsilon, delta * math.exp(-entropy)) for entropy in target.entropies()]
            return lambda token, p: (float(p > bars[proposal.parents[token] + 1]), False)
        case Factor(factor):
            return lambda token, p: (chance_of(factor * p, walk.q[token]), True)


def _confidences(proposal: Proposal, drawn_with: list[float]) -> list[float | None]:
    if proposal.probs is None:
        return list(proposal.confidences or [None] * len(proposal.tokens))
    if proposal.confidences is None:
        return list(drawn_with)
    return [min(pair) for pair in zip(proposal.confidences, drawn_with, strict=True)]
