"""ChatGPT's export: `mapping` holds the nodes of a tree, `current_node` the end of the shown one.

The format is not documented by its maker; this follows public descriptions of exports up to 2026.
Nodes of the system and hidden ones are no messages. A message to or of a tool is left out, but for
the pictures that a tool made and the documents that were written with one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from localspec.chat.attachments import fenced, shown_name
from localspec.chat.importing.entries import (
    CALLS,
    PART_KINDS,
    PICTURES,
    RECORDINGS,
    RESULTS,
    Entry,
    Report,
    conversation_of,
    with_files,
)
from localspec.chat.importing.fields import fields_at, items_at, text_at, time_at
from localspec.core.files import parsed
from localspec.record.conversations import Imported
from localspec.record.rows import now

# Marks of sources, in characters of the private use area.
CITATION = re.compile("\ue200[^\ue200\ue201]*\ue201")
NEW_DOCUMENT = "canmore.create_textdoc"
# Types of content that repeat what stands elsewhere, or say how long a thought took.
SILENT = ("reasoning_recap", "model_editable_context")
INSTRUCTIONS = "custom instructions"


def fits(values: dict[str, Any]) -> bool:
    return isinstance(values.get("mapping"), dict)


def read(values: dict[str, Any], report: Report) -> Imported | None:
    created = time_at(values, "create_time", now())
    entries = [
        _entry(key, fields_at(node), created, report)
        for key, node in fields_at(values, "mapping").items()
    ]
    tip = text_at(values, "current_node")
    return conversation_of(entries, report, text_at(values, "title"), created, tip)


def _entry(key: str, node: dict[str, Any], created: str, report: Report) -> Entry:
    message = fields_at(node, "message")
    role, text, thinking = _message(message, report)
    return Entry(
        key=key,
        parent=text_at(node, "parent") or None,
        role=role,
        text=text,
        created_at_utc=time_at(message, "create_time", created),
        thinking=thinking,
        model=text_at(message, "metadata", "model_slug") or None,
        state="interrupted" if message.get("status") == "in_progress" else "complete",
    )


def _message(message: dict[str, Any], report: Report) -> tuple[str, str, str]:
    """Return role, text and thought; no role for what is no message of the conversation."""
    role, content = text_at(message, "author", "role"), fields_at(message, "content")
    metadata, recipient = fields_at(message, "metadata"), text_at(message, "recipient") or "all"
    if metadata.get("is_user_system_message") or _type(content) == "user_editable_context":
        report.left_out[INSTRUCTIONS] += 1
        return "", "", ""
    if metadata.get("is_visually_hidden_from_conversation") or _type(content) in SILENT:
        return "", "", ""
    if role == "tool":
        return "assistant", _pictures_of_tool(content, report), ""
    if role not in ("user", "assistant"):
        if role != "system" and content:
            report.leave_out(f"messages of {role or 'nobody'}")
        return "", "", ""
    if recipient != "all":
        return role, _call(recipient, content, report), ""
    if _type(content) == "thoughts":
        thoughts = items_at(content, "thoughts")
        return role, "", "\n\n".join(filter(None, (text_at(one, "content") for one in thoughts)))
    text = CITATION.sub("", _text(content, report))
    files = [file for file in items_at(metadata, "attachments") if not _is_shown(file, content)]
    return role, with_files(text, files, report), ""


def _type(content: dict[str, Any]) -> str:
    return text_at(content, "content_type")


def _text(content: dict[str, Any], report: Report) -> str:
    parts = items_at(content, "parts")
    if parts:
        return "\n\n".join(filter(None, _parts(parts, report)))
    text = text_at(content, "text")
    if text and _type(content) == "code":
        language = text_at(content, "language").replace("unknown", "")
        return f"```{language}\n{text}\n```"
    if content and not text and _type(content) not in ("text", "multimodal_text", "code"):
        return report.leave_out(_type(content) or "messages without a type")
    return text


def _parts(parts: list[Any], report: Report) -> Iterator[str]:
    is_transcribed = any(text_at(part, "text") for part in parts)
    for part in parts:
        kind = PART_KINDS.get(_type(fields_at(part)), _type(fields_at(part)))
        if isinstance(part, str) or text_at(part, "text"):
            yield part if isinstance(part, str) else text_at(part, "text")
        elif kind == RECORDINGS or "audio" in kind:
            words = report.leave_out(RECORDINGS)
            yield "" if is_transcribed else words
        elif kind:
            yield report.leave_out(kind)


def _pictures_of_tool(content: dict[str, Any], report: Report) -> str:
    parts = [part for part in items_at(content, "parts") if isinstance(part, dict)]
    pictures = [part for part in parts if PART_KINDS.get(_type(part)) == PICTURES]
    if not pictures:
        report.leave_out(RESULTS)
    return "\n\n".join(report.leave_out(PICTURES) for _ in pictures)


def _call(recipient: str, content: dict[str, Any], report: Report) -> str:
    """Return the document that is written with this call of a tool; "" for any other call."""
    try:
        document = parsed(_text(content, Report())) if recipient == NEW_DOCUMENT else {}
    except ValueError:
        document = {}
    if text := text_at(document, "content"):
        return fenced(shown_name(text_at(document, "name")), text)
    return report.leave_out(CALLS)


def _is_shown(file: object, content: dict[str, Any]) -> bool:
    """Return whether an attachment is a picture that stands among the parts of the message."""
    kind = text_at(file, "mime_type") or text_at(file, "mimeType")
    return kind.startswith("image") and _type(content) == "multimodal_text"
