"""Accept more of a Proposal than exact checking would, where a person asked for that.

Contract: the node walk of `verify`, with another test at each draft token; chains and trees
alike. Children of a node are tried in proposal order; where none is taken, the next token is drawn
from what is left of the target's row. A tried token is

    taken     and the walk goes on below it;
    refused   as by the exact rule: the row becomes the positive part of p - q, without the
              token where it was not drawn;
    passed    over: the row stays as it was, so that what follows is redrawn from the target.

    Threshold   confidence above the threshold: taken unchecked. Below the floor: passed. Between,
                or where the drafter does not say how sure it is: the exact rule decides.
                Confidence in a token is what the drafter says, of a drawn token at most the
                chance it was drawn with: a sure drafter may draw an unlikely token.
    Typical     taken if p(x) > min(epsilon, delta * exp(-H(p))), p being the target's whole row
                under the request's sampling; else passed. Greedy rows are one-hot: exact.
    Factor      taken with min(1, factor * p(x) / q(x)), of a token that was not drawn
                factor * p(x); else refused. What is left is the exact rule's: the draft has given
                every token at least as often as that rule lets it. At temperature 0: exact.

Beside it, at every node, the exact rule tries the same children with the same uniform numbers,
from the target's whole row. `Verdict.lenient` holds the accepted places where that rule would not
have chosen the token accepted; when greedy these are the tokens other than the target's argmax.
(The exact engine judges drawn chains as a block; counted here is the rule token by token.)

Not here: the exact rule itself (verify), choosing a rule (workloads). Sources: leniency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from localspec.core import Proposal, Verdict
from localspec.engine.distributions import Row, Rows
from localspec.engine.sampling import no_numbers, uniforms
from localspec.engine.verify import chance_of, drawn_with
from localspec.forward.tree import children
from localspec.leniency import Factor, Leniency, Threshold, Typical


class _Judgement(Enum):
    TAKEN = "taken"
    REFUSED = "refused"
    PASSED = "passed"


@dataclass(frozen=True)
class _Guess:
    """A draft token about to be judged. p: its chance in the target's whole row. q: the chance it
    was drawn with, 1 where it was not. confidence: None where the drafter says nothing."""

    token: int
    p: float
    q: float
    uniform: float
    confidence: float | None
    drawn_from: torch.Tensor | None

    def is_within(self, chance: float) -> bool:
        """The ratio test against `chance` of the token."""
        return self.uniform * self.q < chance


def verify_leniently(
    proposal: Proposal, target: Rows, rng: torch.Generator, rule: Leniency
) -> Verdict:
    """Walk down the draft as far as `rule` allows. target: as in `verify`. Host copies: those of
    `verify`, one more for the entropies of the typical rule."""
    if not proposal.tokens:
        return Verdict((), target.row(0).draw(rng))
    guesses = _guesses(proposal, target, rng)
    bars = _bars(rule, target, len(guesses) + 1)
    below = children(proposal.parents)
    said: list[float | None] = [None] * len(guesses)
    node, path, lenient = -1, list[int](), list[int]()
    while True:
        whole = target.row(node + 1)
        tried = [guesses[child] for child in below.get(node, ())]
        rank, row, odds = _choose(tried, whole, rule, bars[node + 1])
        for child, chance in zip(below.get(node, ()), odds, strict=False):
            said[child] = chance
        if rank is None:
            is_whole = not any(math.isnan(guess.p) for guess in guesses)
            return Verdict(tuple(path), row.draw(rng), tuple(lenient), tuple(said), is_whole)
        if _exact_choice(tried, whole) != tried[rank].token:
            lenient.append(len(path))
        node = below[node][rank]
        path.append(node)


def _choose(
    tried: Sequence[_Guess], whole: Row, rule: Leniency, bar: float
) -> tuple[int | None, Row, list[float]]:
    """Which of a node's children is taken, None for none of them, what is left of the row, and
    the chances of those tried."""
    row, odds = whole, list[float]()
    for rank, guess in enumerate(tried):
        p = guess.p if row is whole else row.chance(guess.token)
        if math.isnan(p):
            raise no_numbers()
        judgement = _judge(guess, p, rule, bar)
        odds.append(_odds(guess, p, rule, bar))
        if judgement is _Judgement.TAKEN:
            return rank, row, odds
        if judgement is _Judgement.REFUSED:
            row = row.without(guess.token, guess.drawn_from)
    return None, row, odds


def _judge(guess: _Guess, p: float, rule: Leniency, bar: float) -> _Judgement:
    """p: the token's chance in what is left of the row. bar: of the typical rule."""
    match rule:
        case Threshold(threshold, floor):
            if guess.confidence is not None and guess.confidence > threshold:
                return _Judgement.TAKEN
            if guess.confidence is not None and guess.confidence < floor:
                return _Judgement.PASSED
            return _Judgement.TAKEN if guess.is_within(p) else _Judgement.REFUSED
        case Typical():
            return _Judgement.TAKEN if guess.p > bar else _Judgement.PASSED
        case Factor(factor):
            return _Judgement.TAKEN if guess.is_within(factor * p) else _Judgement.REFUSED


def _odds(guess: _Guess, p: float, rule: Leniency, bar: float) -> float:
    """The chance with which `_judge` takes it."""
    match rule:
        case Threshold(threshold, floor):
            if guess.confidence is None or floor <= guess.confidence <= threshold:
                return chance_of(p, guess.q)
            return 1.0 if guess.confidence > threshold else 0.0
        case Typical():
            return 1.0 if guess.p > bar else 0.0
        case Factor(factor):
            return chance_of(factor * p, guess.q)


def _exact_choice(tried: Sequence[_Guess], whole: Row) -> int | None:
    """The token that the exact rule takes of these children, None if it takes none."""
    row = whole
    for guess in tried:
        if guess.is_within(guess.p if row is whole else row.chance(guess.token)):
            return guess.token
        row = row.without(guess.token, guess.drawn_from)
    return None


def _guesses(proposal: Proposal, target: Rows, rng: torch.Generator) -> list[_Guess]:
    p_of = target.chances([parent + 1 for parent in proposal.parents], proposal.tokens)
    q_of = drawn_with(proposal)
    chances = uniforms(len(proposal.tokens), rng)
    return [
        _Guess(
            token,
            p_of[i],
            q_of[i],
            chances[i],
            _confidence(proposal, i, q_of[i]),
            _row(proposal, i),
        )
        for i, token in enumerate(proposal.tokens)
    ]


def _confidence(proposal: Proposal, index: int, q: float) -> float | None:
    said = None if proposal.confidences is None else proposal.confidences[index]
    if proposal.probs is None:
        return said
    return q if said is None else min(said, q)


def _row(proposal: Proposal, index: int) -> torch.Tensor | None:
    return None if proposal.probs is None else proposal.probs[index]


def _bars(rule: Leniency, target: Rows, num_rows: int) -> list[float]:
    """The typical rule's bar for every row; no other rule looks at them."""
    if not isinstance(rule, Typical):
        return [0.0] * num_rows
    return [min(rule.epsilon, rule.delta * math.exp(-entropy)) for entropy in target.entropies()]
