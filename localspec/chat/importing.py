"""Reads conversations from an exported file, all of it before anything is stored.

Contract: reads our JSONL export, which has conversations with all their branches (record.export),
and the JSON of other programs: one conversation or a list of them, as an object with "messages" of
"role" and "content". Statistics are not imported: they belong to the machine that measured them. A
reply that was being written becomes interrupted. Pure; raises RequestError that names the place in
the file. CSV and Markdown have only a part of a conversation and are not read.

Not here: storing (record.conversations).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from localspec.chat.titles import title_of
from localspec.errors import RequestError
from localspec.files import parsed
from localspec.record.conversations import Imported
from localspec.record.export import EXPORT_VERSION
from localspec.record.rows import Conversation, StoredMessage, now, time_from, title_line

MAX_BYTES = 64_000_000
MAX_PARTS = 3_000_000  # objects and lists: each takes many times its length in memory
ROLES = ("user", "assistant")
STATES = ("complete", "stopped", "error", "interrupted", "draft")
REMEDY = "Choose a file that localspec exported as JSONL."


@dataclass(frozen=True)
class _Table:
    """A JSON object of the file. where: its place, for messages."""

    where: str
    values: dict[str, Any]

    def number(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(f'no number under "{name}"')
        return value

    def number_or_none(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.number(name)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.wrong(f'no text under "{name}"')
        return value

    def text_or_none(self, name: str) -> str | None:
        value = self.values.get(name)
        return value if isinstance(value, str) else None

    def choice(self, name: str, known: Sequence[str]) -> Any:
        value = self.values.get(name)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(f'none of {", ".join(known)} under "{name}"')
        return value

    def time(self) -> str:
        """Return when the object was made; the present time if the file does not say."""
        value = self.values.get("created_at_utc")
        if value is None:
            return now()
        try:
            return time_from(value)
        except ValueError:
            raise self.wrong('no time under "created_at_utc"') from None

    def wrong(self, what: str) -> RequestError:
        of_import = "" if self.where == "The file" else " of the import"
        return RequestError(
            f"{self.where}{of_import} has {what}, so nothing was imported. {REMEDY}"
        )


@dataclass(eq=False)
class _Draft:
    """A conversation while the file is read. messages: by their numbers. continued: numbers of the
    replies that another one continues."""

    table: _Table
    messages: dict[int, StoredMessage] = field(default_factory=dict)
    continued: set[int] = field(default_factory=set)
    system_prompt: str | None = None


def read_conversations(data: bytes) -> list[Imported]:
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
    if text.count("{") + text.count("[") > MAX_PARTS:
        raise RequestError(f"The file has more than {MAX_PARTS:,} parts. {REMEDY}")
    tables = _tables(text)
    first = next(tables, None)
    one_by_one = tables if first is None else chain((first,), tables)
    if first is not None and "type" in first.values:
        found = [_finished(draft) for draft in _drafts(one_by_one) if draft.messages]
    else:
        found = [_plain(table) for table in one_by_one]
    if not found:
        raise RequestError(f"The file holds no conversation with a message. {REMEDY}")
    return found


def _tables(text: str) -> Iterator[_Table]:
    """Every object of the file: a single one, a list, or one a line."""
    try:
        whole = parsed(text)
    except ValueError:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield _read(f"Line {number}", line)
        return
    if isinstance(whole, list):
        for number, item in enumerate(whole, 1):
            yield _checked(f"Item {number}", item)
    else:
        yield _checked("The file", whole)


def _read(where: str, line: str) -> _Table:
    try:
        return _checked(where, parsed(line))
    except ValueError:
        raise _Table(where, {}).wrong("no JSON, or JSON that is cut off") from None


def _checked(where: str, item: object) -> _Table:
    if not isinstance(item, dict):
        raise _Table(where, {}).wrong("something other than a JSON object")
    return _Table(where, item)


def _title(named: str | None, messages: Sequence[StoredMessage]) -> str:
    return title_line(named or "") or title_of(messages[0].text) or "Imported"


# our own JSONL


def _drafts(tables: Iterable[_Table]) -> list[_Draft]:
    drafts = dict[int, _Draft]()
    for table in tables:
        kind = table.values.get("type")
        if kind == "export" and (version := table.number("version")) > EXPORT_VERSION:
            raise RequestError(
                f"The file was written by a newer localspec (version {version} of the format, this "
                f"one reads {EXPORT_VERSION}). Update localspec, then import it again."
            )
        if kind == "conversation":
            number = table.number("id")
            if number in drafts:
                raise table.wrong(f"a second conversation {number}")
            drafts[number] = _Draft(table)
        elif kind in ("message", "turn"):
            draft = drafts.get(table.number("conversation_id"))
            if draft is None:
                raise table.wrong(f"a {kind} of a conversation that is not in the file")
            (_add_message if kind == "message" else _add_turn)(draft, table)
    return list(drafts.values())


def _add_message(draft: _Draft, table: _Table) -> None:
    number, parent = table.number("id"), table.number_or_none("parent_id")
    if number in draft.messages or (parent is not None and parent not in draft.messages):
        raise table.wrong("a message whose number or place in the conversation is not right")
    state = table.choice("state", STATES)
    draft.messages[number] = StoredMessage(
        id=number,
        conversation_id=table.number("conversation_id"),
        parent_id=parent,
        role=table.choice("role", ROLES),
        text=table.text("text"),
        state="interrupted" if state == "draft" else state,
        created_at_utc=table.time(),
        model=table.text_or_none("model"),
        is_edited=table.values.get("is_edited") is True,
        thinking=table.text_or_none("thinking") or "",
    )


def _add_turn(draft: _Draft, table: _Table) -> None:
    """Only what belongs to the conversation."""
    continued = table.number_or_none("continues_message_id")
    longer = table.number_or_none("message_id") or 0
    if continued is not None and continued < longer and longer in draft.messages:
        draft.continued.add(continued)
    prompt = table.text_or_none("system_prompt")
    draft.system_prompt = draft.system_prompt if prompt is None else prompt


def _finished(draft: _Draft) -> Imported:
    table = draft.table
    parents = {one.parent_id for one in draft.messages.values()}
    tip = table.number_or_none("tip_message_id")
    beginnings = {one for one in draft.continued if one not in parents and one != tip}
    messages = [one for number, one in draft.messages.items() if number not in beginnings]
    prompt = table.text_or_none("system_prompt")
    conversation = Conversation(
        id=table.number("id"),
        title=_title(table.text("title"), messages),
        created_at_utc=table.time(),
        tip_message_id=tip if tip in draft.messages else messages[-1].id,
        is_pinned=table.values.get("is_pinned") is True,
        system_prompt=draft.system_prompt if prompt is None else prompt,
    )
    return Imported(conversation, tuple(messages))


# other programs' JSON


def _plain(table: _Table) -> Imported:
    turns = table.values.get("messages")
    if not isinstance(turns, list) or not turns:
        raise table.wrong('no "messages"')
    prompts, messages = list[str](), list[StoredMessage]()
    for place, item in enumerate(turns, 1):
        turn = _checked(f"{table.where}, message {place}", item)
        role, text = turn.choice("role", ("system", *ROLES)), _content(turn)
        if role == "system":
            prompts.append(text)
        else:
            parent = messages[-1].id if messages else None
            messages.append(StoredMessage(place, 0, parent, role, text, "complete", now()))
    if not messages:
        raise table.wrong("a system prompt and no message")
    title = _title(table.text_or_none("title"), messages)
    prompt = "\n\n".join(prompts) if prompts else None
    made = Conversation(0, title, now(), messages[-1].id, system_prompt=prompt)
    return Imported(made, tuple(messages))


def _content(turn: _Table) -> str:
    """The text, also where it is a list of parts."""
    content = turn.values.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return turn.text("content")
