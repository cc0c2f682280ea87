"""Which pages are open, which replies they asked for, and when a reply has nobody left to read it.

Contract: a page that is closed stops the replies it asked for, `grace_s` later, unless another
page follows them by then. A reload closes the page and opens it again: its request for the page
names the conversation in its address, arrives before the old page is gone, and makes the replies
of that conversation wait for it (`Arrivals`, `expect`). Nothing here knows the page's components.

Not here: what a follower shows (handlers), the turn itself (chat/service).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import parse_qs

from localspec.chat.service import Reply
from localspec.web.guard.policy import App, Receive, Scope, Send

GRACE_S = 0.9  # a closed page's reply stops after this: with what noticing takes, within 2 s
ARRIVAL_S = 20.0  # how long a page that is on its way is waited for
LOOK_AGAIN_S = 0.5


@dataclass(frozen=True)
class Reader:
    """What a page reads. me: whoever took the page over last. ended: the reply it read to its
    end."""

    me: object
    reply: Reply | None
    is_claimed: bool = False
    ended: Reply | None = None


class Presence:
    """One for each server. stop: ends a reply, harmless when it is over."""

    def __init__(self, stop: Callable[[Reply], None], grace_s: float = GRACE_S) -> None:
        self._stop = stop
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._readers: dict[str, Reader] = {}
        self._begun: dict[str, list[Reply]] = {}
        self._expected: dict[int, float] = {}

    def take_over(self, page: str) -> object:
        """Make the caller the page's only reader; the one before ends at its next look."""
        me = object()
        with self._lock:
            self._readers[page] = Reader(me, None)
        return me

    def follow(self, page: str, me: object, reply: Reply) -> None:
        """Say which reply the page reads."""
        with self._lock:
            if self._is_reader(page, me):
                self._readers[page] = Reader(me, reply)

    def claim(self, page: str) -> tuple[object, Reply | None] | None:
        """The page's reader and its reply, for the first to ask; None for all after it."""
        with self._lock:
            reader = self._readers.get(page)
            if reader is None or reader.is_claimed:
                return None
            self._readers[page] = replace(reader, is_claimed=True)
        return reader.me, reader.reply

    def finished(self, page: str) -> Reply | None:
        """The ended reply that the page was reading, once."""
        with self._lock:
            reader = self._readers.get(page)
            if reader is None or reader.reply is None or not reader.reply.done.is_set():
                return None
            self._readers[page] = replace(reader, reply=None, ended=reader.reply)
        return reader.reply

    def has_moved_on(self, page: str, reply: Reply) -> bool:
        """Whether the page reads something else than what `finished` gave."""
        with self._lock:
            reader = self._readers.get(page)
            return reader is None or reader.ended is not reply

    def is_follower(self, page: str, me: object) -> bool:
        with self._lock:
            return self._is_reader(page, me)

    def _is_reader(self, page: str, me: object) -> bool:
        reader = self._readers.get(page)
        return reader is not None and reader.me is me

    def remember(self, page: str, reply: Reply) -> None:
        """This page asked for this reply, or took it over by a reload."""
        with self._lock:
            still_open = [one for one in self._begun.get(page, []) if not one.done.is_set()]
            self._begun[page] = [*(one for one in still_open if one is not reply), reply]

    def expect(self, handle: int) -> None:
        """A page that will show this conversation is on its way."""
        with self._lock:
            self._expected[handle] = time.monotonic()

    def arrived(self, handle: int | None) -> None:
        with self._lock:
            if handle is not None:
                self._expected.pop(handle, None)

    def leave(self, page: str) -> None:
        """The page was closed or reloaded: its replies stop soon, unless someone takes them."""
        with self._lock:
            self._readers.pop(page, None)
            replies = [one for one in self._begun.pop(page, []) if not one.done.is_set()]
        if replies:
            self._look_in(self._grace_s, replies)

    def _look_in(self, seconds: float, replies: list[Reply]) -> None:
        timer = threading.Timer(seconds, self._decide, (replies,))
        timer.daemon = True
        timer.start()

    def _decide(self, replies: list[Reply]) -> None:
        with self._lock:
            unread = [one for one in replies if not (one.done.is_set() or self._is_read(one))]
            awaited = [one for one in unread if self._is_expected(one.handle)]
        for reply in unread:
            if reply not in awaited:
                self._stop(reply)
        if awaited:
            self._look_in(LOOK_AGAIN_S, awaited)

    def _is_read(self, reply: Reply) -> bool:
        return any(reader.reply is reply for reader in self._readers.values())

    def _is_expected(self, handle: int) -> bool:
        since_s = self._expected.get(handle)
        return since_s is not None and time.monotonic() - since_s < ARRIVAL_S


class Arrivals:
    """Tells Presence of every page that is on its way; passes everything on as it is."""

    def __init__(self, app: App, presence: Presence) -> None:
        self._app = app
        self._presence = presence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/":
            wanted = parse_qs(scope["query_string"].decode("latin-1")).get("c", [""])[0]
            if wanted.isdecimal():
                self._presence.expect(int(wanted))
        await self._app(scope, receive, send)
