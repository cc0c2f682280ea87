"""A world that controllers are tried in: what each drafter gets right at each place of a text, and
what rounds cost.

A `World` is plain data, the same for every policy that plays it. At each position of its text every
drafter's guess, given that all before it is right, is right or wrong; a draft is accepted up to its
first wrong guess. For a draft model this is greedy decoding itself, for a lookup it is an
approximation: its guess also depends on where the draft began. A track with `reach` says instead
how far a draft from each position is right, so that acceptance can fall by the position in the
draft.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Track:
    """One drafter along the text, a value for each position. signals: None where it has nothing
    to propose. confidences: None for a drafter that has none. reach: how many tokens of a draft
    from this position are right; None: as many as is_right says."""

    signals: tuple[Hashable, ...]
    is_right: tuple[bool, ...]
    confidences: tuple[float, ...] | None = None
    reach: tuple[int, ...] | None = None

    def num_right(self, place: int, length: int) -> int:
        """Tokens of a draft of this length that would be accepted from `place` on."""
        if self.reach is not None:
            return min(length, self.reach[place])
        run = self.is_right[place : place + length]
        return len(run) if all(run) else run.index(False)


@dataclass(frozen=True)
class Stretch:
    """One turn: `length` tokens of the text from `start`, after a prompt. workload: its kind of
    text, as the controller is told."""

    start: int
    length: int
    prompt_length: int
    workload: str = ""


@dataclass(frozen=True)
class World:
    """costs: what rounds really cost, as a snapshot of a cost table. believed: what a controller
    starts from, None for the same. slow: (first place, last place, times as slow) where the
    machine is busy with something else. shipped: a snapshot of the acceptance that comes with the
    models, measured on other texts. catch_up: of a drafter's step, for each token that it has to
    read before it drafts again. max_tokens: that a reply may have, None: as many as it has.
    lookups: names of drafters that may append to the chains of others."""

    name: str
    tracks: Mapping[str, Track]
    turns: tuple[Stretch, ...]
    costs: Mapping[str, Any]
    believed: Mapping[str, Any] | None = None
    temperature: float = 0.0
    slow: tuple[int, int, float] | None = None
    shipped: Mapping[str, Any] | None = None
    catch_up: float = 0.0
    max_tokens: int | None = None
    lookups: frozenset[str] = frozenset()

    def slowness(self, place: int) -> float:
        if self.slow is None:
            return 1.0
        first, last, times = self.slow
        return times if first <= place < last else 1.0

    @property
    def priced(self) -> list[str]:
        """The drafters whose steps have a price."""
        return [name for name in self.tracks if name in self.costs["draft_step_ms"]]

    @property
    def num_tokens(self) -> int:
        return sum(turn.length for turn in self.turns)
