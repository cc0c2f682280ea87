"""How full the context is, and whether a request has room in it.

Contract: pure, over a backend that counts tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from localspec.core.backend import Backend, Description, DrafterStatus, Message, Request
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import ContextOverflow, EngineLost, NotCounted, RequestError
from localspec.core.units import capital
from localspec.drafters.registry import label_of


@dataclass(frozen=True)
class ContextUsage:
    """How full the context would be. num_tokens: of the conversation with the message being typed,
    without its num_left_out oldest messages. num_reply_tokens: reserved for the reply."""

    num_tokens: int
    num_reply_tokens: int
    context_length: int
    num_left_out: int


def max_tokens_of(
    backend: Backend, request: Request, num_prompt_tokens: int, context_length: int
) -> int:
    """How many tokens the reply may take. Raises ContextOverflow where the context has not as many
    left; a ceiling is lowered to what it has."""
    room = context_length - num_prompt_tokens
    wanted = max(1, room) if request.max_tokens is None else request.max_tokens
    if request.is_ceiling:
        wanted = min(wanted, max(1, room))
    if wanted > room:
        num_system = _num_system_tokens(backend, request.messages)
        raise ContextOverflow(num_prompt_tokens, wanted, context_length, num_system)
    return wanted


def _num_system_tokens(backend: Backend, messages: tuple[Message, ...]) -> int:
    """Tokens of the system prompt that a conversation begins with."""
    system = [one for one in messages[:1] if one.role == "system"]
    with suppress(NotCounted):
        # No chat format renders a system prompt alone.
        return backend.count_tokens((*system, Message("user", "-"))) if system else 0
    return 0


def check_servable(backend: Backend, loaded: Description, request: Request) -> None:
    """Raise RequestError or ContextOverflow, with the reason, for a request that cannot be
    served."""
    if loaded.server is None:
        check_drafter(loaded.drafters, request.drafter)
    check_calls(loaded.call_format, request)
    if not request.is_raw:
        check_room(backend, loaded, request)


def check_drafter(drafters: Sequence[DrafterStatus], name: str) -> None:
    """Raise RequestError for a drafter that cannot be asked for."""
    if name in (AUTO, OFF):
        return
    known = {one.name: one for one in drafters}
    if name not in known:
        raise RequestError(
            f"There is no drafter called {name!r}. Choose one of: "
            f"{', '.join((AUTO, OFF, *known))}.",
            "drafter",
        )
    if not known[name].is_available:
        named = label_of(name)
        raise RequestError(f"{capital(named)} cannot draft here: {known[name].reason}", "drafter")


def check_calls(call_format: str | None, request: Request) -> None:
    """Raise RequestError for tools whose calls could not be told from the text of the reply."""
    if call_format is None and request.tools and not request.grammar:
        raise RequestError(
            "This model writes calls of tools in a format that localspec does not read, so they "
            "would come as text. Force a call by tool_choice, ask without tools, or load another "
            "model.",
            "tools",
        )


def check_room(backend: Backend, loaded: Description, request: Request) -> None:
    """Raise ContextOverflow where the context has no room for the reply. A server that does not
    tell its context, or the length of a prompt, refuses by itself."""
    if loaded.context_length is None:
        return
    try:
        num_prompt_tokens = backend.count_tokens(request.messages, request.tools)
    except NotCounted:
        return
    max_tokens_of(backend, request, num_prompt_tokens, loaded.context_length)


def count_prompt(backend: Backend | None, messages: tuple[Message, ...]) -> int | None:
    """Tokens of a conversation as a prompt. None while nothing that counts is loaded, or where the
    chat format refuses the conversation."""
    with suppress(EngineLost, RequestError):
        return None if backend is None else backend.count_tokens(messages)
    return None
