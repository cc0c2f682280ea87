"""How full the context would be, and what would fit when it is too much.

Contract: counts only; nothing is ever cut here. The person chooses, and the choice comes back as
`num_left_out` or a smaller `max_tokens` (extras).

Not here: the counting itself (chat/service), the dialog (static/chat.js).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localspec.chat.service import ChatService, ReplySettings
from localspec.errors import ContextOverflow

SHORTEST_REPLY = 16  # tokens; a choice that leaves less room than this is not offered


def counted(
    service: ChatService, handle: int | None, text: str, settings: ReplySettings
) -> dict[str, Any] | None:
    """The figures of the gauge; None while the model that counts is not loaded."""
    gauge = service.context_usage(handle, text, settings)
    if gauge is None:
        return None
    return {
        "used": gauge.num_tokens,
        "reply": gauge.num_reply_tokens,
        "context": gauge.context_length,
        "left_out": settings.num_left_out,
    }


def overflow(
    service: ChatService,
    handle: int | None,
    text: str,
    settings: ReplySettings,
    error: ContextOverflow,
) -> dict[str, Any]:
    """What the dialog says, and the choices that would fit."""
    room = error.context_length - error.num_prompt_tokens
    return {
        "sentence": str(error),
        "is_by_system_prompt": error.is_by_system_prompt,
        "prompt": error.num_prompt_tokens,
        "reply": error.max_tokens,
        "context": error.context_length,
        "room": room if room >= SHORTEST_REPLY else None,
        "left_out": _fitting(service, handle, text, settings),
    }


def _fitting(
    service: ChatService, handle: int | None, text: str, settings: ReplySettings
) -> int | None:
    """The fewest of the oldest messages without which the rest fits; None where none does."""
    shown = service.messages(handle)
    # What is kept begins with the person: chat formats alternate.
    starts = [index for index, one in enumerate(shown) if index and one.role == "user"]
    if text:
        starts.append(len(shown))
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        if _fits(service, handle, text, replace(settings, num_left_out=starts[middle])):
            high = middle
        else:
            low = middle + 1
    return starts[low] if low < len(starts) else None


def _fits(service: ChatService, handle: int | None, text: str, settings: ReplySettings) -> bool:
    figures = counted(service, handle, text, settings)
    return figures is not None and figures["used"] + figures["reply"] <= figures["context"]
