"""Who may talk to the page: this machine's browser, opened with this launch's token, nobody else.

`Guard` is a pure ASGI wrapper, so streams pass through unbuffered. It refuses, in this order:
a Host that is not ours (DNS rebinding), a foreign Origin or Sec-Fetch-Site (other pages in the
same browser), a missing or wrong cookie, a path of Gradio's that we do not use, and a body that
is too large. It adds a content policy under which a reply can run no script and reach no other
address, whatever its Markdown contains.

The cookie is set by opening the address with `?token=`; the answer to that is a small page that
moves on by itself, since a SameSite=Strict cookie is not sent on a redirect that another
program's page began.

Sources: jupyter_server security documentation; fetch.spec.whatwg.org (Sec-Fetch-Site);
w3.org/TR/CSP3 (hashes of inline scripts).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode

Scope = MutableMapping[str, Any]
MessageDict = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MessageDict]]
Send = Callable[[MessageDict], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 8 * 2**20  # a pasted megabyte and the JSON around it, many times over
HEALTH_PATH = "/healthz"
UNUSED_PATHS = (
    "/gradio_api/upload",
    "/gradio_api/proxy",
    "/gradio_api/file",
    "/gradio_api/mcp",
    "/gradio_api/component_server",
    "/gradio_api/custom_component",
    "/proxy",
    "/file",
    "/monitoring",
    "/login",
    "/vibe",
)
INLINE_SCRIPT = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
FIXED_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">{head}
<meta name="viewport" content="width=device-width, initial-scale=1"><title>localspec</title>
<body style="font:16px/1.6 system-ui,sans-serif;margin:20vh auto;max-width:34rem;padding:0 1rem">
<p>{sentence}</p></body></html>"""


class Guard:
    """The wrapper. hosts: every `name:port` by which this server may be called."""

    def __init__(self, app: App, token: str, port: int, hosts: frozenset[str]) -> None:
        self._app = app
        self._token = token
        self._hosts = hosts
        self._origins = frozenset(f"http://{host}" for host in hosts)
        self._cookie = f"localspec_{port}"  # cookies ignore the port: two servers, two names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 4403})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        path: str = scope["path"]
        if headers.get("host", "").lower() not in self._hosts:
            await _answer(send, 403, "localspec answers only under its own address.")
        elif not self._is_from_our_page(scope, headers):
            await _answer(send, 403, "Another page asked for this. localspec answers only its own.")
        elif path == HEALTH_PATH:
            await self._app(scope, receive, send)
        elif scope["method"] == "GET" and path == "/" and b"token=" in scope["query_string"]:
            await self._welcome(scope, send)
        elif not self._has_cookie(headers):
            await _answer(
                send,
                401,
                "This page needs the key of its launch. Open the address that localspec printed "
                "when it started.",
            )
        elif path.startswith(UNUSED_PATHS):
            await _answer(send, 403, "localspec does not use this path.")
        elif not _is_short(headers.get("content-length", "0")):
            await _answer(send, 413, "This is too long to be sent at once.")
        else:
            await self._pass_on(scope, receive, send)

    def _is_from_our_page(self, scope: Scope, headers: dict[str, str]) -> bool:
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self._origins:
            return False
        if headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
            return True
        # Following a link to the page itself is harmless, and the only way in from elsewhere.
        is_visit = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
        return scope["method"] == "GET" and is_visit and headers.get("sec-fetch-dest") == "document"

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load(headers.get("cookie", ""))
        except CookieError:
            return False
        return self._cookie in jar and self._is_token(jar[self._cookie].value)

    def _is_token(self, candidate: str) -> bool:
        return hmac.compare_digest(candidate.encode(), self._token.encode())

    async def _welcome(self, scope: Scope, send: Send) -> None:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if not self._is_token(query.pop("token", [""])[0]):
            await _answer(send, 401, "This address belongs to an earlier start of localspec.")
            return
        rest = urlencode({name: values[0] for name, values in query.items()})
        target = f"/?{rest}" if rest else "/"
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        head = f'<meta http-equiv="refresh" content="0; url={target}">'
        extra = [(b"set-cookie", cookie.encode())]
        await _answer(send, 200, f'<a href="{target}">Open localspec</a>', head, extra)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/":
            await self._app(scope, _limited(receive), _with_headers(send))
            return
        # The one page is held back until complete: its policy lists the hashes of its scripts.
        plain = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
        held: list[MessageDict] = []

        async def hold(message: MessageDict) -> None:
            held.append(message)

        await self._app({**scope, "headers": plain}, _limited(receive), hold)
        body = b"".join(message.get("body", b"") for message in held)
        send_page = _with_headers(send, content_policy(script_hashes(body)))
        for message in held:
            await send_page(message)


def _is_short(content_length: str) -> bool:
    return content_length.isdecimal() and int(content_length) <= MAX_BODY_BYTES


def script_hashes(html: bytes) -> tuple[str, ...]:
    """CSP sources for the inline scripts of a page, in order."""
    digests = (hashlib.sha256(script).digest() for script in INLINE_SCRIPT.findall(html))
    return tuple(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def content_policy(scripts: tuple[str, ...] = ()) -> bytes:
    """The content policy. Gradio compiles templates and plots in the browser ('unsafe-eval') and
    writes style attributes; inline scripts and handlers stay forbidden but for those listed."""
    return "; ".join(
        (
            "default-src 'self'",
            " ".join(("script-src 'self' 'unsafe-eval'", *scripts)),
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            "worker-src 'self' blob:",
            "frame-src 'none'",
            "object-src 'none'",
            "base-uri 'self'",  # Gradio's page sets its own base
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    ).encode()


def _with_headers(send: Send, policy: bytes | None = None) -> Send:
    async def wrapped(message: MessageDict) -> None:
        if message["type"] == "http.response.start":
            kept = [
                pair
                for pair in message.get("headers", [])
                if not pair[0].lower().startswith(b"access-control-")
            ]
            added = [*FIXED_HEADERS, (b"content-security-policy", policy or content_policy())]
            message = {**message, "headers": [*kept, *added]}
        await send(message)

    return wrapped


def _limited(receive: Receive) -> Receive:
    """Also counts a body sent without a length; past the limit the sender is treated as gone."""
    seen = 0

    async def wrapped() -> MessageDict:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > MAX_BODY_BYTES else message

    return wrapped


async def _answer(
    send: Send,
    status: int,
    sentence: str,
    head: str = "",
    extra: list[tuple[bytes, bytes]] | None = None,
) -> None:
    body = PAGE.format(head=head, sentence=sentence).encode()
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *(extra or []),
    ]
    send = _with_headers(send)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
