"""A finished reply as a test of every drafter.

Under one noise the target's choice at a place depends on the text before it alone. So what a
drafter would have had accepted of a written reply can be told without running the target.

A drafter says so by `review`: it reads what it needs of the reply, and gives a drafter that answers
`signal` and `propose` for any place of it, asked with the text up to there.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from localspec.core.decoding import Drafter, Sequence

# It yields one pass at a time (forward.passes), and goes on with what that gives.
ReviewSteps = Generator[Any, Any, Drafter]


@runtime_checkable
class Reviewing(Protocol):
    """What a drafter offers beside the protocol `Drafter` if it can be judged in hindsight."""

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """Return the steps that read a finished reply; their result drafts at any place of it as
        this drafter would have. None if that cannot be told. The target's cache holds all tokens of
        the sequence but the last, and must be left so."""
        ...


def beginning_of(sequence: Sequence) -> Sequence:
    """Return the sequence as it was before its reply."""
    return Sequence(
        tuple(sequence.tokens[: sequence.prompt_length]),
        sequence.sampling,
        sequence.max_tokens,
        sequence.end_ids,
        sequence.noise,
        sequence.num_logprobs,
        sequence.prediction,
        sequence.grammar,
        sequence.thought,
    )


@dataclass(frozen=True)
class Hindsight:
    """One drafter over one reply: the rounds that it would have run alone, with lengths of the
    controller's choice.

    num_output_tokens: of the reply, as far as it was judged. decode_ms, plain_decode_ms: of these
    rounds and of plain decoding for the same tokens, by the costs measured on this machine, with
    the reading of the prompt that the drafter missed; None while they are not measured."""

    drafter: str
    num_output_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    decode_ms: float | None
    plain_decode_ms: float | None

    @property
    def has_lost(self) -> bool:
        """Whether plain decoding would have been faster; False if that is not known."""
        if self.decode_ms is None or self.plain_decode_ms is None:
            return False
        return self.decode_ms > self.plain_decode_ms
