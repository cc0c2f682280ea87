"""The HTTP connection to one server: every answer is read within limits of time, size and depth.

`Connection.ask` asks a short question. `Connection.client` is for OpenAI's package, which streams
replies over it. Both read through `_limit`, so that no answer of a server can fill the memory or
last for ever. What goes beyond a limit raises a sentence. Redirects are not followed: the key is
for this server alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal

from localspec.core.errors import LocalspecError, first_line
from localspec.core.files import parsed
from localspec.core.http_limits import Limits
from localspec.core.options import RemoteServer, is_loopback
from localspec.core.proxies import require_usable_proxies

# Seconds until a server must have taken a connection.
CONNECT_S = 10.0
# Replies, by the end of their address. Whatever else a server answers is read whole.
STREAMS = "/completions"


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
    has_events = response.is_success and response.request.url.path.endswith(STREAMS)
    Limits(partial(_refuse, url)).bound(response, has_events)


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
