"""Claude's export: `chat_messages` in order, each with the parts that its `content` lists.

Newer exports name the message that each one follows, so that edits and repeated answers keep their
branches. The text of an attached file is part of the export and stays with the message.
"""

from __future__ import annotations

from typing import Any

from localspec.chat.attachments import fenced, shown_name
from localspec.chat.importing.entries import (
    Entry,
    Report,
    content_of,
    conversation_of,
    in_order,
    with_files,
)
from localspec.chat.importing.fields import items_at, text_at, time_at
from localspec.record.conversations import Imported
from localspec.record.rows import now

ROLES = {"human": "user", "user": "user", "assistant": "assistant"}


def fits(values: dict[str, Any]) -> bool:
    return isinstance(values.get("chat_messages"), list)


def read(values: dict[str, Any], report: Report) -> Imported | None:
    created, messages = time_at(values, "created_at", now()), items_at(values, "chat_messages")
    entries = [_entry(number, one, created, report) for number, one in enumerate(messages)]
    if not any(text_at(one, "parent_message_uuid") for one in messages):
        entries = in_order(entries)
    tip = text_at(values, "current_leaf_message_uuid")
    return conversation_of(entries, report, text_at(values, "name"), created, tip)


def _entry(number: int, message: object, created: str, report: Report) -> Entry:
    sender = text_at(message, "sender")
    if sender not in ROLES:
        report.leave_out(f"messages of {sender or 'nobody'}")
    parts = items_at(message, "content")
    text, thinking = content_of(parts, ROLES.get(sender, ""), report)
    # The other field has a notice in the place of each tool that was used.
    has_text = any(text_at(part, "type") == "text" for part in parts)
    text = text if has_text else "\n\n".join(filter(None, [text_at(message, "text"), text]))
    return Entry(
        key=text_at(message, "uuid") or str(number),
        parent=text_at(message, "parent_message_uuid") or None,
        role=ROLES.get(sender, ""),
        text=_with_attachments(text, message, report),
        created_at_utc=time_at(message, "created_at", created),
        thinking=thinking,
    )


def _with_attachments(text: str, message: object, report: Report) -> str:
    parts, without_text = [text] if text.strip() else [], list[object]()
    for file in items_at(message, "attachments"):
        if content := text_at(file, "extracted_content"):
            parts.append(fenced(shown_name(text_at(file, "file_name")), content))
        else:
            without_text.append(file)
    return with_files("\n\n".join(parts), [*without_text, *items_at(message, "files")], report)
