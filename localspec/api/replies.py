"""Replies as an asynchronous server reads them: chunk by chunk, until the client goes away.

Contract: the engine never waits for a client. Whoever stops reading (the client went away, the
time is over, the server ends) has the reply stopped within one round, and its place is free again.
A reply that was stopped by somebody else, or failed, raises `Refused` with its sentence.

Not here: the formats of the interfaces (chat_completions and its neighbours).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from localspec.api.faults import (
    CLOSED_BY_CLIENT,
    NOT_AGAIN,
    Fault,
    Refused,
    fault_in_stream,
    is_anthropics,
)
from localspec.chat.programs import ProgramService
from localspec.chat.service import ChatService, Reply
from localspec.chat.tool_formats import FORMATS, TOOL_CALL, CallFormat
from localspec.core.backend import Chunk, Request

TIME_LIMIT_S = 600.0  # as the clients of OpenAI wait at most
PING_S = 15.0  # proxies close a stream that says nothing for a minute

FAILED = ("cancelled", "error", "interrupted")  # reasons of a reply that did not end by itself

T = TypeVar("T")


class Asked:
    """The replies to one request of a client, in the order of its choices. `ask` makes it.
    most_calls: of tools, in each; None: as many as the model makes."""

    def __init__(
        self,
        service: ChatService,
        replies: Sequence[Reply],
        limit_s: float = TIME_LIMIT_S,
        most_calls: int | None = None,
    ) -> None:
        self.replies = replies
        self.most_calls = most_calls
        self._service = service
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s

    async def chunks(self, reply: Reply) -> AsyncGenerator[Chunk | None]:
        """Those of one reply as they come; None where there was none for PING_S. Raises Refused
        or LocalspecError for a reply that did not come to its own end."""
        loop, grown, num_read = asyncio.get_running_loop(), asyncio.Event(), 0

        def wake() -> None:
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(grown.set)

        reply.watch(wake)
        while True:
            left_s = self._until_s - time.monotonic()
            if left_s <= 0:
                told = f"The reply took longer than {self._limit_s:.0f} seconds and was stopped."
                sentence = f"{told} Ask for fewer tokens."
                raise Refused(Fault(504, sentence, "timeout", headers=NOT_AGAIN))
            try:
                # Not wait_for: before Python 3.12 it loses a cancel that comes with the event.
                async with asyncio.timeout(min(PING_S, left_s)):
                    await grown.wait()
            except TimeoutError:
                yield None
                continue
            grown.clear()
            is_over = reply.view.ended_s is not None  # looked at before the chunks: none follows
            for chunk in reply.chunks_from(num_read):
                num_read += 1
                if chunk.finish_reason not in FAILED:
                    yield chunk
            if is_over:
                _require_an_end(reply)
                return

    def call_format(self, reply: Reply) -> CallFormat:
        """Return the format of the loaded model's calls; a call that was forced is JSON."""
        known = self._service.lifecycle.known
        is_forced = reply.request is not None and bool(reply.request.grammar)
        name = None if is_forced or known is None else known.call_format
        return TOOL_CALL if name is None else FORMATS[name]

    def stop(self) -> None:
        """End what has not ended."""
        for reply in self.replies:
            if reply.view.ended_s is None:
                self._service.stop(reply)


def _require_an_end(reply: Reply) -> None:
    view = reply.view
    if reply.fault is not None:
        raise reply.fault
    if view.finish_reason == "cancelled":
        sentence = "The reply was stopped on localspec's own page."
        raise Refused(Fault(503, sentence, "stopped", headers=NOT_AGAIN))
    if view.finish_reason in FAILED:
        is_passing = view.finish_reason == "interrupted" or reply.is_relieved is not None
        status = 503 if is_passing else 500  # an engine that was lost, or memory that ran out
        raise Refused(Fault(status, view.error or "The reply failed.", "engine_error"))


async def ask(
    service: ProgramService, requests: Sequence[Request], checking: str, most_calls: int | None
) -> Asked:
    """Queue the replies to these requests: all or none. Raises LocalspecError."""
    replies = list[Reply]()
    try:
        for request in requests:
            replies.append(await run_in_threadpool(service.answer, request, checking))
    except BaseException:
        Asked(service.service, replies).stop()
        raise
    return Asked(service.service, replies, most_calls=most_calls)


async def whole_or_gone(http: HttpRequest, asked: Asked, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; the replies are stopped and Refused is raised where the client goes
    away before."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(Fault(CLOSED_BY_CLIENT, "The client went away."))
        return working.result()
    finally:
        asked.stop()
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """One event of a stream, as it is sent."""
    return format_sse_event(data_str=json.dumps(data, ensure_ascii=False), event=name)


DONE = format_sse_event(data_str="[DONE]")


def streamed(asked: Asked, http: HttpRequest, events: AsyncGenerator[bytes | None]) -> Response:
    """The events as a stream. None becomes a comment that keeps the connection; an error that
    comes after the head was sent becomes the last event."""

    async def sent() -> AsyncGenerator[bytes]:
        try:
            async with aclosing(events):
                async for one in events:
                    yield KEEPALIVE_COMMENT if one is None else one
        except Exception as error:  # the head was sent, so the stream says it
            name = "error" if is_anthropics(http.scope) else None
            yield event(fault_in_stream(error).body(http.scope), name)
        finally:
            asked.stop()

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return EventSourceResponse(sent(), headers=headers)
