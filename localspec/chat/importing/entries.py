"""Messages of another program on their way into a conversation of ours, and what stays behind.

A reader of a format makes an `Entry` of each message, with the key of the message that it follows.
`conversation_of` places them in our tree: an entry without text leaves no message, and what follows
it follows its parent. Replies in a row become one, for other programs cut a reply where a tool was
called. `Report` counts what is not imported, by name, and gives the words that stand in its place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from localspec.chat.importing.fields import fields_at, items_at, text_at
from localspec.chat.thinking import THINK, divided
from localspec.chat.titles import title_of
from localspec.record.conversations import Imported
from localspec.record.rows import Conversation, MessageState, StoredMessage, title_line

MAX_NAME_LENGTH = 60
PICTURES, FILES, RECORDINGS = "pictures", "files", "recordings"
CALLS, RESULTS, EMPTY = "tool calls", "tool results", "empty chats"
# Types of a message's parts by their names in the formats of OpenAI, Anthropic and others.
PART_KINDS = {
    "image": PICTURES, "image_url": PICTURES, "input_image": PICTURES,
    "image_asset_pointer": PICTURES, "file": FILES, "input_file": FILES, "document": FILES,
    "audio": RECORDINGS, "input_audio": RECORDINGS, "audio_asset_pointer": RECORDINGS,
    "tool_use": CALLS, "tool_call": CALLS, "toolCallRequest": CALLS,
    "tool_result": RESULTS, "toolCallResult": RESULTS,
}  # fmt: skip
IN_PLACE = {PICTURES: "picture", FILES: "file", RECORDINGS: "recording"}


@dataclass(frozen=True)
class Entry:
    """A message of a file. role: user or assistant; "" for what is no message of a conversation.
    parent: the key of the message that it follows."""

    key: str
    parent: str | None
    role: str
    text: str
    created_at_utc: str
    thinking: str = ""
    model: str | None = None
    state: MessageState = "complete"


@dataclass(eq=False)
class Report:
    """What was not imported. left_out: how many of each kind, by the plural of its name."""

    left_out: Counter[str] = field(default_factory=Counter)

    def leave_out(self, kind: str, name: str = "") -> str:
        """Count a part of a message; return the words for its place, "" where it needs none."""
        self.left_out[title_line(kind[:MAX_NAME_LENGTH])] += 1
        if kind in (CALLS, RESULTS):
            return ""
        words = f"{IN_PLACE.get(kind, kind[:MAX_NAME_LENGTH])} {name[:MAX_NAME_LENGTH]}"
        return f"[{title_line(words)}, not imported]"

    def said(self) -> str:
        """Return a sentence on what was left out; "" if that is nothing."""
        kinds = [f"{kind} ({number:,})" for kind, number in self.left_out.most_common(12)]
        return f"Not imported: {', '.join(kinds)}." if kinds else ""


def content_of(content: object, role: str, report: Report) -> tuple[str, str]:
    """Return the text and the thought of a message's content, a text or a list of parts."""
    if isinstance(content, str):
        marks = THINK if role == "assistant" else None
        thought, text, is_open = divided(content, marks, has_ended=True)
        return (content, "") if is_open or not text.strip() else (text, thought.strip())
    texts, thoughts = list[str](), list[str]()
    parts = items_at(content)
    for part in parts:
        kind = text_at(part, "type")
        if kind in ("thinking", "reasoning"):
            thoughts.append(text_at(part, kind) or text_at(part, "text"))
        elif isinstance(part, str) or text_at(part, "text"):
            texts.append(part if isinstance(part, str) else text_at(part, "text"))
        elif kind not in ("", "text", "input_text", "output_text", "token_budget"):
            is_picture = PART_KINDS.get(kind) == FILES and _is_picture(part)
            kind = PICTURES if is_picture else PART_KINDS.get(kind, kind)
            if words := report.leave_out(
                kind, _file_name(fields_at(part, "file")) or _file_name(part)
            ):
                texts.append(f"\n\n{words}\n\n" if len(parts) > 1 else words)
    return "".join(texts).strip("\n"), "\n\n".join(filter(None, thoughts))


