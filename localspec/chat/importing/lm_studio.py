"""LM Studio's conversations (`*.conversation.json`): messages with versions, replies with steps.

The versions of a message become branches. What follows a message follows its selected version, for
LM Studio keeps one list of messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from localspec.chat.importing.entries import Entry, Report, content_of, conversation_of
from localspec.chat.importing.fields import fields_at, items_at, text_at, time_at
from localspec.chat.importing.messages import PROMPT_ROLES
from localspec.record.conversations import Imported
from localspec.record.rows import now

PROMPT_KEY = "llm.prediction.systemPrompt"


def fits(values: dict[str, Any]) -> bool:
    return any(isinstance(fields_at(one).get("versions"), list)
               for one in items_at(values, "messages")[:1])  # fmt: skip


def read(values: dict[str, Any], report: Report) -> Imported | None:
    created = time_at(values, "createdAt", now())
    entries, prompts, shown = list[Entry](), [_prompt(values)], None
    for number, message in enumerate(items_at(values, "messages")):
        selected, above = fields_at(message).get("currentlySelected"), shown
        for place, version in enumerate(items_at(message, "versions")):
            entry = _entry(f"{number}.{place}", above, version, created, report)
            if text_at(version, "role") in PROMPT_ROLES:
                prompts.append(entry.text)
                continue
            entries.append(entry)
            if place == selected or shown == above:
                shown = entry.key
    prompt = "\n\n".join(filter(None, prompts))
    return conversation_of(entries, report, text_at(values, "name"), created, shown, prompt)


def _entry(key: str, above: str | None, version: object, created: str, report: Report) -> Entry:
    role = text_at(version, "role")
    if role not in ("user", "assistant", *PROMPT_ROLES):
        report.leave_out(f"messages of {role or 'nobody'}")
    texts, thoughts = list[str](), list[str]()
    for content, is_thought in _contents(version):
        text, thought = content_of(content, role, report)
        (thoughts if is_thought else texts).append(text)
        thoughts.append(thought)
    return Entry(
        key=key,
        parent=above,
        role=role if role in ("user", "assistant") else "",
        text="\n\n".join(filter(None, texts)),
        created_at_utc=created,
        thinking="\n\n".join(filter(None, thoughts)),
        model=text_at(version, "senderInfo", "senderName") or None,
    )


def _contents(version: object) -> Iterator[tuple[list[Any], bool]]:
    """Yield the parts of each block of a version, and whether the block is a thought."""
    yield items_at(version, "content"), False
    for step in items_at(version, "steps"):
        parts = [part for part in items_at(step, "content") if not _is_mark(part)]
        yield parts, text_at(step, "style", "type") == "thinking"


def _is_mark(part: object) -> bool:
    """Return whether a part is a mark around a thought, as `<think>`."""
    return fields_at(part).get("isStructural") is True


def _prompt(values: dict[str, Any]) -> str:
    settings = items_at(values, "perChatPredictionConfig", "fields")
    own = (text_at(one, "value") for one in settings if text_at(one, "key") == PROMPT_KEY)
    return text_at(values, "systemPrompt") or next(own, "")
