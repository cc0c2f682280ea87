"""Reads conversations from an exported file, all of it before anything is stored.

Contract: reads our JSONL export, which has conversations with all their branches (record.export),
and the JSON of other programs: one conversation or a list of them, as an object with "messages" of
"role" and "content". Statistics are not imported: they belong to the machine that measured them. A
reply that was being written becomes interrupted. Pure; raises RequestError that names the place in
the file. CSV and Markdown have only a part of a conversation and are not read.

Not here: storing (record.conversations).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from localspec.backend import Role
from localspec.chat.journal import title_line
from localspec.chat.turn import title_of
from localspec.errors import RequestError
from localspec.record.conversations import ImportedConversation, ImportedMessage
from localspec.record.export import EXPORT_VERSION

MAX_BYTES = 64_000_000
STATES = ("complete", "stopped", "error", "interrupted")
REMEDY = "Choose a file that localspec exported as JSONL."

Table = dict[str, Any]


@dataclass
class _Draft:
    """A conversation while the file is read. messages: with their parents, by number in the file.
    continued: numbers of the replies that another one continues."""

    where: str
    table: Table
    messages: dict[int, tuple[int | None, ImportedMessage]] = field(default_factory=dict)
    continued: set[int] = field(default_factory=set)
    system_prompt: str | None = None


def read_conversations(data: bytes) -> list[ImportedConversation]:
    """Every conversation of the file that has a message, in order."""
    if len(data) > MAX_BYTES:
        raise RequestError(
            f"The file has {len(data):,} bytes, but at most {MAX_BYTES:,} can be imported. Export "
            "one conversation at a time, under Stats, and import these files."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RequestError(f"The file is not a text in UTF-8. {REMEDY}") from None
    tables = list(_tables(text))
    if any("type" in table for _, table in tables):
        found = [_finished(draft) for draft in _drafts(tables) if draft.messages]
    else:
        found = [_plain(where, table) for where, table in tables]
    if not found:
        raise RequestError(f"The file holds no conversation with a message. {REMEDY}")
    return found


# our own JSONL


def _drafts(tables: Iterable[tuple[str, Table]]) -> list[_Draft]:
    drafts = dict[int, _Draft]()
    for where, table in tables:
        kind = table.get("type")
        if kind == "export":
            _refuse_newer(where, table)
        elif kind == "conversation":
            number = _number(where, table, "id")
            if number in drafts:
                raise _wrong(where, f"a second conversation {number}")
            drafts[number] = _Draft(where, table)
        elif kind in ("message", "turn"):
            draft = drafts.get(_number(where, table, "conversation_id"))
            if draft is None:
                raise _wrong(where, f"a {kind} of a conversation that is not in the file")
            (_add_message if kind == "message" else _add_turn)(draft, where, table)
    return list(drafts.values())


def _add_message(draft: _Draft, where: str, table: Table) -> None:
    number, parent = _number(where, table, "id"), _number_or_none(where, table, "parent_id")
    if number in draft.messages or (parent is not None and parent not in draft.messages):
        raise _wrong(where, "a message whose number or place in the conversation is not right")
    state = _choice(where, table, "state", (*STATES, "draft"))
    message = ImportedMessage(
        parent=None,
        role=_role(_choice(where, table, "role", ("user", "assistant"))),
        text=_text(where, table, "text"),
        state="interrupted" if state == "draft" else state,  # type: ignore[arg-type]
        created_at_utc=_time(where, table),
    )
    draft.messages[number] = parent, message


def _add_turn(draft: _Draft, where: str, table: Table) -> None:
    """Only what belongs to the conversation."""
    if table.get("continues_message_id") is not None:
        draft.continued.add(_number(where, table, "continues_message_id"))
    if isinstance(table.get("system_prompt"), str):
        draft.system_prompt = table["system_prompt"]


def _finished(draft: _Draft) -> ImportedConversation:
    parents = {parent for parent, _ in draft.messages.values()}
    tip = _number_or_none(draft.where, draft.table, "tip_message_id")
    beginnings = {one for one in draft.continued if one not in parents and one != tip}
    kept = [number for number in draft.messages if number not in beginnings]
    places = {number: place for place, number in enumerate(kept)}
    messages = []
    for number in kept:
        parent, message = draft.messages[number]
        messages.append(replace(message, parent=None if parent is None else places[parent]))
    prompt = draft.table.get("system_prompt")
    return ImportedConversation(
        title=title_line(_text(draft.where, draft.table, "title")) or _title(messages),
        messages=tuple(messages),
        tip=None if tip is None else places.get(tip),
        system_prompt=prompt if isinstance(prompt, str) else draft.system_prompt,
        is_pinned=draft.table.get("is_pinned") is True,
        created_at_utc=_time(draft.where, draft.table),
    )


def _refuse_newer(where: str, table: Table) -> None:
    version = _number(where, table, "version")
    if version > EXPORT_VERSION:
        raise RequestError(
            f"The file was written by a newer localspec (version {version} of the format, this one "
            f"reads {EXPORT_VERSION}). Update localspec, then import it again."
        )


# other programs' JSON


def _plain(where: str, table: Table) -> ImportedConversation:
    turns = table.get("messages")
    if not isinstance(turns, list) or not turns:
        raise _wrong(where, 'no "messages"')
    prompt: str | None = None
    messages = list[ImportedMessage]()
    for place, turn in enumerate(turns, 1):
        at = f"{where}, message {place}"
        if not isinstance(turn, dict):
            raise _wrong(at, "something other than an object")
        role = _choice(at, turn, "role", ("system", "user", "assistant"))
        text = _content(at, turn)
        if role == "system":
            prompt = text if prompt is None else f"{prompt}\n\n{text}"
            continue
        parent = len(messages) - 1 if messages else None
        messages.append(ImportedMessage(parent, _role(role), text, "complete"))
    if not messages:
        raise _wrong(where, "a system prompt and no message")
    title = table.get("title")
    named = title_line(title) if isinstance(title, str) else ""
    return ImportedConversation(named or _title(messages), tuple(messages), system_prompt=prompt)


def _content(where: str, turn: Table) -> str:
    """The text, also where it is a list of parts."""
    content = turn.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str):
        raise _wrong(where, 'no text under "content"')
    return content


def _role(name: str) -> Role:
    return "user" if name == "user" else "assistant"


def _title(messages: list[ImportedMessage]) -> str:
    return title_of(messages[0].text) or "Imported"


# JSON


def _tables(text: str) -> Iterator[tuple[str, Table]]:
    """Every object of the file with its place: a single one, a list, or one a line."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        yield from _lines(text)
        return
    for place, item in enumerate(whole if isinstance(whole, list) else [whole], 1):
        where = f"Item {place}" if isinstance(whole, list) else "The file"
        yield where, _object(where, item)