def with_files(text: str, files: Iterable[object], report: Report) -> str:
    """Return the text followed by a line on each attached file, by its name."""
    words = [
        report.leave_out(PICTURES if _is_picture(file) else FILES, _file_name(file))
        for file in files
    ]
    return "\n\n".join([*([text] if text.strip() else []), *words])


def _file_name(file: object) -> str:
    names = (text_at(file, name) for name in ("file_name", "name", "filename", "fileIdentifier"))
    return next(filter(None, names), "")


def _is_picture(file: object) -> bool:
    kinds = ("type", "file_kind", "fileType", "mime_type", "mimeType", "file_type")
    return any(text_at(file, kind).startswith("image") for kind in kinds)


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of a list without branches, each one following the one before it."""
    parents = [None, *(entry.key for entry in entries)]
    return [replace(entry, parent=parent) for parent, entry in zip(parents, entries, strict=False)]


def conversation_of(
    entries: Sequence[Entry],
    report: Report,
    title: str,
    created_at_utc: str,
    tip: str | None = None,
    system_prompt: str = "",
) -> Imported | None:
    """Return the conversation of these entries; None if none of them has a text. tip: the key of
    the entry at the end of the branch that was shown last."""
    messages, places = _placed(entries, report)
    if not messages:
        report.left_out[EMPTY] += 1
        return None
    shown = places.get(tip or "") or messages[-1].id
    conversation = Conversation(
        id=0,
        title=title_line(title) or title_of(messages[0].text) or "Imported",
        created_at_utc=created_at_utc,
        tip_message_id=shown,
        system_prompt=system_prompt or None,
    )
    return Imported(conversation, tuple(messages))


def _placed(
    entries: Sequence[Entry], report: Report
) -> tuple[list[StoredMessage], dict[str, int | None]]:
    """Return the messages, parents first, and the number of the message at each key."""
    keys, below = {entry.key for entry in entries}, defaultdict[str | None, list[Entry]](list)
    for entry in entries:
        below[entry.parent if entry.parent in keys else None].append(entry)
    pieces, places = list[_Piece](), dict[str, int | None]()
    carried, branched = dict[str, list[str]](), set[int | None]()
    waiting = below.pop(None, [])[::-1]
    while waiting:
        entry = waiting.pop()
        above = places.get(entry.parent or "")
        thoughts = carried.pop(entry.parent or "", [])
        thoughts.extend(filter(None, [entry.thinking]))
        if not entry.role or not entry.text.strip():
            place, carried[entry.key] = above, thoughts
        else:
            piece = pieces[above - 1] if above is not None and above not in branched else None
            if piece is None or {piece.last.role, entry.role} != {"assistant"}:
                piece = _Piece(len(pieces) + 1, above, entry)
                pieces.append(piece)
            piece.add(entry, thoughts)
            place = piece.number
        places[entry.key] = place
        children = below.pop(entry.key, [])
        branched.update([place] if len(children) > 1 else [])
        waiting.extend(children[::-1])
    if unreached := sum(map(len, below.values())):
        report.left_out["messages that follow themselves"] += unreached
    return [piece.message() for piece in pieces], places


@dataclass(eq=False)
class _Piece:
    """A message of ours that grows. above: the number of the message that it follows."""

    number: int
    above: int | None
    last: Entry
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    def add(self, entry: Entry, thoughts: Iterable[str]) -> None:
        self.last = entry
        self.texts.append(entry.text)
        self.thoughts.extend(thoughts)

    def message(self) -> StoredMessage:
        return StoredMessage(
            id=self.number,
            conversation_id=0,
            parent_id=self.above,
            role="user" if self.last.role == "user" else "assistant",
            text="\n\n".join(self.texts),
            state=self.last.state,
            created_at_utc=self.last.created_at_utc,
            model=self.last.model,
            thinking="\n\n".join(self.thoughts),
        )
