"""Without which of the oldest messages a prompt fits a context that is full.

Contract: pure, over a backend that counts tokens. What is kept begins with the person: chat formats
alternate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from localspec.chat.backend_lifecycle import BackendLifecycle
from localspec.chat.context_room import check_room
from localspec.chat.journal import PendingTurn
from localspec.chat.turn import ReplySettings, ShownMessage, request_of
from localspec.errors import ContextOverflow, EngineLost, RequestError


def fewest_left_out(roles: Sequence[str], fits: Callable[[int], bool]) -> int | None:
    """The smallest number of the oldest messages without which the rest fits; None where none
    does. roles: of all messages, the one to be answered last."""
    starts = [index for index, role in enumerate(roles) if index and role == "user"]
    found = bisect_left(starts, True, key=fits)
    return starts[found] if found < len(starts) else None


def fewest_for(
    lifecycle: BackendLifecycle,
    settings: ReplySettings,
    shown: list[ShownMessage],
    turn: PendingTurn,
) -> int | None:
    """As `fewest_left_out`, for the prompt of this turn; no fewer than the settings say. None also
    where the engine cannot tell. shown: up to the message that is answered."""
    backend, loaded = lifecycle.backend, lifecycle.loaded
    if backend is None or loaded is None:
        return None

    def fits(num_left_out: int) -> bool:
        request = request_of(replace(settings, num_left_out=num_left_out), shown, turn)
        try:
            check_room(backend, loaded, request)
        except ContextOverflow:
            return False
        return True

    with suppress(EngineLost, RequestError):  # whoever asks for the reply is told
        if fits(settings.num_left_out):
            return settings.num_left_out
        return fewest_left_out([one.role for one in shown], fits)
    return None


def rolled(
    lifecycle: BackendLifecycle,
    settings: ReplySettings,
    shown: list[ShownMessage],
    turn: PendingTurn,
) -> ReplySettings:
    """The settings with as many messages left out as it takes by now, where that helps."""
    fewest = fewest_for(lifecycle, settings, shown, turn)
    return settings if fewest is None else replace(settings, num_left_out=fewest)
