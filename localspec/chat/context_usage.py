"""How full the context is: what the conversation and a message being typed would take.

Contract: counted by the backend's own tokenizer and chat format, before anything is sent. None
while no model is loaded, or where the chat format refuses the conversation.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.backend import Backend, Description, Message
from localspec.chat.turn import ReplySettings, ShownMessage, clean, prompt_messages
from localspec.errors import EngineLost, RequestError


@dataclass(frozen=True)
class Gauge:
    """num_tokens: of the conversation with the message; num_reply_tokens: kept for the reply."""

    num_tokens: int
    num_reply_tokens: int
    context_length: int

    @property
    def is_over(self) -> bool:
        return self.num_tokens + self.num_reply_tokens > self.context_length


def gauge(
    backend: Backend | None,
    loaded: Description | None,
    shown: list[ShownMessage],
    text: str,
    settings: ReplySettings,
) -> Gauge | None:
    if backend is None or loaded is None:
        return None
    messages = prompt_messages(settings.system_prompt, shown[settings.num_left_out :])
    if text.strip() or not shown:  # no chat format renders a system prompt alone
        messages = (*messages, Message("user", clean(text)))
    try:
        num_tokens = backend.count_tokens(messages)
    except (EngineLost, RequestError):
        return None
    return Gauge(num_tokens, settings.max_tokens, loaded.context_length)
