"""Who may use the page: this machine's browser, let in by a launch's token, and nobody else.

`Guard` is a pure ASGI wrapper, so streams pass through unbuffered. It refuses, in this order:
a Host that is not ours (DNS rebinding), a foreign Origin or Sec-Fetch-Site (other pages in the
same browser), a missing or wrong cookie, a path that is not listed (routes), and a body that is
too long or too slow (bodies). A request that passes loses the headers that only a proxy sets, and
its answer gets the policy under which a reply can run no script and reach no other address.

The cookie is set by opening the address with `?token=`; the answer to that is a small page that
moves on by itself, since a SameSite=Strict cookie is not sent on a redirect that another
program's page began. The token is of one launch. The cookie is signed by the key of the home folder
(page_key), so the same browser gets in after a restart, too. Every account of the machine can read
a browser's command line, so the browser that localspec opens gets a ticket in the token's place,
which is good once and soon. Where localspec listens beyond loopback, all of these are good on this
machine only, and everyone else is asked for the password; another password ends their cookies.

Requests are read and answers written with Starlette's own classes. Its middleware is not used:
TrustedHostMiddleware ignores the port and cannot read an IPv6 host, so another server on this
machine would pass; SessionMiddleware keeps data in a cookie, where here there is none.

Sources: jupyter_server security documentation; fetch.spec.whatwg.org (Sec-Fetch-Site, Origin).
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from localspec.core.options import is_loopback
from localspec.web.guard.bodies import Bodies, BodyRefused, Gone, own_json, replayed
from localspec.web.guard.page_key import PageKey
from localspec.web.guard.password import FORM, LOGIN_S, Password, Places, Tries, password_in
from localspec.web.guard.policy import (
    App,
    MessageDict,
    Receive,
    Scope,
    Send,
    content_policy,
    script_hashes,
    with_headers,
)
from localspec.web.guard.routes import HEALTH_PATH, LOGIN_PATH, Route, route_of

SAFE_METHODS = ("GET", "HEAD")
LOGIN_BYTES = 4 * 2**10
TICKET_S = 120.0  # for a browser to start
# Seconds that a cookie is good for; each visit of the page renews it.
COOKIE_S = 90 * 24 * 3600
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">{head}
<meta name="viewport" content="width=device-width, initial-scale=1"><title>localspec</title>
<body style="font:16px/1.6 system-ui,sans-serif;margin:20vh auto;max-width:34rem;padding:0 1rem">
<main>{sentence}</main></body></html>"""

# The clock of Gradio's first loading message is never stopped: it draws the page sixty times a
# second for ever, which takes a tenth of a core. No clock of Gradio's is seen here, so none gets a
# frame. Gradio adds scripts of ours too late for that.
HEAD = b"<head>"
FIRST_SCRIPT = rb"""<script>{
  const CLOCK = /performance\.now\(\)\s*-[^,;]*\/\s*(1e3|1000)\b/; // in the seconds that it shows
  const ask = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (act) => (CLOCK.test(act) ? 0 : ask(act));
}</script>"""

# A request with two of these counts as none of ours: two readers could see two different requests.
SINGLE = (
    "host", "origin", "content-length", "transfer-encoding", "cookie", "sec-fetch-site",
    "authorization", "x-api-key",
)  # fmt: skip
NOT_PASSED_ON = (b"forwarded", b"accept-encoding", b"content-length")
NOT_HERE = "localspec answers only under its own address."
NOT_OURS = "Another page asked for this. localspec answers only its own."
NO_KEY = (
    "localspec does not know this browser. Open the link from its window, or start it again: it "
    "then opens its page."
)
OLD_ADDRESS = (
    "This link was opened before or belongs to an earlier start of localspec. Open the new link "
    "from its window, or start it again: it then opens its page."
)
NO_ROUTE = "localspec does not use this path."
CLOSE = {"connection": "close"}  # the rest of the body is not read


@dataclass(frozen=True)
class Hosts:
    """Whether a request was sent to this server by one of its own names (DNS rebinding). names:
    every `name:port` by which it may be called, beside the address a connection was made to."""

    names: frozenset[str]
    port: int

    def are_called(self, scope: Scope, headers: Headers) -> bool:
        if any(len(headers.getlist(name)) > 1 for name in SINGLE):
            return False
        host = headers.get("host", "").lower()
        return host in self.names or host == self._own_address(scope)

    def _own_address(self, scope: Scope) -> str | None:
        """The address this connection was made to. It is a number, so no name that another
        person's DNS points here can equal it."""
        server = scope.get("server")
        if server is None:
            return None
        return f"[{server[0]}]:{self.port}" if ":" in server[0] else f"{server[0]}:{self.port}"


def ticket_purpose(token: str) -> str:
    """Return the purpose of a ticket that is good in the place of this launch's token."""
    return f"ticket {token}"


