"""The HTTP connection to one server: every answer is read within limits of time, size and depth.

`Connection.ask` asks a short question. `Connection.client` is for OpenAI's package, which streams
replies over it. Both read through `_limit`, so that no answer of a server can fill the memory or
last for ever. What goes beyond a limit raises a sentence. Redirects are not followed: the key is
for this server alone.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal

from localspec.core.errors import LocalspecError, first_line
from localspec.core.files import MOST_DEPTH, is_deep, parsed
from localspec.core.options import RemoteServer, is_loopback
from localspec.core.proxies import require_usable_proxies

# Seconds until a server must have taken a connection.
CONNECT_S = 10.0
# Bytes of an answer that is no stream. A list of some thousand models has about one MiB.
ANSWER_BYTES = 8 * 2**20
# Bytes of an event of a stream, with what comes before it and is no event. A token with its 20
# likeliest alternatives has about 8 KiB.
EVENT_BYTES = 2**20
# Replies, by the end of their address. Whatever else a server answers is read whole.
STREAMS = "/completions"
END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")
HAS_DATA = re.compile(rb"(?:^|[\r\n])data")


@dataclass(frozen=True)
class Answer:
    """A whole answer of a server. location: where a redirect leads to."""

    status: int
    content: bytes
    location: str = ""

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Return the value of the JSON text. Raises ValueError."""
        return parsed(self.content)


class Connection:
    """See the module. Raises ConfigError where the environment names a proxy that cannot be
    used."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        with ExitStack() as stack:
            self.portal = stack.enter_context(start_blocking_portal())
            self.client = _client_of(server)
            stack.callback(self.portal.call, self.client.aclose)
            self._open = stack.pop_all()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.close()

    def ask(
        self, method: str, path: str, within_s: float, body: Mapping[str, Any] | None = None
    ) -> Answer:
        """Return the whole answer. Raises LocalspecError where none comes within `within_s`, or
        none that can be read."""
        return self.portal.call(partial(self._ask, method, path, within_s, body))

    async def _ask(
        self, method: str, path: str, within_s: float, body: Mapping[str, Any] | None
    ) -> Answer:
        url, key = self._server.address, self._server.key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            with anyio.fail_after(within_s):
                answer = await self.client.request(method, url + path, json=body, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise LocalspecError(gone(url, first_line(error))) from error
        except TimeoutError as error:
            raise LocalspecError(gone(url, f"no whole answer within {within_s:g} s")) from error
        return Answer(answer.status_code, answer.content, answer.headers.get("location", ""))


def _client_of(server: RemoteServer) -> httpx2.AsyncClient:
    from openai import DefaultAsyncHttpxClient

    url = server.address
    if uses_proxies(url):
        require_usable_proxies()
    client: httpx2.AsyncClient = DefaultAsyncHttpxClient(
        headers={"accept-encoding": "identity"},
        timeout=httpx2.Timeout(None, connect=CONNECT_S),
        trust_env=uses_proxies(url),
        follow_redirects=False,
        event_hooks={"response": [partial(_limit, url)]},
    )
    return client


def uses_proxies(url: str) -> bool:
    """A proxy of the environment is not asked for what runs on this machine."""
    return not is_loopback(urlsplit(url).hostname or "")


async def _limit(url: str, response: httpx2.Response) -> None:
    """Let the body of an answer be read within limits only. Raises LocalspecError."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        _refuse(url, "a packed answer, although it was asked for a plain one")
    # An encoding that the server names could unpack, or fail.
    response.encoding = "utf-8"
    is_stream = response.is_success and response.request.url.path.endswith(STREAMS)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = (_Events if is_stream else _Whole)(response.stream, url)


class _Whole(httpx2.AsyncByteStream):
    """The bytes of an answer that is no stream, once all are there."""

    def __init__(self, stream: httpx2.AsyncByteStream, url: str) -> None:
        self._stream = stream
        self._url = url

    async def __aiter__(self) -> AsyncIterator[bytes]:
        content = bytearray()
        async for part in self._stream:
            content += part
            if len(content) > ANSWER_BYTES:
                _refuse(self._url, f"an answer of more than {ANSWER_BYTES // 2**20} MiB")
        _require_flat(content, self._url)
        yield bytes(content)

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Events(httpx2.AsyncByteStream):
    """The bytes of a stream of events, one whole event at a time. Blocks without data, by which a
    server keeps a connection open, are left out."""

    def __init__(self, stream: httpx2.AsyncByteStream, url: str) -> None:
        self._stream = stream
        self._url = url

    async def __aiter__(self) -> AsyncIterator[bytes]:
        rest, num_idle = bytearray(), 0
        async for part in self._stream:
            looked_at = max(0, len(rest) - 3)
            rest += part
            start = 0
            for end in END_OF_EVENT.finditer(rest, looked_at):
                event = bytes(rest[start : end.end()]).removeprefix(BOM_UTF8)
                start = end.end()
                if HAS_DATA.search(event):
                    _require_flat(event, self._url)
                    num_idle = 0
                    yield event
                else:
                    num_idle += len(event)
            del rest[:start]
            if len(rest) + num_idle > EVENT_BYTES:
                _refuse(self._url, f"more than {EVENT_BYTES // 2**20} MiB without a whole event")
        _require_flat(rest, self._url)
        yield bytes(rest)

    async def aclose(self) -> None:
        await self._stream.aclose()


def _require_flat(content: bytes | bytearray, url: str) -> None:
    """Raise LocalspecError where lists and objects lie too deep inside each other."""
    if is_deep(content):
        _refuse(url, f"more than {MOST_DEPTH} lists inside each other")


def _refuse(url: str, what: str) -> NoReturn:
    raise LocalspecError(
        f"The server at {url} sent {what}, which is not read. Check that it is a server with "
        "OpenAI's interface."
    )


def gone(url: str, reason: str) -> str:
    """Return a sentence on a server that cannot be reached."""
    if "CERTIFICATE" in reason.upper():
        return (
            f"The certificate of {url} is not trusted here: {reason}. Install it on this machine."
        )
    return (
        f"The server at {url} does not answer ({reason}). Check that it runs and that the address "
        "is right, then try again."
    )
