"""Lists of messages: OpenAI's `messages` with roles, and ShareGPT's `conversations` with speakers.

System prompts become the prompt of the conversation.
"""

from __future__ import annotations

from typing import Any

from localspec.chat.importing.entries import (
    CALLS,
    PICTURES,
    RESULTS,
    Entry,
    Report,
    content_of,
    conversation_of,
    in_order,
)
from localspec.chat.importing.fields import fields_at, items_at, text_at, time_at
from localspec.record.conversations import Imported
from localspec.record.rows import now

PROMPT_ROLES = ("system", "developer")
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "system": "system", "developer": "system", "tool": "tool", "function": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "call",
}  # fmt: skip
PICTURE_MARK = "<image>"


def fits(values: dict[str, Any]) -> bool:
    return isinstance(values.get("messages"), list)


def fits_sharegpt(values: dict[str, Any]) -> bool:
    return isinstance(values.get("conversations"), list)


def read(values: dict[str, Any], report: Report) -> Imported | None:
    turns = [(text_at(turn, "role"), fields_at(turn)) for turn in items_at(values, "messages")]
    return _conversation(values, turns, report)


def read_sharegpt(values: dict[str, Any], report: Report) -> Imported | None:
    turns = [
        (text_at(turn, "from"), {"content": _with_pictures(text_at(turn, "value"), report)})
        for turn in items_at(values, "conversations")
    ]
    return _conversation(values, turns, report)


def _with_pictures(text: str, report: Report) -> str:
    first, *others = text.split(PICTURE_MARK)
    return first + "".join(report.leave_out(PICTURES) + part for part in others)


def _conversation(
    values: dict[str, Any], turns: list[tuple[str, dict[str, Any]]], report: Report
) -> Imported | None:
    created = time_at(values, "created_at", now())
    prompts, entries = [text_at(values, "system")], list[Entry]()
    for number, (speaker, turn) in enumerate(turns):
        role = SPEAKERS.get(speaker, "")
        if role in ("tool", "call"):
            report.leave_out(RESULTS if role == "tool" else CALLS)
            continue
        if not role:
            report.leave_out(f"messages of {speaker or 'nobody'}")
            continue
        text, thinking = content_of(turn.get("content"), role, report)
        for _ in items_at(turn, "tool_calls"):
            report.leave_out(CALLS)
        if role == "system":
            prompts.append(text)
            continue
        thinking = text_at(turn, "reasoning_content") or text_at(turn, "reasoning") or thinking
        time = time_at(turn, "created_at", created)
        entries.append(Entry(str(number), None, role, text, time, thinking))
    prompt = "\n\n".join(filter(None, prompts))
    title = text_at(values, "title") or text_at(values, "name")
    return conversation_of(in_order(entries), report, title, created, None, prompt)
