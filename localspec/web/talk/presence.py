"""Which pages are open, which reply each reads, and when a reply has nobody left to read it.

Contract: a page has one reader at a time. A new one replaces the one before and waits until that
one has sent its last text. A reader has a number, which travels to the page with what was asked;
only events that come after it there can name it, so nothing of a reply is shown before its
beginning. A page that is closed stops the replies it asked for, `grace_s` later, unless another
page reads them by then. A reload closes the page and opens it again: the request for the new page
names the conversation in its address, arrives before the old page is gone, and makes the replies of
that conversation wait for it (`Arrivals`, `expect`). Nothing here knows the page's components.

Not here: what a reader shows (handlers), the turn itself (chat/service).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from urllib.parse import parse_qs

from localspec.chat.service import Reply
from localspec.web.guard.policy import App, Receive, Scope, Send
from localspec.web.words import number_of

GRACE_S = 0.9  # with the time until a closed page is noticed, its reply stops within 2 s
ARRIVAL_S = 20.0  # how long a page that was requested may take until it opens its conversation
CHECK_AGAIN_S = 0.5
LEAVE_S = 1.0  # a browser may have gone without a word, and its reader with it


class Reader:
    """Reads one reply for one page. number: its own on this server. handle: of the conversation
    that the page shows. messages: of the row of the list when it was shown. is_whole: all messages
    are shown, however many. reply: None while none is being written. is_claimed: its text is being
    sent. is_settled: the end of the reply was shown."""

    def __init__(self, number: int, handle: int | None) -> None:
        self.number = number
        self._handle = handle
        self.messages: tuple[int, int] | None = None
        self.is_whole = False
        self.reply: Reply | None = None
        self.is_claimed = False
        self.is_settled = False
        self._is_replaced = asyncio.Event()
        self._has_left = asyncio.Event()

    @property
    def handle(self) -> int | None:
        """It changes when the conversation is recorded."""
        return self._handle if self.reply is None else self.reply.handle

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until another reader takes the page over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_replaced.wait()

    def leave(self) -> None:
        """Its last text is sent."""
        self._has_left.set()

    async def end(self) -> None:
        """Make it leave, and wait until it has."""
        self._is_replaced.set()
        if self.is_claimed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._has_left.wait()


class Presence:
    """One for each server. stop: ends a reply, harmless when it is over."""

    def __init__(self, stop: Callable[[Reply], None], grace_s: float = GRACE_S) -> None:
        self._stop = stop
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._readers: dict[str, Reader] = {}
        self._asked_for: dict[str, list[Reply]] = {}
        self._expected: dict[int, float] = {}

    async def take_over(self, page: str, handle: int | None) -> Reader:
        """A new reader, the page's only one, of this conversation."""
        reader = Reader(next(self._numbers), handle)
        with self._lock:
            before = self._readers.get(page)
            reader.is_whole = before is not None and before.is_whole and before.handle == handle
            self._readers[page] = reader
        if before is not None:
            await before.end()
        return reader

    def reader(self, page: str) -> Reader | None:
        """Of the conversation that the page shows, or will next."""
        return self._readers.get(page)

    def read(self, page: str, reader: Reader, reply: Reply) -> None:
        """The page asked for this reply, or took it over by a reload; the reader reads it."""
        reader.reply = reply
        self.asked(page, reply)

    def asked(self, page: str, reply: Reply) -> None:
        """The reply, and those asked for with it, end with the page, unless somebody reads its
        conversation."""
        with self._lock:
            others = [one for one in self._asked_for.get(page, []) if one not in reply.together]
            going_on = [one for one in others if not one.done.is_set()]
            self._asked_for[page] = [*going_on, *reply.together]

    def claim(self, page: str, number: int | None) -> Reader | None:
        """The page's reader, if that is its number, for whoever sends its text; None where nothing
        is read or somebody sends it already."""
        with self._lock:
            reader = self._of(page, number)
            if reader is None or reader.is_claimed:
                return None
            reader.is_claimed = True
        return reader

    def finished(self, page: str, number: int | None) -> Reader | None:
        """The page's reader, if that is its number, once its reply has ended; once for each."""
        with self._lock:
            reader = self._of(page, number)
            if reader is None or reader.reply is None or reader.is_settled:
                return None
            if not reader.reply.are_all_done:
                return None
            reader.is_settled = True
        return reader

    def _of(self, page: str, number: int | None) -> Reader | None:
        reader = self._readers.get(page)
        if reader is None or reader.reply is None or reader.number != number:
            return None
        return reader

    def is_reading(self, page: str, reader: Reader) -> bool:
        """Whether this is still the page's reader."""
        return self._readers.get(page) is reader

    def expect(self, handle: int) -> None:
        """A page that will show this conversation was requested."""
        with self._lock:
            self._expected[handle] = time.monotonic()

    def arrived(self, handle: int | None) -> None:
        with self._lock:
            if handle is not None:
                self._expected.pop(handle, None)

    def leave(self, page: str) -> None:
        """The page was closed or reloaded: its replies stop soon, unless another page reads
        them."""
        with self._lock:
            self._readers.pop(page, None)
            replies = [one for one in self._asked_for.pop(page, []) if not one.done.is_set()]
        if replies:
            self._decide_in(self._grace_s, replies)

    def _decide_in(self, seconds: float, replies: list[Reply]) -> None:
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
            self._decide_in(CHECK_AGAIN_S, awaited)

    def _is_read(self, reply: Reply) -> bool:
        read = (reader.reply for reader in self._readers.values())
        return any(one is not None and one.handle == reply.handle for one in read)

    def _is_expected(self, handle: int) -> bool:
        since_s = self._expected.get(handle)
        return since_s is not None and time.monotonic() - since_s < ARRIVAL_S


class Arrivals:
    """Tells Presence of every page that is requested; passes everything on as it is."""

    def __init__(self, app: App, presence: Presence) -> None:
        self._app = app
        self._presence = presence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/":
            named = parse_qs(scope["query_string"].decode("latin-1")).get("c", [""])[0]
            if (handle := number_of(named)) is not None:
                self._presence.expect(handle)
        await self._app(scope, receive, send)
