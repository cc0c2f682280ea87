"""Lookup drafting: what followed the last few tokens when they stood here before.

Contract: proposes a deterministic chain (no probs) copied from earlier in the sequence, that
is from the prompt, earlier turns and the reply so far. The longest match of up to
MAX_MATCH tokens wins, among equals the most recent. The match length is the drafter's
`signal`: acceptance is learnt apart for each class of it. The index grows with the sequence, a
few dictionary writes a token. Holds no weights.

Source: prompt lookup decoding (Saxena 2023), with the most recent match first.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.core import DraftPlan, Proposal, Sequence, Step, chain
from localspec.drafters.parts import Parts
from localspec.forward.cache import common_prefix_length

MAX_MATCH = 24  # beyond this a longer match says nothing more
MIN_MATCH = 2
MAX_CANDIDATES = 64  # bounds the search in text that repeats one pair of tokens for ever
CLASSES = ((2, "2"), (4, "3-4"), (8, "5-8"), (16, "9-16"))


def match_class(length: int) -> str:
    """The bucket of match lengths that `length` falls into."""
    return next((name for bound, name in CLASSES if length <= bound), "17+")


@dataclass(frozen=True)
class Match:
    """Where the copied text starts, and how many tokens before it agree."""

    position: int
    length: int


class NgramDrafter:
    """Suffix lookup over one sequence."""

    name = "ngram"

    def __init__(self) -> None:
        self._indexed: list[int] = []
        # For each pair of neighbouring tokens every position right after it, oldest first. Longer
        # matches are read off the tokens themselves, so one index serves all lengths.
        self._after: dict[tuple[int, int], list[int]] = {}
        self._source: list[int] | None = None  # the list that was indexed, to know it again
        self._found: tuple[int, Match | None] = (-1, None)

    @classmethod
    def build(cls, parts: Parts) -> NgramDrafter:
        return cls()

    @property
    def memory_bytes(self) -> int:
        return 0

    def signal(self, sequence: Sequence) -> str | None:
        match = self._match(sequence)
        return None if match is None else match_class(match.length)

    def prepare(self, sequence: Sequence) -> None:
        self._index(sequence.tokens)

    def foresee(self, sequence: Sequence) -> tuple[int, ...]:
        match = self._match(sequence)
        return () if match is None else tuple(self._copy(sequence.tokens, match.position, 8))

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        match = self._match(sequence)
        if match is None:
            return Proposal()
        copied = self._copy(sequence.tokens, match.position, plan.num_draft_tokens)
        return chain(tuple(copied))

    def observe(self, sequence: Sequence, step: Step) -> None:
        """Nothing: the index is brought up to date when it is next asked."""

    def _copy(self, tokens: list[int], position: int, count: int) -> list[int]:
        """`count` tokens from `position`; where the text ends the copy repeats itself."""
        period = len(tokens) - position
        return [tokens[position + offset % period] for offset in range(count)]

    def _match(self, sequence: Sequence) -> Match | None:
        length = len(sequence.tokens)
        self._index(sequence.tokens)
        if self._found[0] != length:
            self._found = (length, self._longest(sequence.tokens))
        return self._found[1]

    def _longest(self, tokens: list[int]) -> Match | None:
        if len(tokens) <= MIN_MATCH:
            return None
        best: Match | None = None
        places = self._after.get((tokens[-2], tokens[-1]), [])
        for position in reversed(places[-1 - MAX_CANDIDATES : -1]):  # the last is the suffix itself
            length = _agreement(tokens, position)
            if best is None or length > best.length:
                best = Match(position, length)
            if length >= MAX_MATCH:
                break
        return best

    def _index(self, tokens: list[int]) -> None:
        # Within a turn the list only grows, so the comparison is needed once a turn.
        if tokens is not self._source:
            self._forget(common_prefix_length(self._indexed, tokens))
            self._source = tokens
        for end in range(max(2, len(self._indexed) + 1), len(tokens) + 1):
            self._after.setdefault((tokens[end - 2], tokens[end - 1]), []).append(end)
        if len(tokens) != len(self._indexed):
            self._indexed.extend(tokens[len(self._indexed) :])
            self._found = (-1, None)

    def _forget(self, length: int) -> None:
        """Drop every position beyond the first `length` tokens."""
        for end in range(len(self._indexed), max(1, length), -1):
            self._after[(self._indexed[end - 2], self._indexed[end - 1])].pop()
        del self._indexed[length:]
        self._found = (-1, None)


def _agreement(tokens: list[int], position: int) -> int:
    """How many tokens before `position` equal the last tokens, up to MAX_MATCH."""
    limit = min(MAX_MATCH, position)
    length = MIN_MATCH
    while length < limit and tokens[position - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
