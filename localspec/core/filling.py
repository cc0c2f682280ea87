"""A lookup goes on where the chain of another drafter ends.

The controller prices it (`Filling`). A drafter that can do it is a `Filler`. The tokens that it
appends are a `Fill`, a draft of the filler's own: the filler learns from it, and the page names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from localspec.core.decoding import Growth, Proposal, Sequence, Step, chain


@dataclass(frozen=True)
class Fill:
    """The chain that `drafter` appends to the chain of another drafter. signal: what it knew at the
    place where its tokens begin (see Drafter.signal)."""

    drafter: str
    signal: Hashable
    draft: Proposal


@dataclass(frozen=True)
class Filling:
    """The prices at which a `Filler` may append tokens to the chain of another drafter.

    drafter: the name of the filler. num_tokens: the most draft tokens of the round, those of the
    chain included. own_chance(confidence): the estimated chance that a token of the chain is
    accepted, given that the token before it was. growth: the filler's own prices."""

    drafter: str
    num_tokens: int
    own_chance: Callable[[float], float]
    growth: Growth

    def shortened(self, limit: int) -> Filling:
        """Return the same prices for at most `limit` draft tokens in the round."""
        return self if self.num_tokens <= limit else replace(self, num_tokens=limit)

    def paid(self, proposal: Proposal, followers: Iterable[tuple[int, float]]) -> Proposal:
        """Return the first followers, each a token and its confidence, that pay for their places
        behind `proposal`. A token pays while the chance that it is reached and right exceeds the
        price of its place."""
        said = proposal.confidences or ()
        worth = math.prod(map(self.own_chance, said))
        tokens, confidences = list[int](), list[float]()
        prices = self.growth.node_prices[len(said) : self.num_tokens]
        for price, (token, confidence) in zip(prices, followers, strict=False):
            worth *= self.growth.chance(confidence)
            if worth <= price:
                break
            tokens.append(token)
            confidences.append(confidence)
        return replace(chain(tuple(tokens), tuple(confidences)), num_steps=1)


@runtime_checkable
class Filler(Protocol):
    """A drafter that can also append tokens to the chain of another drafter, at no step of its own:
    a lookup."""

    name: str

    def fill(self, sequence: Sequence, proposal: Proposal, filling: Filling) -> Fill:
        """Return the tokens that may follow `proposal` and pay for their places; none is allowed.
        proposal: a chain with confidences."""
        ...


def filled(proposal: Proposal, drafter: str, fill: Fill) -> Proposal:
    """Return the chain of `drafter` with the chain of a filler behind it."""
    draft = fill.draft
    if not draft.tokens:
        return proposal
    confidences = (proposal.confidences or ()) + (draft.confidences or ())
    makers = proposal.makers or (drafter,) * len(proposal.tokens)
    return replace(
        chain(proposal.tokens + draft.tokens, confidences),
        num_steps=proposal.num_draft_steps,
        makers=makers + (fill.drafter,) * len(draft.tokens),
        fill=fill,
    )


def own_part(proposal: Proposal) -> Proposal:
    """Return the proposal without the tokens that a filler appended."""
    if proposal.fill is None:
        return proposal
    num_own = len(proposal.tokens) - len(proposal.fill.draft.tokens)
    return replace(
        proposal,
        tokens=proposal.tokens[:num_own],
        parents=proposal.parents[:num_own],
        confidences=proposal.confidences and proposal.confidences[:num_own],
        makers=proposal.makers[:num_own],
        fill=None,
    )


class Guesses(NamedTuple):
    """The draft tokens of one drafter: proposed, checked, and accepted."""

    num_draft_tokens: int
    num_checked_tokens: int
    num_accepted_tokens: int


def guesses_of(step: Step) -> Mapping[str, Guesses]:
    """Return the draft tokens of the round by the drafter that they come from."""
    whole = Guesses(step.num_draft_tokens, step.num_checked_tokens, step.num_accepted_tokens)
    if step.filler is None:
        return {step.drafter: whole}
    own, filled = parted(whole, step.num_filled_tokens)
    return {step.drafter: own, step.filler: filled}


def parted(whole: Guesses, num_filled_tokens: int) -> tuple[Guesses, Guesses]:
    """Return the drafter's own part of a chain, and the filler's part behind it."""
    num_own = whole.num_draft_tokens - num_filled_tokens
    own = Guesses(*(min(count, num_own) for count in whole))
    return own, Guesses(*(max(0, count - num_own) for count in whole))
