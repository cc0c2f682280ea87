"""Without which of the oldest messages a prompt fits a context that is full.

Contract: pure, over a backend that counts tokens. What is kept begins with the person: chat formats
alternate.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace
from functools import partial

from localspec.chat.backend_lifecycle import BackendLifecycle
from localspec.chat.context_room import check_room
from localspec.chat.journal import PendingTurn
from localspec.chat.turn import ReplySettings, ShownMessage, request_of
from localspec.core.errors import ContextOverflow, EngineLost, RequestError

# The share of a full context that going on without the oldest messages frees at once. What stands
# behind them moves, so the model reads it again: this way seldom, and not at every message.
SPARE_SHARE = 0.25


def fewest_left_out(
    lifecycle: BackendLifecycle,
    settings: ReplySettings,
    shown: list[ShownMessage],
    turn: PendingTurn,
    spare: float = 0.0,
) -> int | None:
    """The smallest number of the oldest messages without which the prompt of this turn fits, no
    fewer than the settings say; None where none does, or the engine cannot tell. shown: up to the
    message that is answered. spare: the share of the context that is to be free behind the reply
    where more messages have to go, and some messages fit so."""
    backend, loaded = lifecycle.backend, lifecycle.loaded
    if backend is None or loaded is None:
        return None
    num_spare = int(spare * (loaded.context_length or 0))

    def fits(num_left_out: int, num_spare: int = 0) -> bool:
        most = settings.max_tokens
        if num_spare:
            most = (most or 1) + num_spare
        changed = replace(settings, num_left_out=num_left_out, max_tokens=most)
        request = request_of(changed, shown, turn)
        try:
            check_room(backend, loaded, request)
        except ContextOverflow:
            return False
        return True

    starts = [place for place, one in enumerate(shown) if place and one.role == "user"]
    with suppress(EngineLost, RequestError):  # whoever asks for the reply is told
        if fits(settings.num_left_out):
            return settings.num_left_out
        for spared in dict.fromkeys((num_spare, 0)):
            found = bisect_left(starts, True, key=partial(fits, num_spare=spared))
            if found < len(starts):
                return starts[found]
    return None
