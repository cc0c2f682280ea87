"""The row of actions under a message: which there are, in which order, and where each applies.

Contract: ACTIONS is the one list. A new action is a line here, its icon in static/actions.css, and
what it does: a command (commands.py) of its name, or a function of static/chat.js.

Not here: what stands beside the row (messages).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localspec.chat.service import ShownMessage

CAN_GO_ON = ("stopped", "interrupted")


@dataclass(frozen=True)
class PlacedMessage:
    """A message where it stands. row: the logged turn of a reply, None where there is none.
    is_last: nothing was said after it, and no reply to it is being written."""

    message: ShownMessage
    row: Mapping[str, Any] | None
    is_last: bool


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


def link(words: str, message_id: int, name: str, kind: str = "") -> str:
    """A small button: static/chat.js turns a click into the command of this name."""
    names = " ".join(("ls-do", f"ls-{name}", f"ls-m-{message_id}", *kind.split()))
    return f'<a class="{names}" href="#{name}" title="{words}">{words}</a>'
