"""The text of single tokens, and what became of the tokens that a round drafted.

Contract: `of` is a token as it stands inside a text, remembered for each id, so that naming the
tokens of a round takes microseconds; a token that is only a part of a character is U+FFFD, a
control token "". `pieces` is exact: joined, they are the text of the whole.

Not here: the text of a reply as it grows (template.Detokenizer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localspec.backend import DraftedToken, DraftOutcome
from localspec.chat.template import REPLACEMENT, Detokenizer
from localspec.core import Round


class Speller(Protocol):
    """Of a ChatTemplate what is needed here."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def detokenizer(self) -> Detokenizer: ...


class TokenTexts:
    """See the module."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._found(token)
        return known

    def pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """The text that each token completes, "" for one inside a character. The last one takes
        what is left."""
        detokenizer = self._speller.detokenizer()
        found = [detokenizer.push(token) for token in tokens]
        if found:
            found[-1] += detokenizer.flush()
        return tuple(found)

    def _found(self, token: int) -> str:
        """Its text after itself: at the beginning some tokenizers drop a leading space."""
        alone = self._speller.decode((token,))
        if REPLACEMENT in alone:
            return REPLACEMENT
        return self._speller.decode((token, token))[len(alone) :]


def drafted_tokens(found: Round, texts: TokenTexts) -> tuple[DraftedToken, ...]:
    """What a round proposed. found: already cut to what the reply took of it."""
    proposal, verdict = found.proposal, found.verdict
    if proposal is None or verdict is None or not proposal.tokens:
        return ()
    size = len(proposal.tokens)
    taken = {-1, *verdict.path[: found.step.num_accepted_tokens]}
    ended = set(verdict.path) - taken  # accepted, but the reply had ended before
    confidences = proposal.confidences or (None,) * size
    chances = verdict.chances or (None,) * size
    drafted = []
    for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        outcome: DraftOutcome = "not_reached"
        if node in taken:
            outcome = "accepted"
        elif chances[node] is not None and parent in taken and node not in ended:
            outcome = "rejected"
        # Most of a tree is never looked at, and new tokens cost a look into the tokenizer.
        text = "" if outcome == "not_reached" else texts.of(token)
        drafted.append(DraftedToken(token, text, parent, confidences[node], chances[node], outcome))
    return tuple(drafted)
