"""Texts that the person did not want written down: kept in memory until the program ends.

Contract: while `is_on`, the store writes empty texts and gives what was said here; afterwards it
reads them back from here, so that a conversation goes on as usual in this session. Any thread.

Not here: what is written instead (store).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from localspec.record.rows import Conversation, StoredMessage

UNTITLED = "(text not recorded)"


@dataclass
class Withheld:
    """texts, tokens (ids and provenance), drafted: by message id. titles, system_prompts: by
    conversation id. Single assignments and look-ups only, which threads may share."""

    is_on: bool = False
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, tuple[list[int], list[str]]] = field(default_factory=dict)
    drafted: dict[int, bytes | None] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)
    system_prompts: dict[int, str | None] = field(default_factory=dict)

    def keep(self, message_id: int, text: str) -> None:
        """Remember a text that was not written; forget one that now was."""
        if self.is_on:
            self.texts[message_id] = text
        else:
            self.texts.pop(message_id, None)

    def keep_tokens(
        self,
        message_id: int,
        ids: Sequence[int],
        provenance: Sequence[str],
        drafted: bytes | None,
    ) -> None:
        if self.is_on:
            self.tokens[message_id] = [int(token) for token in ids], list(provenance)
            self.drafted[message_id] = drafted

    def keep_prompt(self, conversation_id: int, system_prompt: str | None) -> None:
        if self.is_on:
            self.system_prompts[conversation_id] = system_prompt
        else:
            self.system_prompts.pop(conversation_id, None)

    def filled(self, message: StoredMessage) -> StoredMessage:
        text = self.texts.get(message.id)
        return message if text is None else replace(message, text=text)

    def named(self, conversation: Conversation) -> Conversation:
        title = self.titles.get(conversation.id, conversation.title)
        prompt = self.system_prompts.get(conversation.id, conversation.system_prompt)
        return replace(conversation, title=title, system_prompt=prompt)
