"""Without which of the oldest messages a prompt fits a context that is full.

Contract: pure, over a backend that counts tokens. What is kept begins with the person: chat formats
alternate.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace

from localspec.chat.backend_lifecycle import BackendLifecycle
from localspec.chat.context_room import check_room
from localspec.chat.journal import PendingTurn
from localspec.chat.turn import ReplySettings, ShownMessage, request_of
from localspec.core.errors import ContextOverflow, EngineLost, RequestError


def fewest_left_out(
    lifecycle: BackendLifecycle,
    settings: ReplySettings,
    shown: list[ShownMessage],
    turn: PendingTurn,
) -> int | None:
    """The smallest number of the oldest messages without which the prompt of this turn fits, no
    fewer than the settings say; None where none does, or the engine cannot tell. shown: up to the
    message that is answered."""
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

    starts = [place for place, one in enumerate(shown) if place and one.role == "user"]
    with suppress(EngineLost, RequestError):  # whoever asks for the reply is told
        if fits(settings.num_left_out):
            return settings.num_left_out
        found = bisect_left(starts, True, key=fits)
        return starts[found] if found < len(starts) else None
    return None
