"""What drafters with a cache of their own have to read before they can draft, and what it takes.

Contract: `num_missed` tells how much a drafter would read in a round, `ms` what that costs;
`read` and `observe` learn from rounds. No torch.

Not here: the reading itself (the drafters), when it pays (adaptive_policy).
"""

from __future__ import annotations

from collections.abc import Mapping

from localspec.core.decoding import Sequence

IN_TARGET = "target"  # the word of drafters that read nothing: the target's own cache serves them
CATCH_UP_GUESS = 0.05  # Reading a token is believed to take this share of a drafter's step.
CATCH_UP_KEPT = 0.7  # The weight of earlier catch-ups after one more.
NEARLY_CAUGHT_UP = 8  # A draft step reads so many tokens at no extra cost.


class CatchUp:
    """What each drafter has not read yet, and the time that a token of it takes. Reading is no part
    of a drafter's steps: it is paid once, for all rounds of a turn. Drafters that share a model
    read a text once.

    shared: drafter -> a word that is the same for all drafters with that model, IN_TARGET for those
    that draft on what the target has read."""

    def __init__(self, shared: Mapping[str, str]) -> None:
        self._shared = shared
        self._sequence: Sequence | None = None  # that was read
        # By the word of a shared model, or by the drafter:
        self._num_read: dict[str, int] = {}
        self._sums: dict[str, tuple[float, float]] = {}  # ms, and tokens read in it

    def beside(self) -> CatchUp:
        """For drafters of the same models with caches of their own: what reading takes is shared,
        what was read is not."""
        found = CatchUp(self._shared)
        found._sums = self._sums
        return found

    def num_missed(self, drafter: str, sequence: Sequence, context: int) -> int:
        """Tokens that the drafter reads first in a round at this context; 0 for so few that a step
        reads them at no extra cost. Of another sequence it keeps what both begin with."""
        reader = self._shared.get(drafter, drafter)
        if reader == IN_TARGET:
            return 0
        if self._sequence is not sequence:
            self._turn_to(sequence)
        missed = context + 1 - self._num_read.get(reader, 0)
        return missed if missed > NEARLY_CAUGHT_UP else 0

    def _turn_to(self, sequence: Sequence) -> None:
        before = [] if self._sequence is None else self._sequence.tokens
        pairs = enumerate(zip(before, sequence.tokens, strict=False))
        shared = next((place for place, (a, b) in pairs if a != b), len(before))
        self._num_read = {name: min(read, shared) for name, read in self._num_read.items()}
        self._sequence = sequence

    def ms(self, drafter: str, num_missed: int, step_ms: float) -> float:
        """What reading so many tokens takes. step_ms: of the drafter."""
        if not num_missed:
            return 0.0
        guess = CATCH_UP_GUESS * step_ms, 1.0
        read_ms, num_tokens = self._sums.get(self._shared.get(drafter, drafter), guess)
        return num_missed * read_ms / num_tokens

    def read(self, drafter: str, sequence: Sequence, context: int) -> int:
        """A round at this context has read what the drafter missed; returns how much it was."""
        missed, reader = (
            self.num_missed(drafter, sequence, context),
            self._shared.get(drafter, drafter),
        )
        self._num_read[reader] = context + 1
        return missed

    def know(self, drafter: str, sequence: Sequence, num_tokens: int) -> None:
        """A drafter need not read so many tokens of a sequence: it has kept them."""
        reader = self._shared.get(drafter, drafter)
        self.num_missed(drafter, sequence, 0)
        self._num_read[reader] = max(self._num_read.get(reader, 0), num_tokens)

    def observe(self, drafter: str, num_missed: int, extra_ms: float) -> None:
        """A round has read so many tokens, in so much more than its steps take."""
        if num_missed:
            reader = self._shared.get(drafter, drafter)
            read_ms, num_tokens = self._sums.get(reader, (0.0, 0.0))
            self._sums[reader] = (
                CATCH_UP_KEPT * read_ms + max(0.0, extra_ms),
                CATCH_UP_KEPT * num_tokens + num_missed,
            )
