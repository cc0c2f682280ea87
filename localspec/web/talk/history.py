"""The list of conversations at the side, as HTML: titles, pins, what a search found.

Contract: pure; every title is escaped. Each row is a button that opens its conversation and one
that opens its menu; static/side.js turns clicks into commands. The id of a conversation that is not
recorded yet is negative. Times are UTC, the days are this machine's.

Not here: which conversations there are (chat/journal), what a click does (commands).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby

from localspec.chat.service import clean
from localspec.core.units import DASH
from localspec.record.conversations import ConversationRow, Folder
from localspec.web.markup import macros
from localspec.web.words import local_time

MAX_SHOWN_CONVERSATIONS = 200
# Headings of the list in their order. The dash stands over chats whose time cannot be shown.
HEADINGS = ("Pinned", "Today", "Yesterday", "Last 7 days", "Older", DASH)
LIST = macros("history.html", clean=clean)


def history_html(
    rows: Sequence[ConversationRow],
    current: int | None,
    search: str = "",
    now: datetime | None = None,
    folders: Sequence[Folder] = (),
) -> str:
    """The whole list. current: the conversation that is shown."""
    today, words = (now or datetime.now(UTC)).astimezone(), search.strip()
    known = {} if words else {one.id: one for one in folders}
    lying = [row for row in rows if row.folder_id not in known]
    headed = [("Found" if words else _age(row, today), row) for row in lying]
    if not words:  # an imported chat stands under its own day
        headed.sort(key=lambda pair: HEADINGS.index(pair[0]))
    groups = [
        (heading, [row for _, row in pairs])
        for heading, pairs in groupby(headed[:MAX_SHOWN_CONVERSATIONS], key=lambda pair: pair[0])
    ]
    inside = [(one, [row for row in rows if row.folder_id == one.id]) for one in known.values()]
    num_more = len(lying) - MAX_SHOWN_CONVERSATIONS
    made: str = LIST.chats(inside, groups, current, num_more, clean(words))
    return made


def _age(row: ConversationRow, today: datetime) -> str:
    """The heading a row stands under."""
    if row.is_pinned:
        return "Pinned"
    if not row.updated_at_utc:
        return "Today"
    here = local_time(row.updated_at_utc)
    if here is None:
        return DASH
    day = here.date()
    if day >= today.date():  # a clock that was set back must not hide a chat
        return "Today"
    if day == today.date() - timedelta(days=1):
        return "Yesterday"
    return "Last 7 days" if day > today.date() - timedelta(days=7) else "Older"
