"""Texts that are not written to the disk: kept in memory until the program ends.

Contract: while `is_on`, the store writes empty texts and keeps the real ones here; later reads take
them from here, so that a conversation goes on as usual in this session. Any thread.

Not here: what is written instead (store).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from localspec.record.rows import Conversation, StoredMessage, TurnEnd

UNTITLED = "(text not recorded)"
Kept = TypeVar("Kept")


@dataclass(eq=False)
class UnloggedTexts:
    """texts (each with the thought before it), ends (for tokens and drafts): by message id. titles,
    system_prompts: by conversation id. Single assignments and look-ups only, which are safe between
    threads."""

    is_on: bool = False
    texts: dict[int, tuple[str, str]] = field(default_factory=dict)
    ends: dict[int, TurnEnd] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)
    system_prompts: dict[int, str | None] = field(default_factory=dict)

    def keep(self, message_id: int, text: str, thinking: str = "") -> None:
        """Keep a text that was not written; drop one that now was."""
        self._set(self.texts, message_id, (text, thinking))

    def keep_end(self, message_id: int, end: TurnEnd) -> None:
        self.keep(message_id, end.text, end.thinking)
        self._set(self.ends, message_id, end)

    def keep_title(self, conversation_id: int, title: str) -> None:
        self._set(self.titles, conversation_id, title)

    def keep_prompt(self, conversation_id: int, system_prompt: str | None) -> None:
        self._set(self.system_prompts, conversation_id, system_prompt)

    def _set(self, kept: dict[int, Kept], number: int, value: Kept) -> None:
        if self.is_on:
            kept[number] = value
        else:
            kept.pop(number, None)

    def filled(self, message: StoredMessage) -> StoredMessage:
        text, thinking = self.texts.get(message.id, (message.text, message.thinking))
        return replace(message, text=text, thinking=thinking)

    def named(self, conversation: Conversation) -> Conversation:
        title = self.titles.get(conversation.id, conversation.title)
        prompt = self.system_prompts.get(conversation.id, conversation.system_prompt)
        return replace(conversation, title=title, system_prompt=prompt)
