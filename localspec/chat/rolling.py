"""Which of the oldest messages a prompt goes on without, in a chat that drops them when it is full.

Contract: pure, over a backend that counts tokens. What is kept begins with the person: chat formats
alternate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from localspec.backend import Backend, Description
from localspec.chat.context_room import check_room
from localspec.chat.journal import PendingTurn
from localspec.chat.turn import ReplySettings, ShownMessage, request_of
from localspec.errors import ContextOverflow


def fewest_left_out(roles: Sequence[str], fits: Callable[[int], bool]) -> int | None:
    """The smallest number of the oldest messages without which the rest fits; None where none
    does. roles: of all messages, the one to be answered last."""
    starts = [index for index, role in enumerate(roles) if index and role == "user"]
    found = bisect_left(starts, True, key=fits)
    return starts[found] if found < len(starts) else None


def rolled(
    backend: Backend,
    loaded: Description,
    settings: ReplySettings,
    shown: list[ShownMessage],
    turn: PendingTurn,
) -> ReplySettings:
    """The settings with as many messages left out as it takes by now, where that helps. shown: up
    to the message that is answered. Raises RequestError, EngineLost."""

    def fits(num_left_out: int) -> bool:
        request = request_of(replace(settings, num_left_out=num_left_out), shown, turn)
        try:
            check_room(backend, loaded, request)
        except ContextOverflow:
            return False
        return True

    if fits(settings.num_left_out):
        return settings
    fewest = fewest_left_out([one.role for one in shown], fits)
    return settings if fewest is None else replace(settings, num_left_out=fewest)
