"""A backend whose engine is somebody's server: vLLM, SGLang or any with OpenAI's interface.

Contract: core.backend.Backend. Every reply is a request of its own, so a server that was away
is there again with the next one. What a request asks and the server cannot do is refused before
the first chunk, in words. A server that fails or goes away ends the turn with finish_reason
"error", and what was written stays; the next turn asks the server anew what it is. Unknown is
unknown: what the server does not tell is in `TurnStats.untold`. How much of the drafts was
accepted comes from the stream or from the difference of the server's counters.

`decode_ms` is from the first event with text to the last. No learnt state is made; that of engines
here is kept as it was.

Source of the batch: SGLang 0.5.23, `GenerateReqInput` and the `meta_info` of its answers. Its
kernels want a GPU, so this was held against the protocol and not against the server.

Not here: what servers there are (servers), their counters (counters), the limits within which they
are read (connection). The client is OpenAI's own package; it runs in a thread of its own, so that a
cancel reaches a server that says nothing.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

from localspec.core.backend import Candidate, Chunk, Description, Message, Request, Server
from localspec.core.errors import LocalspecError, NotCounted, RequestError, first_line
from localspec.core.hindsight import Hindsight
from localspec.core.options import RemoteServer
from localspec.core.units import clean
from localspec.remote import counters, servers
from localspec.remote.counters import Counters, Drafts
from localspec.remote.remote_turn import MOST_TOKENS, NOT_ALONE, NOT_WHOLE, TOLD_NOTHING, RemoteTurn
from localspec.remote.server_request import fields_of
from localspec.remote.servers import count_in

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from localspec.remote.connection import Connection

CANCEL_LOOK_S = 0.02
SILENT_S = 600.0  # a long prompt on a slow server comes first
TOKEN_S = 10.0  # that a token may take, on average over a reply
MOST_WAITING = 256  # events that were read and not yet taken
BATCH_S = 600.0
CLOSED = "The connection to the server was closed. Connect to it again."
USUAL_TOGETHER = 16  # replies asked for at the same time; the server has a queue of its own


@dataclass(frozen=True)
class BatchReply:
    """drafts: None where the server drafts nothing or does not tell it."""

    text: str
    num_output_tokens: int | None
    drafts: Drafts | None


class ServerBackend:
    """See the module. num_slots: replies that are asked for at the same time. counts_replies:
    whether the counters are read around every reply. Raises ConfigError."""

    def __init__(
        self,
        server: RemoteServer,
        num_slots: int | None = None,
        counts_replies: bool = True,
    ) -> None:
        from localspec.remote.connection import Connection

        self._server = server
        self._num_slots = num_slots or USUAL_TOGETHER
        self._counts_replies = counts_replies
        self._must_look = False
        with ExitStack() as stack:
            self._connection = stack.enter_context(Connection(server))
            self._found = servers.look_at(server, self._connection)
            self._client = _client_of(server, self._connection)
            self._open = stack.pop_all()

    @property
    def takes_drafter(self) -> bool:
        """Whether a request may name the drafter, or none."""
        return self._found.kind.takes_drafter

    def is_alive(self) -> bool:
        return True  # a server that went away may be there again with the next request

    def describe(self) -> Description:
        from localspec.remote.connection import uses_proxies

        found, notices = self._found, list[str]()
        if not found.url.startswith("https://") and uses_proxies(found.url):
            notices.append(
                f"The connection to {found.url} is not encrypted: whoever listens on the network "
                "can read along."
            )
        return Description(
            target=found.model,
            draft=None,
            device=f"{found.kind.name} at {found.url}",
            dtype=None,
            context_length=found.context_length,
            drafters=(),
            notices=tuple(notices),
            num_slots=self._num_slots,
            server=Server(found.name, found.url, found.models, found.limits),
        )

    def count_tokens(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> int:
        if tools:
            raise NotCounted("A server is not asked to count the tokens of tools. Leave them out.")
        return servers.num_tokens(self._found, self._connection, messages)

    def prompt_tokens(self, request: Request) -> None:
        return None

    def candidates(
        self, messages: tuple[Message, ...], tokens: tuple[int, ...], count: int
    ) -> tuple[Candidate, ...]:
        raise RequestError(f"{self._found.kind.name} does not tell what else it might have said.")

    def calibrate(self, cancel: threading.Event) -> Iterator[str]:
        return iter(())

    def review(self, request: Request, cancel: threading.Event) -> Iterator[Hindsight]:
        return iter(())

    def keep_read(self, disk_bytes: int | None, cancel: threading.Event) -> Iterator[str]:
        return iter(())

    def forget(self, chat: int) -> None:
        """Nothing of it is here."""

    def snapshot(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._open.close()

    def counters(self) -> Counters | None:
        """Of all requests so far, where the server shows them."""
        prefix = self._found.kind.counters
        return counters.read(self._connection, prefix) if prefix else None

    def generate_batch(self, requests: Sequence[Request]) -> list[BatchReply] | None:
        """The replies to several requests as one batch by SGLang's native `/generate`; None where
        this is another program. Each prompt is the text of a request's last message, without a chat
        template: the native interface has none. Raises LocalspecError."""
        if self._found.kind.name != "SGLang":
            return None
        fields = {
            "text": [request.messages[-1].content for request in requests],
            "sampling_params": [_native_sampling(request) for request in requests],
        }
        answer = self._connection.ask("POST", "/generate", BATCH_S, fields)
        try:
            replies = answer.json()
        except ValueError:
            replies = answer.text
        if answer.status != 200:
            said = servers.sentence_in(replies)
            raise LocalspecError(f"{self._found.kind.name} refused the batch: {said}. Change it.")
        try:
            return [_native_reply(reply) for reply in replies]
        except (AttributeError, TypeError) as error:
            raise _unreadable(self._found, error) from error

    # one turn

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        if self._must_look:
            self._found = servers.look_at(self._server, self._connection)
            self._must_look = False
        request = self._with_room(request)
        most_tokens = request.max_tokens or self._found.context_length or MOST_TOKENS
        fields = fields_of(self._found, request)
        return self._chunks(RemoteTurn(request, cancel, most_tokens), fields)

    def _chunks(self, turn: RemoteTurn, fields: dict[str, Any]) -> Iterator[Chunk]:
        kind = self._found.kind
        before = self.counters() if self._counts_replies else None
        events = Queue[_Event](MOST_WAITING)
        reading: Future[None] = self._connection.portal.start_task_soon(
            self._read, fields, turn, events
        )
        try:
            first = _next(events, turn.cancel, reading)
            if isinstance(first, Exception):
                self._must_look = True
                raise first
            yield Chunk("prefill", turn.stats)
            error = None
            while (event := _next(events, turn.cancel, reading)) is not None:
                if isinstance(event, Exception):
                    self._must_look, error = True, event
                    break
                try:
                    chunk = turn.add(event.to_dict(warnings=False), kind)
                except (AttributeError, KeyError, TypeError, ValueError) as fault:
                    error = _unreadable(self._found, fault)
                    break
                if chunk is not None:
                    yield chunk
                if turn.is_cut:
                    break
        finally:
            reading.cancel()
        turn.count(self._drafts(turn, before))
        yield turn.last(error)

    def _with_room(self, request: Request) -> Request:
        """Return the request with a ceiling that the context has room for, where the server tells
        the context and the length of a prompt."""
        length, is_chat = self._found.context_length, not request.is_raw
        if length is None or request.max_tokens is None or not (request.is_ceiling and is_chat):
            return request
        try:
            num_prompt_tokens = self.count_tokens(request.messages, request.tools)
        except NotCounted:
            return request
        room = max(1, length - num_prompt_tokens)
        return replace(request, max_tokens=min(request.max_tokens, room))

    def _drafts(self, turn: RemoteTurn, before: Counters | None) -> Drafts | str:
        """What was drafted for the whole reply, or why that is not known."""
        if turn.reason is None or turn.is_cut:
            return NOT_WHOLE
        if before is None:
            return turn.drafts or TOLD_NOTHING
        after = counters.read_after(self._connection, self._found.kind.counters, before)
        if after is None:
            return TOLD_NOTHING
        return counters.drafts_between(before, after, turn.stats.num_output_tokens) or NOT_ALONE

    async def _read(self, fields: dict[str, Any], turn: RemoteTurn, events: Queue[_Event]) -> None:
        """Put what the server sends into the queue: first an empty event once it took the request,
        at the end None or an error."""
        import anyio
        import httpx2
        import openai

        from localspec.remote.connection import gone

        client = self._client
        asked: Any = client.completions if turn.request.is_raw else client.chat.completions
        most_s = SILENT_S + TOKEN_S * turn.most_tokens
        try:
            with anyio.fail_after(most_s):
                with anyio.fail_after(SILENT_S):
                    stream = await asked.create(**fields)
                async with _ended(stream):
                    event: _Event = {}
                    while event is not None:
                        await self._put(events, event)
                        with anyio.fail_after(SILENT_S):
                            event = await anext(stream, None)
            end: Exception | None = None
        except TimeoutError:
            end = LocalspecError(gone(self._found.url, "its answer takes too long"))
        except (openai.OpenAIError, httpx2.HTTPError) as error:
            end = explained(self._found, error, self._server.key)
        except ValueError as error:  # it ended in the middle of an event
            end = _unreadable(self._found, error)
        except Exception as error:  # the edge of this task: whoever waits must be told
            end = error
        await self._put(events, end)

    async def _put(self, events: Queue[_Event], event: _Event) -> None:
        """Put an event into the queue once it has room. Until then nothing more is read. Raise
        LocalspecError where the backend is closed meanwhile."""
        import anyio

        while not self._connection.client.is_closed:
            with suppress(Full):
                return events.put_nowait(event)
            await anyio.sleep(CANCEL_LOOK_S)
        raise LocalspecError(CLOSED)


@asynccontextmanager
async def _ended(stream: Any) -> AsyncIterator[None]:
    """Close `stream` and end its generators on exit.

    A reply that is left early leaves nested generators suspended. Reading a closed answer
    raises, which ends them here, in the task that ran them. Otherwise the garbage collector ends
    them in any order and in any thread, and fails at a generator that another is just ending.
    """
    import anyio

    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await stream.close()
            with suppress(Exception):  # which error a closed answer raises is of no interest
                async for _ in stream:
                    pass


_Event = Any  # of OpenAI's package, or an error; None at the end


def _client_of(server: RemoteServer, connection: Connection) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    return AsyncOpenAI(
        base_url=f"{server.address}/v1",
        api_key=server.key or "none",  # the package wants one
        organization="",
        project="",
        max_retries=0,
        timeout=connection.client.timeout,
        http_client=connection.client,
    )


def _next(events: Queue[_Event], cancel: threading.Event, reading: Future[None]) -> _Event:
    """The next event; None at the end, and where the turn was cancelled."""
    while not cancel.is_set():
        with suppress(Empty):
            return events.get(timeout=CANCEL_LOOK_S)
        if reading.done() and events.empty():
            return LocalspecError(CLOSED)
    return None


def _unreadable(found: servers.Found, error: Exception) -> LocalspecError:
    return LocalspecError(f"{found.kind.name} sent what cannot be read ({first_line(error)}).")


def explained(found: servers.Found, error: Exception, key: str | None) -> LocalspecError:
    """A fault of the request or of the server, with the remedy. No key is in it."""
    import openai

    from localspec.remote.connection import gone

    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        return RequestError(servers.refused_key(found.url))
    if not isinstance(error, openai.APIStatusError):
        if isinstance(error, openai.APIError) and error.body is not None:  # told in the stream
            return LocalspecError(f"{found.kind.name} failed: {_said(error.body, key)}.")
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if isinstance(cause, LocalspecError):
            return cause
        return LocalspecError(gone(found.url, first_line(cause)))
    if location := error.response.headers.get("location"):
        return LocalspecError(servers.moved(found.url, location))
    said = _said(error.body or error.message, key)
    if isinstance(error, openai.RateLimitError):
        return LocalspecError(f"{found.kind.name} is busy: {said}. Wait a moment, then try again.")
    if error.status_code < 500:
        return RequestError(f"{found.kind.name} refused the request: {said}. Change it.")
    return LocalspecError(f"{found.kind.name} failed: {said}. Its own log says why.")


def _said(body: object, key: str | None) -> str:
    words = servers.sentence_in(body).rstrip(".")
    return words.replace(key, "…") if key else words


def _native_sampling(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    fields = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "sampling_seed": sampling.seed,
        "max_new_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _native_reply(one: dict[str, Any]) -> BatchReply:
    told = one.get("meta_info") or {}
    drafted, accepted = (told.get(f"spec_num_{name}_drafts") for name in ("proposed", "correct"))
    drafts = None
    if (drafted := count_in(drafted)) is not None and (accepted := count_in(accepted)) is not None:
        drafts = Drafts(count_in(told.get("spec_verify_ct")), drafted, accepted)
    text = clean("" + one.get("text", ""))
    return BatchReply(text, count_in(told.get("completion_tokens")), drafts)
