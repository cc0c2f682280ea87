"""Bodies of requests, read whole and bounded before anything behind the guard sees them.

Contract: a body is no longer than its route allows, arrives within BODY_S, and at most
MAX_AT_ONCE are being read at a time, so that neither long nor slow nor many bodies fill the memory
or block the server. The application gets a body as one message. JSON is parsed here once, and the
application gets our own text of the value, so both read the same. A value that names a file is
refused: Gradio would copy the file of that path, or fetch that address, for any of its components
(processing_utils.async_move_files_to_cache).

Not here: slow headers (connections).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from localspec.core.files import parsed
from localspec.web.guard.policy import MessageDict, Receive
from localspec.web.words import number_of

BODY_S = 30.0
MAX_AT_ONCE = 16
DROPPED_BYTES = 256 * 2**20  # of a body that is too long
PAUSE_S = 0.2  # after which no more of it is waited for


class BodyRefused(Exception):
    """The body cannot be taken. status: the HTTP answer; the message: a sentence for it."""

    def __init__(self, status: int, sentence: str) -> None:
        self.status = status
        super().__init__(sentence)


class Gone(Exception):
    """The connection ended before the body was complete."""


class Bodies:
    """Reads bodies for one server."""

    def __init__(self, body_s: float = BODY_S, max_at_once: int = MAX_AT_ONCE) -> None:
        self._body_s = body_s
        self._max_at_once = max_at_once
        self._num_reading = 0

    async def read(self, receive: Receive, content_length: str | None, max_bytes: int) -> bytes:
        """The whole body. Raises BodyRefused or Gone."""
        length = 0 if content_length is None else number_of(content_length)
        is_long = length is None or length > max_bytes
        if self._num_reading >= self._max_at_once:
            raise BodyRefused(
                503, "Too much is being sent at the same time. Try again in a moment."
            )
        self._num_reading += 1
        try:
            body = await _collected(receive, max_bytes, is_long, self._body_s)
        except TimeoutError:
            raise BodyRefused(
                408, "This arrived too slowly and was dropped. Send it again."
            ) from None
        finally:
            self._num_reading -= 1
        if body is None:
            raise BodyRefused(413, "This is too long to be sent at once.")
        return body


async def _collected(
    receive: Receive, max_bytes: int, is_long: bool, body_s: float
) -> bytes | None:
    """The body; None for one that is too long, also where its length was not said. Raises
    TimeoutError for one that may be taken and does not arrive within body_s.

    One that is too long is read on, and nothing of it kept, until it ends, pauses, has
    DROPPED_BYTES or has taken body_s: a sender whose connection is closed while it sends is told
    of a reset and never sees the answer.
    """
    time_of = asyncio.get_running_loop().time
    end = time_of() + body_s
    parts: list[bytes] = []
    num_bytes, has_more = 0, True
    while has_more and num_bytes < max(DROPPED_BYTES, max_bytes + 1):
        try:
            async with asyncio.timeout_at(min(end, time_of() + PAUSE_S) if is_long else end):
                message = await receive()
        except TimeoutError:
            if is_long:
                break
            raise
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        is_long = is_long or num_bytes > max_bytes
        if is_long:
            parts.clear()
        has_more = message.get("more_body", False)
    return None if is_long else b"".join(parts)


def own_json(body: bytes) -> bytes:
    """Return our own text of a JSON body. Raise BodyRefused for what is no JSON in UTF-8, and for
    a value that holds what Gradio takes for a file."""
    try:
        value = parsed(body.decode("utf-8"))  # bytes would be read as UTF-16 and UTF-32 too
        text = json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise BodyRefused(400, "This is no JSON in UTF-8, which this path takes.") from None
    if _has_file(value):
        raise BodyRefused(403, "This names a file. localspec takes none by its path.")
    return text.encode()


def _has_file(data: Any) -> bool:
    waiting = [data]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if "path" in one and "meta" in one:
                return True
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return False


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out the body first, then what the connection says."""
    waiting: list[MessageDict] = [{"type": "http.request", "body": body, "more_body": False}]

    async def wrapped() -> MessageDict:
        return waiting.pop() if waiting else await receive()

    return wrapped
