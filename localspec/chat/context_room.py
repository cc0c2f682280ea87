"""Whether a request has room in the context.

Contract: pure, over a backend that counts tokens.
"""

from __future__ import annotations

from localspec.backend import Backend, Message, Request
from localspec.errors import ContextOverflow


def max_tokens_of(
    backend: Backend, request: Request, num_prompt_tokens: int, context_length: int
) -> int:
    """How many tokens the reply may take. Raises ContextOverflow where the context has not as many
    left."""
    room = context_length - num_prompt_tokens
    wanted = max(1, room) if request.max_tokens is None else request.max_tokens
    if wanted > room:
        num_system = _num_system_tokens(backend, request.messages)
        raise ContextOverflow(num_prompt_tokens, wanted, context_length, num_system)
    return wanted


def _num_system_tokens(backend: Backend, messages: tuple[Message, ...]) -> int:
    """Tokens of the system prompt that a conversation begins with."""
    system = [one for one in messages[:1] if one.role == "system"]
    # No chat format renders a system prompt alone.
    return backend.count_tokens((*system, Message("user", "-"))) if system else 0
