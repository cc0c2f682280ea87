"""Limits of size, depth and time within which answers over HTTP are read.

`Limits.bound` puts them around a response of httpx2, of a client with or without async. Such an
answer can neither fill the memory nor last for ever: whatever goes beyond a limit is refused.
"""

from __future__ import annotations

import math
import re
import time
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx2

from localspec.core.files import MOST_DEPTH, is_deep

# Bytes of an answer that is no stream, or of several answers to one question. A list of some
# thousand models or files has about one MiB.
ANSWER_BYTES = 16 * 2**20
# Bytes of an event of a stream, with what comes before it and is no event. A token with its 20
# likeliest alternatives has about 8 KiB.
EVENT_BYTES = 2**20
END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")
HAS_DATA = re.compile(rb"(?:^|[\r\n])data")

# Raises the caller's error for an answer, of which the argument names the fault as a noun.
Refuse = Callable[[str], NoReturn]


@dataclass(eq=False)
class Limits:
    """The limits of one or several answers. within_s: seconds for the body of a whole answer.
    num_bytes: of all whole answers so far."""

    refuse: Refuse
    within_s: float = math.inf
    num_bytes: int = 0

    def bound(self, response: httpx2.Response, has_events: bool = False) -> None:
        """Let the body be read within the limits only."""
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            self.refuse("a packed answer, although it was asked for a plain one")
        # An encoding that the server names could unpack, or fail.
        response.encoding = "utf-8"
        response.stream = (_Events if has_events else _Whole)(response.stream, self)

    def count(self, num_bytes: int) -> None:
        """Refuse the answer once all answers together are too long."""
        self.num_bytes += num_bytes
        if self.num_bytes > ANSWER_BYTES:
            self.refuse(f"an answer of more than {ANSWER_BYTES / 2**20:g} MiB")

    def require_flat(self, content: bytes | bytearray) -> None:
        """Refuse lists and objects that lie too deep inside each other."""
        if is_deep(content):
            self.refuse(f"more than {MOST_DEPTH} lists inside each other")


class _Whole(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The bytes of an answer that is no stream, once all are there. stream: the body as it comes,
    with async or without."""

    def __init__(self, stream: Any, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._until_s = time.monotonic() + limits.within_s
        self._rest = bytearray()

    def _take(self, part: bytes) -> Iterator[bytes]:
        """Take one part of the body, and yield what can be passed on."""
        self._limits.count(len(part))
        if time.monotonic() > self._until_s:
            self._limits.refuse(f"no whole answer within {self._limits.within_s:g} s")
        self._rest += part
        yield from ()

    def _end(self) -> bytes:
        self._limits.require_flat(self._rest)
        return bytes(self._rest)

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            yield from self._take(part)
        yield self._end()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            for piece in self._take(part):
                yield piece
        yield self._end()

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Events(_Whole):
    """The bytes of a stream of events, one whole event at a time. Blocks without data, by which a
    server keeps a connection open, are left out."""

    _num_idle = 0

    def _take(self, part: bytes) -> Iterator[bytes]:
        looked_at, start = max(0, len(self._rest) - 3), 0
        self._rest += part
        for end in END_OF_EVENT.finditer(self._rest, looked_at):
            event = bytes(self._rest[start : end.end()]).removeprefix(BOM_UTF8)
            start = end.end()
            if HAS_DATA.search(event):
                self._limits.require_flat(event)
                self._num_idle = 0
                yield event
            else:
                self._num_idle += len(event)
        del self._rest[:start]
        if len(self._rest) + self._num_idle > EVENT_BYTES:
            self._limits.refuse(f"more than {EVENT_BYTES / 2**20:g} MiB without a whole event")
