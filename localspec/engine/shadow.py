"""Scores the guess of a drafter that was not used against what came.

Contract: of drafters whose guess is free (`foresee`) one guess at a time is held; when the text
has reached or contradicted it, acceptance learns as if it had been drafted. One of a turn.

Not here: who is used (policy). Source: scoring what was not used is full information as in
arXiv 2510.20064.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.core import Sequence

if TYPE_CHECKING:
    from localspec.engine.acceptance import Situation
    from localspec.engine.controller import Controller, Option


@dataclass(frozen=True)
class _Guess:
    """start: length of the sequence when it was made."""

    option: Option
    start: int
    tokens: tuple[int, ...]


class Shadow:
    """Of one turn."""

    def __init__(self, controller: Controller, situation: Situation) -> None:
        self._controller = controller
        self._situation = situation
        self._held: _Guess | None = None

    def cast(self, sequence: Sequence, options: Iterable[Option], used: str) -> None:
        """Note what the first unused drafter that knows for nothing would have said."""
        if self._held is not None and self._held.option.drafter == used:
            self._held = None  # its own rounds count from here on
        if self._held is not None:
            return
        for option in options:
            if option.drafter == used:
                continue
            guess = self._controller.drafters[option.drafter].foresee(sequence)
            if guess:
                self._held = _Guess(option, len(sequence.tokens), guess)
                return

    def score(self, sequence: Sequence) -> None:
        """Compare what came since with the guess, once that decides it."""
        if self._held is None:
            return
        option, start, guess = self._held.option, self._held.start, self._held.tokens
        came = sequence.tokens[start : start + len(guess)]
        pairs = enumerate(zip(came, guess, strict=False))
        agreed = next((i for i, (a, b) in pairs if a != b), len(came))
        if agreed == len(came) < len(guess):
            return  # not decided yet
        self._held = None
        self._controller.acceptance.observe(
            option.drafter,
            option.signal,
            self._situation,
            len(guess),
            agreed,
            option.round_ms,
            num_used=option.num_draft_tokens,
            num_steps=1,
        )
