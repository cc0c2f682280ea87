"""The messages of a conversation as the chat component takes them: Markdown, notes, small links.

Contract: nothing that a person or a model wrote becomes markup of ours (plain_markdown). Notes are
`<p class="ls-footer">` (`ls-own` under the person's), a part of their own, so that an open code
fence cannot swallow them and copying can leave them out (static/live.js). A message has its note
whether or not a reply is being written, so that nothing moves when one begins or ends.

ACTIONS is the one list of the small buttons under a message, in their order. A new one is a line
there, its icon in static/actions.css, and what it does: a command (commands.py) of its name, or a
function of static/chat.js.

Not here: which messages there are (chat/service).
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.chat.service import Reply, ShownMessage, clean
from localspec.chat.turn import TurnView
from localspec.core.units import counted, took
from localspec.core.workloads import FILE
from localspec.web.live import badge, footer, short
from localspec.web.talk.plain_markdown import MARK, as_text
from localspec.web.words import time_of_day

MAX_SHOWN_CHARACTERS = 20_000  # of the person's own message; Markdown of more would hold up a page
SHORTENED_TO = 2_000
SHOWN_AT_ONCE, HIDDEN_AT_ONCE = 100, 50  # messages; a browser takes some 10 ms for each
THOUGHT_MARK = 2 * MARK  # around a thought, also in static/live.js
THINKING = "Thinking…"
NO_ANSWER = "The reply ended while the model was still thinking, so there is no answer."
LOADING = "Loading the model. Your reply will start as soon as it is ready."
GO_ON = "“Continue” lets it think on; more Max tokens in the settings leave room for an answer."
CAN_GO_ON = ("stopped", "interrupted")

ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class PlacedMessage:
    """A message where it stands. row: the logged turn of a reply, None where there is none.
    is_last: nothing was said after it, and no reply to it is being written."""

    message: ShownMessage
    row: Mapping[str, Any] | None
    is_last: bool


def chat_messages(
    shown: Sequence[ShownMessage],
    rows: Mapping[int | None, dict[str, Any]],
    is_running: bool,
    num_hidden: int = 0,
) -> list[ChatMessage]:
    """Every message with its notes. rows: the logged turn of each reply, by message id.
    is_running: a reply is under way, so the last message is not the end. num_hidden: of the first
    ones that are not shown; a link asks for them."""
    found = []
    if num_hidden:
        asked = link(f"Show the {num_hidden:,} earlier messages", 0, "earlier")
        found.append(_text("assistant", "", _note("ls-footer", [asked])))
    for index, message in enumerate(shown[num_hidden:], num_hidden):
        row = rows.get(message.message_id)
        place = PlacedMessage(message, row, index == len(shown) - 1 and not is_running)
        if message.thinking:
            found.append(_thought(message.thinking, _thought_title(row)))
        found.append(_person(place) if message.role == "user" else _reply(place))
    return found


def hidden(num_messages: int) -> int:
    """How many of the first messages of a chat are not shown unasked. Always some at once, so that
    a chat that grows does not begin anew with each message."""
    return max(0, num_messages - SHOWN_AT_ONCE) // HIDDEN_AT_ONCE * HIDDEN_AT_ONCE


def waiting(reply: Reply) -> ChatMessage:
    """A message that waits until the reply before it has ended."""
    text, files = parted(reply.pending.text)
    notes = [_chip(name, content) for name, content in files]
    notes += ["waiting", link("take back", reply.number, "takeback")]
    return _text("user", text[:SHORTENED_TO], _note("ls-own", notes))


def growing(view: TurnView, number: int = 0) -> list[ChatMessage]:
    """The bubble of a reply that is being written, or what it waits for. number: of a reply that
    can still be taken back."""
    if view.text or view.thinking:
        figures = None if view.stats is None else vars(view.stats)
        title = _thought_title(figures) if view.text else THINKING
        thought = [_thought(view.thinking, title)] if view.thinking else []
        return [*thought, *([_text("assistant", view.text)] if view.text else [])]
    if view.phase == "loading":
        return [_text("assistant", f"*{LOADING}*")]
    if view.phase == "queued" and view.position:
        noun = "reply" if view.position == 1 else "replies"
        note = _note("ls-footer", [link("take back", number, "takeback")]) if number else ""
        return [_text("assistant", f"*Waiting: {view.position} {noun} ahead of this one.*", note)]
    return []


def growing_together(views: Sequence[TurnView], num_slots: int) -> list[ChatMessage]:
    """Answers to one message that are being written at once, a card each, and a line about all.
    num_slots: as many can be."""
    cards = [
        _card([f"answer {number} of {len(views)}", "" if view.text else THINKING], view.text)
        for number, view in enumerate(views, 1)
        if view.text or view.thinking
    ]
    line = together_line(views, num_slots)
    return [*cards, _text("assistant", "", _note("ls-footer", [line]))]


def answers(
    replies: Sequence[Reply], rows: Mapping[int | None, dict[str, Any]], tip_id: int | None
) -> list[ChatMessage]:
    """Answers to one message that were written at once, a card each, to choose from. tip_id: of the
    one that the chat goes on from."""
    cards = []
    for number, reply in enumerate(replies, 1):
        turn = reply.pending.turn
        parts = [f"answer {number} of {len(replies)}"]
        if turn is not None:
            row = rows.get(turn.message_id)
            parts += map(html.escape, footer(row)) if row is not None else []
            is_tip = turn.message_id == tip_id
            chosen = "<b>the chat goes on from this one</b>"
            parts.append(chosen if is_tip else link("choose this one", turn.message_id, "show"))
        cards.append(_card(parts, reply.view.text))
    return cards


def _card(parts: Sequence[str], text: str) -> ChatMessage:
    """An answer beside others. The note stands before the text, in the same part: so each answer is
    one element, and no open code fence can swallow the note."""
    note = _note("ls-footer ls-answer", parts)
    content = [{"type": "text", "text": f"{note}\n\n{as_text(clean(text))}"}]
    return {"role": "assistant", "content": content}


def together_line(views: Sequence[TurnView], num_slots: int | None = None) -> str:
    """What several answers took together, from the request to the end of the last. num_slots: where
    fewer can be written at once, say so."""
    num_tokens = sum(view.stats.num_output_tokens for view in views if view.stats is not None)
    began_s = min(view.started_s for view in views)
    seconds = max(view.started_s + view.seconds for view in views) - began_s
    line = f"{len(views)} answers: {counted(num_tokens, 'token')} in {took(1000 * seconds)}, "
    line += f"{num_tokens / max(seconds, 0.001):.0f} tok/s together"
    if num_slots is not None and num_slots < len(views):
        line += f"; {num_slots} at a time, since this model was loaded for so many"
    return line


def _person(place: PlacedMessage) -> ChatMessage:
    message = place.message
    handle = message.message_id
    text, files = parted(message.text)
    notes = [_chip(name, content) for name, content in files]
    if len(text) > MAX_SHOWN_CHARACTERS:
        notes.append(f"the first {SHORTENED_TO:,} of {len(text):,} characters; all were sent")
        text = f"{text[:SHORTENED_TO]}…"
    if notes and handle is not None:
        notes.append(link("show all", handle, "all"))
    notes += [_time(message), _branches(message)]
    return _text("user", text, _note("ls-own", notes, place))


def parted(text: str) -> tuple[str, list[tuple[str, str]]]:
    """What the person wrote, and the name and text of each file behind it (attachments)."""
    files = [(found[1], found[3]) for found in FILE.finditer(text)]
    return FILE.sub("", text), files


def _chip(name: str, content: str) -> str:
    size = file_size(len(content.encode("utf-8", "replace")))
    return f'<span class="ls-file">{html.escape(name)}, {size} of text</span>'


def file_size(num_bytes: int) -> str:
    """The size of a file, in thousands as file managers count; inWords in static/ui.js alike."""
    if num_bytes < 1000:
        return counted(num_bytes, "byte")
    if num_bytes < 1_000_000:
        return f"{num_bytes / 1000:.0f} kB"
    return f"{num_bytes / 1_000_000:.1f} MB"


def _reply(place: PlacedMessage) -> ChatMessage:
    message, row = place.message, place.row
    notes = []
    error = message.error or (row["error"] if row is not None else None)
    if message.state == "error":
        error = error or "The reply failed. Send the message again."
    if error and message.state in ("error", "interrupted"):
        notes.append(f'<p class="ls-error">{html.escape(error)}</p>')
    if message.thinking and not message.text and message.state != "draft":
        notes.append(_note("ls-footer", [f"{NO_ANSWER} {GO_ON if can_go_on(place) else ''}"]))
    if row is not None and (label := badge(row)):
        notes.append(f'<p class="ls-lenient">{html.escape(label)}</p>')
    parts = [message.state] if message.state in CAN_GO_ON else []
    if row is not None and row["num_output_tokens"]:
        parts += [html.escape(part) for part in footer(row)]
    parts += [_time(message), html.escape(short(message.model or ""))]
    parts += ["edited"] if message.is_edited else []
    if row is not None and row["num_output_tokens"] and message.message_id is not None:
        parts.append(link("details", message.message_id, "tokens"))
    notes.append(_note("ls-footer", [*parts, _branches(message)], place))
    return _text("assistant", message.text, "\n".join(note for note in notes if note))


def _thought(text: str, title: str) -> ChatMessage:
    """What the model thought, folded: Gradio folds what is done, and opens it by a click. The marks
    let copying leave it out."""
    title = f"{THOUGHT_MARK}{title}"
    content = [{"type": "text", "text": f"{as_text(clean(text))}{THOUGHT_MARK}"}]
    return {
        "role": "assistant",
        "content": content,
        "metadata": {"title": title, "status": "done"},
    }


def _thought_title(found: Mapping[str, Any] | None) -> str:
    """found: the figures by their names, None where there are none, as of an imported reply."""
    if found is None or not found["num_thinking_tokens"]:
        return "Thought"
    tokens = counted(found["num_thinking_tokens"], "token")
    if found["thinking_ms"] is None:
        return f"Thought · {tokens}"
    return f"Thought for {took(found['thinking_ms'])} · {tokens}"


def _time(message: ShownMessage) -> str:
    return time_of_day(message.created_at_utc) if message.created_at_utc else ""


def _branches(message: ShownMessage) -> str:
    """‹ 2/3 › where a message was written in more than one way."""
    if len(message.siblings) < 2 or message.message_id not in message.siblings:
        return ""
    place = message.siblings.index(message.message_id)
    before = message.siblings[place - 1] if place > 0 else None
    after = message.siblings[place + 1] if place + 1 < len(message.siblings) else None
    shown = f'<span class="ls-place">{place + 1}/{len(message.siblings)}</span>'
    back, on = _arrow("‹", "earlier version", before), _arrow("›", "later version", after)
    return f'<span class="ls-versions">{back}{shown}{on}</span>'


def _arrow(sign: str, title: str, message_id: int | None) -> str:
    if message_id is None:
        return f'<span class="ls-arrow">{sign}</span>'
    return link(sign, message_id, "show", title=title)


def _note(name: str, parts: Sequence[str], place: PlacedMessage | None = None) -> str:
    said = " · ".join(part for part in parts if part)
    acts = "" if place is None else actions_html(place)
    return f'<p class="{name}"><span>{said}</span>{acts}</p>' if said or acts else ""


def _text(role: str, text: str, note: str = "") -> ChatMessage:
    """A message; the note is a part of its own, so that an open code fence cannot swallow it."""
    # What was stored may hold half a character, which no answer to the page can carry.
    parts = [{"type": "text", "text": as_text(clean(text))}] if text else []
    if note:
        parts.append({"type": "text", "text": clean(note)})
    return {"role": role, "content": parts or [{"type": "text", "text": ""}]}


# the row of actions under a message


@dataclass(frozen=True)
class Action:
    """name: of its command, icon and class. label: what a screen reader and a tip say."""

    name: str
    label: str
    applies: Callable[[PlacedMessage], bool]


def can_go_on(place: PlacedMessage) -> bool:
    """Whether it is the last reply, and was cut short in its answer or in its thought."""
    is_begun = bool(place.message.text or place.message.thinking)
    is_cut = place.row is not None and place.row["finish_reason"] == "length"
    is_open = place.message.state in CAN_GO_ON or is_cut
    return place.is_last and place.message.role == "assistant" and is_open and is_begun


def _can_be_answered(place: PlacedMessage) -> bool:
    return place.is_last or place.message.role == "assistant"


ACTIONS = (
    Action("copy", "Copy", lambda place: bool(place.message.text)),
    Action("again", "Answer again", _can_be_answered),
    Action("several", "Answer four ways", _can_be_answered),
    Action("edit", "Edit", lambda place: bool(place.message.text)),
    Action("continue", "Continue", can_go_on),
    Action("fork", "Fork the chat from here", lambda place: True),
    Action("remove", "Delete this message", lambda place: True),
)


def actions_html(place: PlacedMessage) -> str:
    """The row; nothing for a message that is not stored yet."""
    if place.message.message_id is None:
        return ""
    able = [action for action in ACTIONS if action.applies(place)]
    links = [link(_label(one, place), place.message.message_id, one.name, "ls-act") for one in able]
    return f'<span class="ls-acts">{"".join(links)}</span>'


def _label(action: Action, place: PlacedMessage) -> str:
    """Copying leaves out what the model thought, and says so."""
    is_part = action.name == "copy" and place.message.thinking
    return "Copy without the thinking" if is_part else action.label


def link(words: str, message_id: int, name: str, kind: str = "", title: str = "") -> str:
    """A small button: static/chat.js turns a click into the command of this name."""
    names = " ".join(("ls-do", f"ls-{name}", f"ls-m-{message_id}", *kind.split()))
    return f'<a class="{names}" href="#{name}" title="{title or words}">{words}</a>'
