"""/tokenize, as vLLM's clients speak it: the ids of a text, or of a chat as the model reads it.

Source: docs.vllm.ai, "OpenAI-Compatible Server", Tokenizer API.
"""

from __future__ import annotations

from pydantic import Field

from localspec.api.chat_completions import ChatFields, ChatMessage
from localspec.api.faults import refusal
from localspec.chat.service import clean
from localspec.core.backend import Message, Request


class TokenizeFields(ChatFields):
    """The body of a request."""

    prompt: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list)
    add_special_tokens: bool | None = None

    def requests(self) -> list[Request]:
        """Raises RequestError, Refused."""
        if self.prompt is None:
            return super().requests()[:1]
        if self.add_special_tokens is False:
            told = "the tokens that the model's texts begin with belong to the prompt."
            raise refusal(f"add_special_tokens is False, but {told}", "add_special_tokens")
        return [Request((Message("user", clean(self.prompt)),), is_raw=True)]
