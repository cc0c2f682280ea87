"""The messages of a conversation as the chat component takes them: Markdown, notes, small links.

Contract: nothing that a person or a model wrote becomes markup of ours (plain_markdown). Notes are
`<p class="ls-footer">` (`ls-own` under the person's), a part of their own, so that an open code
fence cannot swallow them and copying can leave them out (static/live.js).
Links of class `ls-do` are small buttons: static/chat.js turns a click into a command.

Not here: which messages there are (chat/service), what a click does (commands).
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.chat.service import ShownMessage, TurnView, clean
from localspec.drafters.registry import REGISTRY
from localspec.web.live import badge, footer, percent
from localspec.web.talk.plain_markdown import as_text
from localspec.workloads import FILE

MAX_SHOWN_CHARACTERS = 20_000  # of the person's own message; Markdown of more would hold up a page
SHORTENED_TO = 2_000
MIN_SHARE_LOOKED_UP = 0.3  # of a reply; less is not mentioned

ChatMessage = dict[str, Any]
CAN_GO_ON = ("stopped", "interrupted")


def chat_messages(
    shown: Sequence[ShownMessage], rows: Mapping[int | None, dict[str, Any]], is_running: bool
) -> list[ChatMessage]:
    """Every message with its notes. rows: the logged turn of each reply, by message id, with
    num_looked_up, the tokens that were copied from earlier text. is_running: a reply is under
    way, so nothing can be edited or continued now."""
    last = len(shown) - 1
    return [
        _person(message, is_running)
        if message.role == "user"
        else _reply(message, rows.get(message.message_id), index == last and not is_running)
        for index, message in enumerate(shown)
    ]


def growing(view: TurnView) -> list[ChatMessage]:
    """The bubble of a reply that is being written, or what it waits for."""
    if view.text:
        return [_text("assistant", view.text)]
    if view.phase == "loading":
        return [_text("assistant", "*The model is still loading; this is answered right after.*")]
    if view.phase == "queued" and view.position:
        noun = "reply" if view.position == 1 else "replies"
        return [_text("assistant", f"*Waiting: {view.position} {noun} ahead of this one.*")]
    return []


def _person(message: ShownMessage, is_running: bool) -> ChatMessage:
    handle = message.message_id
    text, files = parted(message.text)
    notes = [_chip(name, content) for name, content in files]
    if len(text) > MAX_SHOWN_CHARACTERS:
        notes.append(f"the first {SHORTENED_TO:,} of {len(text):,} characters; all were sent")
        text = f"{text[:SHORTENED_TO]}…"
    if notes and handle is not None:
        notes.append(_do("show all", handle, "all"))
    if not is_running and handle is not None:
        notes += [_do("edit", handle), _branches(message)]
    return _text("user", text, _note(notes, "ls-own"))


def parted(text: str) -> tuple[str, list[tuple[str, str]]]:
    """What the person wrote, and the name and text of each file behind it (attachments)."""
    files = [(found[1], found[3]) for found in FILE.finditer(text)]
    return FILE.sub("", text), files


def _chip(name: str, content: str) -> str:
    size = file_size(len(content.encode("utf-8", "replace")))
    return f'<span class="ls-file">{html.escape(name)}, {size}</span>'


def file_size(num_bytes: int) -> str:
    """The size of a file, in thousands as file managers count; inWords in static/ui.js alike."""
    if num_bytes < 1000:
        return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"
    if num_bytes < 1_000_000:
        return f"{num_bytes / 1000:.0f} KB"
    return f"{num_bytes / 1_000_000:.1f} MB"


def _reply(message: ShownMessage, row: dict[str, Any] | None, is_last: bool) -> ChatMessage:
    notes = []
    error = message.error or (row["error"] if row is not None else None)
    if message.state == "error":
        error = error or "The reply failed. Send the message again."
    if error and message.state in ("error", "interrupted"):
        notes.append(f'<p class="ls-error">{html.escape(error)}</p>')
    if row is not None and (label := badge(row)):
        notes.append(f'<p class="ls-lenient">{html.escape(label)}</p>')
    notes.append(_note(_reply_parts(message, row, is_last)))
    return _text("assistant", message.text, "\n".join(note for note in notes if note))


def _reply_parts(message: ShownMessage, row: dict[str, Any] | None, is_last: bool) -> list[str]:
    parts = [message.state] if message.state in CAN_GO_ON else []
    if row is not None and row["num_output_tokens"]:
        parts.append(html.escape(footer(row)))
        parts.append(html.escape(_looked_up(row)))
    if message.message_id is None:
        return parts
    if is_last and _can_go_on(message, row):
        parts.append(_do("continue", message.message_id))
    parts.append(_branches(message))
    if row is not None and row["num_output_tokens"]:
        link = f'<a class="ls-tokens ls-m-{message.message_id}" href="#tokens">tokens</a>'
        parts.append(link)
    return parts


def _can_go_on(message: ShownMessage, row: dict[str, Any] | None) -> bool:
    is_cut = row is not None and row["finish_reason"] == "length"
    return bool(message.text) and (message.state in CAN_GO_ON or is_cut)


def may_be_looked_up(row: dict[str, Any]) -> bool:
    """Whether enough of a reply may have been looked up that the tokens are worth counting."""
    share, info = row["draft_share"], REGISTRY.get(row["drafter"])
    copies = info is not None and info.copies_text
    return copies and share is not None and share >= MIN_SHARE_LOOKED_UP


def _looked_up(row: dict[str, Any]) -> str:
    """How much was looked up, where that is a good part of the reply."""
    share = row["num_looked_up"] / row["num_output_tokens"]
    return f"{percent(share)} looked up in earlier text" if share >= MIN_SHARE_LOOKED_UP else ""


def _branches(message: ShownMessage) -> str:
    """‹ 2/3 › where a message was written in more than one way."""
    if len(message.siblings) < 2 or message.message_id not in message.siblings:
        return ""
    place = message.siblings.index(message.message_id)
    before = message.siblings[place - 1] if place > 0 else None
    after = message.siblings[place + 1] if place + 1 < len(message.siblings) else None
    shown = f'<span class="ls-place">{place + 1}/{len(message.siblings)}</span>'
    back, on = _arrow("‹", "earlier version", before), _arrow("›", "later version", after)
    return f"{back}{shown}{on}"


def _arrow(sign: str, title: str, message_id: int | None) -> str:
    if message_id is None:
        return f'<span class="ls-arrow">{sign}</span>'
    return f'<a class="ls-do ls-show ls-m-{message_id}" href="#show" title="{title}">{sign}</a>'


def _do(words: str, message_id: int, name: str | None = None) -> str:
    name = name or words
    return f'<a class="ls-do ls-{name} ls-m-{message_id}" href="#{name}">{words}</a>'


def _note(parts: Sequence[str], name: str = "ls-footer") -> str:
    said = [part for part in parts if part]
    return f'<p class="{name}">{" · ".join(said)}</p>' if said else ""


def _text(role: str, text: str, note: str = "") -> ChatMessage:
    """A message; the note is a part of its own, so that an open code fence cannot swallow it."""
    # What was stored may hold half a character, which no answer to the page can carry.
    parts = [{"type": "text", "text": as_text(clean(text))}] if text else []
    if note:
        parts.append({"type": "text", "text": clean(note)})
    return {"role": role, "content": parts or [{"type": "text", "text": ""}]}
