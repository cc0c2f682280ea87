"""The list of conversations at the side, as HTML: titles, pins, what a search found.

Contract: pure; every title is escaped. Each row is a button that opens its conversation and one
that opens its menu; static/side.js turns clicks into commands. The id of a conversation that is not
recorded yet is negative. Times are UTC, the days are this machine's.

Not here: which conversations there are (chat/journal), what a click does (commands).
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby

from localspec.chat.service import clean
from localspec.record.conversations import ConversationRow
from localspec.record.folders import Folder

MAX_SHOWN_CONVERSATIONS = 200


def history_html(
    rows: Sequence[ConversationRow],
    current: int | None,
    search: str = "",
    now: datetime | None = None,
    folders: Sequence[Folder] = (),
) -> str:
    """The whole list. current: the conversation that is shown."""
    if not rows and (search.strip() or not folders):
        words = f"Nothing found for “{search.strip()}”." if search.strip() else "No chats yet."
        return f'<p class="ls-none">{html.escape(clean(words))}</p>'
    if search.strip():
        return _group("Found", rows[:MAX_SHOWN_CONVERSATIONS], current) + _rest(rows)
    today = (now or datetime.now(UTC)).astimezone()
    known = {folder.id for folder in folders}
    lying = [row for row in rows if row.folder_id not in known]
    groups = groupby(lying[:MAX_SHOWN_CONVERSATIONS], key=lambda row: _age(row, today))
    parts = [_folder(one, [row for row in rows if row.folder_id == one.id], current)
             for one in folders]  # fmt: skip
    parts += [_group(title, group, current) for title, group in groups]
    return "".join([*parts, _rest(lying)])


def _rest(rows: Sequence[ConversationRow]) -> str:
    more = len(rows) - MAX_SHOWN_CONVERSATIONS
    return f'<p class="ls-none">{more:,} more: a search finds them.</p>' if more > 0 else ""


def _folder(folder: Folder, rows: Sequence[ConversationRow], current: int | None) -> str:
    name = html.escape(clean(folder.name))
    lines = "".join(_line(row, row.id == current) for row in rows)
    inside = f'<ul class="ls-list">{lines}</ul>' if rows else '<p class="ls-none">No chats yet.</p>'
    return (
        f'<section class="ls-folder" data-folder="{folder.id}">'
        f"<details{'' if folder.is_collapsed else ' open'}>"
        f'<summary class="ls-group" dir="auto">{name}</summary>{inside}</details>'
        '<button type="button" class="ls-more" aria-haspopup="menu" '
        f'aria-label="More: folder {name}"><span aria-hidden="true">⋯</span></button></section>'
    )


def _group(title: str, rows: Iterable[ConversationRow], current: int | None) -> str:
    lines = "".join(_line(row, row.id == current) for row in rows)
    return f'<section><h2 class="ls-group">{title}</h2><ul class="ls-list">{lines}</ul></section>'


def _line(row: ConversationRow, is_current: bool) -> str:
    title = html.escape(clean(row.title)) or "Untitled"
    mark = ' aria-current="true"' if is_current else ""
    snippet = (
        f'<span class="ls-snippet">{html.escape(clean(row.snippet))}</span>' if row.snippet else ""
    )
    is_stored = row.id > 0
    waiting = "" if is_stored else '<span class="ls-snippet">not recorded yet</span>'
    pinned = ' data-pinned="1"' if row.is_pinned else ""
    more = (
        f'<button type="button" class="ls-more" aria-haspopup="menu" aria-label="More: {title}">'
        '<span aria-hidden="true">⋯</span></button>'
        if is_stored
        else ""
    )
    return (
        f'<li class="ls-row" data-handle="{row.id}"{pinned}>'
        f'<button type="button" class="ls-open"{mark} title="{title}">'
        f'<span class="ls-title" dir="auto">{title}</span>{snippet}{waiting}</button>{more}</li>'
    )


def _age(row: ConversationRow, today: datetime) -> str:
    """The heading a row stands under."""
    if row.is_pinned:
        return "Pinned"
    if not row.updated_at_utc:
        return "Today"
    day = datetime.fromisoformat(row.updated_at_utc).astimezone(today.tzinfo).date()
    if day >= today.date():  # a clock that was set back must not hide a chat
        return "Today"
    if day == today.date() - timedelta(days=1):
        return "Yesterday"
    return "Last 7 days" if day > today.date() - timedelta(days=7) else "Older"
