"""Limits within which the hub's answers are read: size, depth and time.

The hub's client reads lists of models and files whole. `require_limits` bounds what it reads; files
are bounded by the size that the hub listed. `within_time` ends a question that takes too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from huggingface_hub import get_session

from localspec.core.files import is_deep
from localspec.machine.download_faults import DownloadError

# Bytes of an answer that is no file. A list of a thousand files has about 300 KiB.
ANSWER_BYTES = 16 * 2**20
# Seconds for one answer that is no file.
ANSWER_S = 60.0
# Seconds for all answers to a question: the client asks again for 24 s where there is no network.
QUESTION_S = 120.0
# What the path of every question has, also at a mirror of the hub.
API = "/api/models"


def require_limits() -> None:
    """Let the hub's client of this process read answers within limits only."""
    session = get_session()
    session.headers["accept-encoding"] = "identity"
    hooks = session.event_hooks
    if _limit not in hooks["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _limit]}


@contextmanager
def within_time(give_up: Callable[[DownloadError], None]) -> Iterator[threading.Timer]:
    """Yield the clock of a question, which may be cancelled. Call `give_up` from another thread
    where the block takes longer than QUESTION_S: a server may send the head of its answer letter by
    letter."""
    slow = DownloadError("slow_answer", seconds=f"{QUESTION_S:.0f}")
    timer = threading.Timer(QUESTION_S, give_up, (slow,))
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def _limit(response: httpx2.Response) -> None:
    if response.is_success and API not in response.request.url.path:
        return  # a file
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise DownloadError("strange_answer", reason="it is packed")
    response.encoding = "utf-8"
    stream: Any = response.stream
    response.stream = _Whole(stream)


class _Whole(httpx2.SyncByteStream):
    """The bytes of an answer, once all are there."""

    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream
        self._until_s = time.monotonic() + ANSWER_S

    def __iter__(self) -> Iterator[bytes]:
        content = bytearray()
        for part in self._stream:
            content += part
            if len(content) > ANSWER_BYTES:
                reason = f"it has more than {ANSWER_BYTES // 2**20} MiB"
                raise DownloadError("strange_answer", reason=reason)
            if time.monotonic() > self._until_s:
                raise DownloadError("slow_answer", seconds=f"{ANSWER_S:.0f}")
        if is_deep(content):
            raise DownloadError("strange_answer", reason="it is nested too deeply")
        yield bytes(content)

    def close(self) -> None:
        self._stream.close()
