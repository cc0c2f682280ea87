"""Which programs may use the interfaces below /v1 and read /metrics: those that have a key. Whether
the server is up (/health) is told without one.

`ProgramGuard` is a pure ASGI wrapper beside the page's `Guard`: it takes the interfaces' paths and
passes everything else on. It refuses, in this order: a Host that is not ours, a request of a
browser's page from another origin than those allowed, a missing or unknown key, a body that is too
long or too slow. Every refusal is in the interface's own error format. A key is needed on loopback
too: every account of a machine reaches that.

Cross-origin use is off unless origins are named; then Starlette's CORSMiddleware answers for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from localspec.api.faults import Fault
from localspec.api.labels import EXPOSED, labelled
from localspec.core.errors import StoreError
from localspec.web.guard.bodies import Bodies, BodyRefused, Gone, replayed
from localspec.web.guard.policy import App, Receive, Scope, Send
from localspec.web.guard.security import NOT_HERE, Hosts

BODY_BYTES = 16 * 2**20
PREFIX = "/v1/"
OTHER_PATHS = frozenset({"/metrics", "/version", "/tokenize"})
HEALTH_PATH = "/health"  # Says that the server is up, without a key.

NOT_ALLOWED = "A page of another origin asked for this. Allow it with --allow-origin."
NO_KEY = (
    "This needs a key of localspec, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'. "
    "Make one on localspec's page, under Models, or with: python -m localspec keys make NAME"
)
NO_PAGE = (
    "localspec serves no page here, only its interfaces for programs, below /v1. Give OpenAI's "
    "clients this address with /v1 behind it, Anthropic's without."
)
CHALLENGE = {"www-authenticate": "Bearer"}


class ProgramGuard:
    """The wrapper. api: the interfaces. otherwise: what gets every other request. opens: whether
    this is a key. origins: of pages that may call the interfaces from a browser."""

    def __init__(
        self,
        api: App,
        otherwise: App,
        opens: Callable[[str], bool],
        hosts: Hosts,
        origins: Sequence[str] = (),
        bodies: Bodies | None = None,
    ) -> None:
        self._api = api
        self._otherwise = otherwise
        self._opens = opens
        self._hosts = hosts
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self._bodies = bodies or Bodies()
        self._guarded: App = self._with_key
        if origins:
            self._guarded = CORSMiddleware(
                self._with_key,
                allow_origins=sorted(self._origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not _is_for_programs(path):
            await self._otherwise(scope, receive, send)
            return
        headers, send = Headers(scope=scope), labelled(scope, send)
        if not self._hosts.are_called(scope, headers):
            await _refuse(Fault(403, NOT_HERE), scope, receive, send)
        elif not self._may_ask(headers):
            await _refuse(Fault(403, NOT_ALLOWED), scope, receive, send)
        else:
            await self._guarded(scope, receive, send)

    def _may_ask(self, headers: Headers) -> bool:
        """A program sends neither header; a browser says where a request comes from."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is None:
            return site in (None, "none", "same-origin")
        return origin.lower() in {*self._origins, f"http://{headers['host'].lower()}"}

    async def _with_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault, body = await self._checked(scope, receive)
        if fault is not None:
            await _refuse(fault, scope, receive, send)
        elif body is not None:
            await self._api(scope, replayed(body, receive), send)

    async def _checked(self, scope: Scope, receive: Receive) -> tuple[Fault | None, bytes | None]:
        """Why the request is refused, else its body; neither where the sender went away."""
        headers = Headers(scope=scope)
        if scope["path"] == HEALTH_PATH and scope["method"] in ("GET", "HEAD"):
            return None, b""  # nothing is read for who has no key
        try:
            if not await run_in_threadpool(self._opens, _key_in(headers)):
                return Fault(401, NO_KEY, "invalid_api_key", headers=CHALLENGE), None
            length = headers.get("content-length")
            return None, await self._bodies.read(receive, length, BODY_BYTES)
        except BodyRefused as refused:
            told = {"connection": "close"}  # the rest of the body is not read
            if refused.status == 503:  # other bodies are being read
                told["retry-after"] = "1"
            return Fault(refused.status, str(refused), headers=told), None
        except StoreError as error:
            return Fault(503, str(error)), None
        except Gone:
            return None, None


def _is_for_programs(path: str) -> bool:
    return path.startswith(PREFIX) or path in OTHER_PATHS or path == HEALTH_PATH


def _key_in(headers: Headers) -> str:
    """The key of a request, "" where it has none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


async def _refuse(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    await fault.response(scope)(scope, receive, send)


async def nothing_else(scope: Scope, receive: Receive, send: Send) -> None:
    """The `otherwise` of a server without a page."""
    if scope["type"] == "http":
        await _refuse(Fault(404, NO_PAGE), scope, receive, send)
        return
    message = {"type": ""}
    while scope["type"] == "lifespan" and message["type"] != "lifespan.shutdown":
        message = dict(await receive())
        await send({"type": f"{message['type']}.complete"})