def owner_purpose(port: int) -> str:
    """Return the purpose of the cookie of this machine's browser, for the server at this port."""
    return f"owner {port}"


class Guard:
    """The wrapper. password: None while only loopback is served. key: None for a key of this launch
    alone."""

    def __init__(
        self,
        app: App,
        token: str,
        hosts: Hosts,
        password: Password | None = None,
        bodies: Bodies | None = None,
        key: PageKey | None = None,
    ) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts
        self._password = password
        self._tries = Tries()
        self._bodies = bodies or Bodies()
        self._places = Places()
        self._logins = Bodies(LOGIN_S)
        self._key = key or PageKey()
        self._used_tickets = set[str]()
        self._cookie = f"localspec_{hosts.port}"  # cookies ignore the port: two servers, two names
        self._owner = owner_purpose(hosts.port)
        self._guest = f"guest {hosts.port} {password.fingerprint}" if password else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 4403})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        path, method = scope["path"], scope["method"]
        if not self._hosts.are_called(scope, headers):
            await _answer(scope, send, 403, NOT_HERE)
        elif not _is_from_our_page(scope, headers):
            await _answer(scope, send, 403, NOT_OURS)
        elif method == "GET" and path == HEALTH_PATH:
            await self._app(scope, receive, with_headers(send))
        elif method == "GET" and path == "/" and b"token=" in scope["query_string"]:
            await self._welcome(scope, send)
        elif method == "POST" and path == LOGIN_PATH and self._password is not None:
            await self._log_in(self._password, scope, receive, send)
        elif self._purpose_of_cookie(scope) is None:
            await self._ask_for_the_key(scope, send)
        elif (route := route_of(method, path)) is None:
            await _answer(scope, send, 403, NO_ROUTE)
        else:
            await self._pass_on(route, scope, receive, send)

    # where a request comes from

    def _purpose_of_cookie(self, scope: Scope) -> str | None:
        """Return what the request's cookie was signed for; None for a missing or wrong one."""
        value = Request(scope).cookies.get(self._cookie, "")
        for purpose in (self._guest, self._owner if self._token_counts(scope) else None):
            if purpose is not None and self._key.is_signed(value, purpose, COOKIE_S):
                return purpose
        return None

    def _token_counts(self, scope: Scope) -> bool:
        return self._password is None or is_this_machine(scope)

    # answers to a request without the key

    async def _ask_for_the_key(self, scope: Scope, send: Send) -> None:
        if self._password is not None and scope["method"] == "GET" and scope["path"] == "/":
            await _ask_for_the_password(scope, send, "localspec runs on another machine here.")
        else:
            await _answer(scope, send, 401, NO_KEY)

    async def _welcome(self, scope: Scope, send: Send) -> None:
        given = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        is_opened = self._token_counts(scope) and self._opens(given.pop("token", ""))
        purpose = self._owner if is_opened else self._purpose_of_cookie(scope)
        if purpose is None:
            await _answer(scope, send, 401, OLD_ADDRESS)
            return
        page = route_of("GET", "/")
        assert page is not None and page.query is not None
        rest = urlencode({name: value for name, value in given.items() if name in page.query})
        target = f"/?{rest}" if rest else "/"
        head = f'<meta http-equiv="refresh" content="0; url={target}">'
        answer = _page(200, f'<a href="{target}">Open localspec</a>', head)
        self._set_cookie(answer, purpose)
        await _send(answer, scope, send)

    def _opens(self, value: str) -> bool:
        """True for this launch's token, and once for each of its tickets."""
        if _is_same(value, self._token):
            return True
        is_new = value not in self._used_tickets
        if is_new and self._key.is_signed(value, ticket_purpose(self._token), TICKET_S):
            self._used_tickets.add(value)
            return True
        return False

    async def _log_in(self, password: Password, scope: Scope, receive: Receive, send: Send) -> None:
        address = (scope.get("client") or ("unknown", 0))[0]
        form = await _or_refuse(self._form(address, scope, receive), scope, send)
        if form is None:
            return
        wait_s = self._tries.wait_s(address)
        if wait_s > 0:
            sentence = f"Too many wrong passwords. Try again in {wait_s:.0f} seconds."
            await _answer(scope, send, 429, sentence, {"retry-after": str(int(wait_s) + 1)})
            return
        self._tries.begin(address)
        if not await asyncio.to_thread(password.is_right, password_in(form)):
            await _ask_for_the_password(scope, send, "That is not the password.")
            return
        self._tries.forget(address)
        answer = _page(303, "Open localspec.", headers={"location": "/"})
        assert self._guest is not None, "there is a password"
        self._set_cookie(answer, self._guest)
        await _send(answer, scope, send)

    def _set_cookie(self, answer: Response, purpose: str) -> None:
        value = self._key.signed(purpose)
        answer.set_cookie(
            self._cookie, value, max_age=COOKIE_S, path="/", httponly=True, samesite="strict"
        )

    async def _form(self, address: str, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a login. Raise BodyRefused or Gone."""
        with self._places.place(address, self._tries.is_known(address)):
            return await self._logins.read(receive, _length_of(scope), LOGIN_BYTES)

    async def _body(self, route: Route, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request of our page. Raise BodyRefused or Gone."""
        body = await self._bodies.read(receive, _length_of(scope), route.max_bytes)
        return own_json(body) if body and not route.is_file else body

    # answers to our page

    async def _pass_on(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _or_refuse(self._body(route, scope, receive), scope, send)
        if body is None:
            return
        inner = _as_passed_on(scope, route)
        receive = replayed(body, receive)
        if scope["path"] == "/":
            await self._send_page(inner, receive, send)
        else:
            await self._app(inner, receive, with_headers(send, cache=route.cache))

    async def _send_page(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The one page is held back until complete: its policy lists the hashes of its scripts, and
        its first one is ours. It renews the cookie."""
        held: list[MessageDict] = []

        async def hold(message: MessageDict) -> None:
            held.append(message)

        await self._app(scope, receive, hold)
        start, *parts = held
        body = b"".join(part.get("body", b"") for part in parts)
        body = body.replace(HEAD, HEAD + FIRST_SCRIPT, 1)
        headers = MutableHeaders(raw=start["headers"])
        headers["content-length"] = str(len(body))
        if (purpose := self._purpose_of_cookie(scope)) is not None:
            renewal = Response()
            self._set_cookie(renewal, purpose)
            headers.append("set-cookie", renewal.headers["set-cookie"])
        send_page = with_headers(send, content_policy(script_hashes(body)))
        await send_page(start)
        await send_page({"type": "http.response.body", "body": body})


def _is_from_our_page(scope: Scope, headers: Headers) -> bool:
    if "upgrade" in headers:  # a WebSocket; there is none here
        return False
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin.lower() != f"http://{headers['host'].lower()}":
        return False
    if scope["method"] not in SAFE_METHODS:  # every browser says where such a request comes from
        return site == "same-origin" or (site is None and origin is not None)
    if site in (None, "same-origin", "none"):
        return True
    # Following a link to the page itself is harmless, and the only way in from elsewhere.
    is_visit = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
    return is_visit and headers.get("sec-fetch-dest") == "document"


def is_this_machine(scope: Scope) -> bool:
    """Whether the request comes from this very machine, by whichever of its addresses."""
    client, server = scope.get("client"), scope.get("server")
    if client is None:
        return False
    if server is not None and client[0] == server[0]:
        return True
    return is_loopback(client[0])


def _is_same(candidate: str, secret: str) -> bool:
    return hmac.compare_digest(candidate.encode("utf-8", "replace"), secret.encode())


def _as_passed_on(scope: Scope, route: Route) -> Scope:
    """The request without what only a proxy would say (Gradio believes X-Forwarded-Host and
    X-Gradio-Server without asking) and without parameters the route does not know. Nothing is
    compressed: on one machine that costs more than half of the time to answer. The body may have
    another length by now."""
    kept = [
        pair
        for pair in scope["headers"]
        if not pair[0].startswith(b"x-") and pair[0] not in NOT_PASSED_ON
    ]
    query: bytes = scope["query_string"]
    if route.query is not None:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        query = urlencode([pair for pair in pairs if pair[0] in route.query]).encode()
    return {**scope, "headers": kept, "query_string": query}


def _length_of(scope: Scope) -> str | None:
    return Headers(scope=scope).get("content-length")


async def _or_refuse(body: Awaitable[bytes], scope: Scope, send: Send) -> bytes | None:
    """Return the body; None if it was refused, which is answered here, or if the sender left."""
    try:
        return await body
    except Gone:
        return None
    except BodyRefused as refused:
        await _answer(scope, send, refused.status, str(refused), CLOSE)
        return None


async def _ask_for_the_password(scope: Scope, send: Send, sentence: str) -> None:
    # Under no-referrer a browser would send the form with Origin: null.
    await _answer(scope, send, 401, f"{sentence}{FORM}", {"referrer-policy": "same-origin"})


async def _answer(
    scope: Scope, send: Send, status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> None:
    await _send(_page(status, sentence, headers=headers), scope, send)


def _page(
    status: int, sentence: str, head: str = "", headers: Mapping[str, str] | None = None
) -> HTMLResponse:
    return HTMLResponse(PAGE.format(head=head, sentence=sentence), status, headers)


async def _send(answer: Response, scope: Scope, send: Send) -> None:
    async def nothing() -> MessageDict:
        raise AssertionError("a short answer reads nothing")

    await answer(scope, nothing, with_headers(send))