def _lines(text: str) -> Iterator[tuple[str, Table]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"Line {number}"
            try:
                yield where, _object(where, json.loads(line))
            except (ValueError, RecursionError):
                raise _wrong(where, "no JSON, or JSON that is cut off") from None


def _object(where: str, item: object) -> Table:
    if not isinstance(item, dict):
        raise _wrong(where, "something other than a JSON object")
    return item


def _number(where: str, table: Table, name: str) -> int:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(where, f'no number under "{name}"')
    return value


def _number_or_none(where: str, table: Table, name: str) -> int | None:
    return None if table.get(name) is None else _number(where, table, name)


def _text(where: str, table: Table, name: str) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        raise _wrong(where, f'no text under "{name}"')
    return value


def _choice(where: str, table: Table, name: str, known: tuple[str, ...]) -> str:
    value = table.get(name)
    if not isinstance(value, str) or value not in known:
        raise _wrong(where, f'none of {", ".join(known)} under "{name}"')
    return value


def _time(where: str, table: Table) -> str | None:
    value = table.get("created_at_utc")
    if value is None:
        return None
    try:
        return datetime.fromisoformat(str(value)).isoformat(timespec="milliseconds")
    except ValueError:
        raise _wrong(where, 'no time under "created_at_utc"') from None


def _wrong(where: str, what: str) -> RequestError:
    of_import = "" if where == "The file" else " of the import"
    return RequestError(f"{where}{of_import} has {what}, so nothing was imported. {REMEDY}")
