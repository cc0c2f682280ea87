"""Our own JSONL export: conversations with all their branches (record.export).

Statistics are not imported: they belong to the machine that measured them. A reply that was being
written becomes interrupted. A file that is wrong anywhere is refused with the place in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from localspec.chat.importing.fields import Table
from localspec.chat.titles import title_of
from localspec.core.errors import RequestError
from localspec.record.conversations import Imported
from localspec.record.export import EXPORT_VERSION
from localspec.record.rows import Conversation, StoredMessage, title_line

KINDS = ("export", "session", "conversation", "message", "turn")
ROLES = ("user", "assistant")
STATES = ("complete", "stopped", "error", "interrupted", "draft")


@dataclass(eq=False)
class _Draft:
    """A conversation while the file is read. messages: by their numbers. continued: numbers of the
    replies that another one continues."""

    table: Table
    messages: dict[int, StoredMessage] = field(default_factory=dict)
    continued: set[int] = field(default_factory=set)
    system_prompt: str | None = None


def own_conversations(tables: Iterable[Table]) -> list[Imported]:
    """Return every conversation of an export of ours that has a message, in order."""
    return [_finished(draft) for draft in _drafts(tables) if draft.messages]


def _drafts(tables: Iterable[Table]) -> list[_Draft]:
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


def _add_message(draft: _Draft, table: Table) -> None:
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


def _add_turn(draft: _Draft, table: Table) -> None:
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
        title=title_line(table.text("title")) or title_of(messages[0].text) or "Imported",
        created_at_utc=table.time(),
        tip_message_id=tip if tip in draft.messages else messages[-1].id,
        is_pinned=table.values.get("is_pinned") is True,
        system_prompt=draft.system_prompt if prompt is None else prompt,
    )
    return Imported(conversation, tuple(messages))
