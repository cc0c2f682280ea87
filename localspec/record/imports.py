"""Conversations that come from elsewhere, written into the log.

Contract: all of them or none, in one transaction. Each gets new numbers; parents are earlier
messages of the same conversation. They come without statistics: those belong to the machine that
measured them.

Not here: reading a file (chat.importing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localspec.backend import Role
from localspec.record.connection import SharedConnection
from localspec.record.rows import MessageState, now, text_columns

EXPORT_VERSION = 1  # of the JSONL export, which is what can be taken in again


@dataclass(frozen=True)
class ImportedMessage:
    """parent: place of an earlier message in the list, None for a first one."""

    parent: int | None
    role: Role
    text: str
    state: MessageState
    created_at_utc: str | None = None


@dataclass(frozen=True)
class ImportedConversation:
    """messages: parents before their children. tip: place of the end of the branch in use."""

    title: str
    messages: tuple[ImportedMessage, ...]
    tip: int | None = None
    system_prompt: str | None = None
    is_pinned: bool = False
    created_at_utc: str | None = None


def take_in(db: SharedConnection, found: Sequence[ImportedConversation]) -> list[int]:
    """The ids of the new conversations."""
    ids = []
    with db.writing() as tables:
        for one in found:
            row = {
                "title": one.title,
                "created_at_utc": one.created_at_utc or now(),
                "system_prompt": one.system_prompt,
                "is_pinned": int(one.is_pinned),
            }
            conversation_id = tables.insert("conversation", row)
            places = list[int]()
            for message in one.messages:
                columns = {
                    "conversation_id": conversation_id,
                    "parent_id": None if message.parent is None else places[message.parent],
                    "role": message.role,
                    **text_columns(message.text),
                    "state": message.state,
                    "created_at_utc": message.created_at_utc or now(),
                }
                places.append(tables.insert("message", columns))
            tip = places[-1 if one.tip is None else one.tip]
            tables.update("conversation", conversation_id, {"tip_message_id": tip})
            ids.append(conversation_id)
    return ids
