"""The time that one drafter at one length takes for the text of a world, without a game.

It is what `play_fixed` gives, by a loop that plays nothing: the best fixed arm of a world is found
among dozens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from localspec.controller.costs import MAX_DRAFT_TOKENS, Costs
from localspec.core.decoding import OFF
from tests.worlds.world import Stretch, World


class FixedArms:
    """The fixed arms of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        truth = Costs.restored(world.costs)
        self._verify_ms = cache(lambda width, context: truth.verify_ms(width, context) or 0.0)
        self._step_ms = cache(lambda name, context: truth.draft_ms(name, 1, context) or 0.0)

    def rate(self, drafter: str, length: int) -> float:
        """Return the tokens per second of the whole text."""
        return 1000.0 * self._world.num_tokens / self.ms(self._world.turns, drafter, length)

    def rate_by_kind(self) -> float:
        """Return the tokens per second of the best arm, chosen for each kind of text."""
        world, best_ms = self._world, 0.0
        arms = [(OFF, 0), *((n, g) for n in world.priced for g in range(1, MAX_DRAFT_TOKENS + 1))]
        for kind in {turn.workload for turn in world.turns}:
            turns = [turn for turn in world.turns if turn.workload == kind]
            best_ms += min(self.ms(turns, *arm) for arm in arms)
        return 1000.0 * world.num_tokens / best_ms

    def ms(self, turns: Iterable[Stretch], drafter: str, length: int) -> float:
        return sum(self._turn_ms(turn, drafter, length) for turn in turns)

    def _turn_ms(self, turn: Stretch, drafter: str, length: int) -> float:
        world, total_ms, num_read = self._world, 0.0, 0
        track = world.tracks[drafter] if length else None
        place, end = turn.start, turn.start + turn.length
        most = turn.start + (world.max_tokens or turn.length) - 1  # draft no last token
        while place < end:
            count, num_right, context = 0, 0, place - turn.start + turn.prompt_length - 1
            if track is not None and track.signals[place] is not None:
                count = max(0, min(length, most - place, end - place))
            round_ms = self._verify_ms(count + 1, context)
            if count and track is not None:
                num_steps = count + world.catch_up * (context + 1 - num_read)
                round_ms += num_steps * self._step_ms(drafter, context)
                num_read, num_right = context + 1, track.num_right(place, count)
            total_ms += round_ms * world.slowness(place)
            place += 1 + num_right
        return total_ms
