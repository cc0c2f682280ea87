"""Open WebUI's export: a list of chats, each with a tree in `chat.history` or a list of messages.

Its replies hold thoughts and calls of tools as HTML elements `details` with a type.
"""

from __future__ import annotations

import html
import re
from typing import Any

from localspec.chat.importing.entries import (
    CALLS,
    Entry,
    Report,
    content_of,
    conversation_of,
    in_order,
    with_files,
)
from localspec.chat.importing.fields import fields_at, items_at, text_at, time_at
from localspec.record.conversations import Imported
from localspec.record.rows import now

DETAILS, END = re.compile(r'<details type="(\w+)"'), "</details>"
SUMMARY = re.compile(r"\s*<summary>[^<]*</summary>")


def fits(values: dict[str, Any]) -> bool:
    return isinstance(values.get("chat"), dict)


def read(values: dict[str, Any], report: Report) -> Imported | None:
    chat = fields_at(values, "chat")
    created = time_at(values, "created_at", time_at(chat, "timestamp", now()))
    tree = fields_at(chat, "history", "messages")
    messages = list(tree.items()) or [
        (text_at(message, "id") or str(number), message)
        for number, message in enumerate(items_at(chat, "messages"))
    ]
    entries = [_entry(key, message, created, report) for key, message in messages]
    if not any(entry.parent for entry in entries):
        entries = in_order(entries)
    return conversation_of(
        entries,
        report,
        title=text_at(chat, "title") or text_at(values, "title"),
        created_at_utc=created,
        tip=text_at(chat, "history", "currentId"),
        system_prompt=text_at(chat, "system") or text_at(chat, "params", "system"),
    )


def _entry(key: str, message: object, created: str, report: Report) -> Entry:
    role = text_at(message, "role")
    if role not in ("user", "assistant"):
        report.leave_out(f"messages of {role or 'nobody'}")
        role = ""
    text, thinking = content_of(fields_at(message).get("content"), role, report)
    if role == "assistant":
        text, thoughts = _without_details(text, report)
        thinking = "\n\n".join(filter(None, [thinking, *thoughts]))
    return Entry(
        key=key,
        parent=text_at(message, "parentId") or None,
        role=role,
        text=with_files(text, items_at(message, "files"), report),
        created_at_utc=time_at(message, "timestamp", created),
        thinking=thinking,
        model=text_at(message, "modelName") or text_at(message, "model") or None,
    )


def _without_details(text: str, report: Report) -> tuple[str, list[str]]:
    """Return the text without the elements of thoughts and tools, and the thoughts."""
    texts, thoughts, place = list[str](), list[str](), 0
    while (opening := DETAILS.search(text, place)) is not None:
        begin = text.find(">", opening.end()) + 1
        end = text.find(END, begin)
        if not begin or end < 0:
            break
        texts.append(text[place : opening.start()])
        if opening[1] == "reasoning":
            thoughts.append(_thought(text[begin:end]))
        else:
            report.leave_out(CALLS)
        place = end + len(END)
    return "".join([*texts, text[place:]]).strip(), thoughts


def _thought(element: str) -> str:
    lines = html.unescape(SUMMARY.sub("", element, count=1)).strip().split("\n")
    return "\n".join(line.removeprefix(">").removeprefix(" ") for line in lines)
