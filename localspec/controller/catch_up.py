"""What drafters with a cache of their own have to read before they can draft, and what it takes.

Contract: `num_missed` tells how much a drafter would read in a round, `ms` what that costs;
`read` and `observe` learn from rounds. No torch.

Not here: the reading itself (the drafters), when it pays (adaptive_policy).
"""

from __future__ import annotations

from collections.abc import Mapping

from localspec.core.decoding import Sequence

IN_TARGET = "target"  # the word of drafters that read nothing: the target's own cache serves them
CATCH_UP_GUESS = 0.05  # of a drafter's step, for each token that it has to read
CATCH_UP_KEPT = 0.7  # weight of the earlier catch-ups
NEARLY_CAUGHT_UP = 8  # tokens that a draft step reads at no extra cost


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
        if self._reader(drafter) == IN_TARGET:
            return 0
        if self._sequence is not sequence:
            before = [] if self._sequence is None else self._sequence.tokens
            pairs = enumerate(zip(before, sequence.tokens, strict=False))
            shared = next((place for place, (a, b) in pairs if a != b), len(before))
            self._num_read = {name: min(read, shared) for name, read in self._num_read.items()}
            self._sequence = sequence
        missed = context + 1 - self._num_read.get(self._reader(drafter), 0)
        return missed if missed > NEARLY_CAUGHT_UP else 0

    def ms(self, drafter: str, num_missed: int, step_ms: float) -> float:
        """What reading so many tokens takes. step_ms: of the drafter."""
        read_ms, num_tokens = self._sums.get(self._reader(drafter), (CATCH_UP_GUESS * step_ms, 1.0))
        return num_missed * read_ms / num_tokens

    def read(self, drafter: str, sequence: Sequence, context: int) -> int:
        """A round at this context has read what the drafter missed; returns how much it was."""
        missed = self.num_missed(drafter, sequence, context)
        self._num_read[self._reader(drafter)] = context + 1
        return missed

    def know(self, drafter: str, sequence: Sequence, num_tokens: int) -> None:
        """A drafter need not read so many tokens of a sequence: it has kept them."""
        reader = self._shared.get(drafter, drafter)
        self.num_missed(drafter, sequence, 0)
        self._num_read[reader] = max(self._num_read.get(reader, 0), num_tokens)

    def observe(self, drafter: str, num_missed: int, extra_ms: float) -> None:
        """A round has read so many tokens, in so much more than its steps take."""
        if num_missed:
            read_ms, num_tokens = self._sums.get(self._reader(drafter), (0.0, 0.0))
            self._sums[self._reader(drafter)] = (
                CATCH_UP_KEPT * read_ms + max(0.0, extra_ms),
                CATCH_UP_KEPT * num_tokens + num_missed,
            )

    def _reader(self, drafter: str) -> str:
        return self._shared.get(drafter, drafter)
