"""The headers of every answer: what a browser may do with it.

Contract: under this policy a page can run no script but Gradio's files, ours and the inline
scripts of the page itself (named by hash), reach no other address, and be framed by nobody, so
that whatever a reply contains stays text. Each loosening says why; all were found by taking
them away in Chromium and watching what breaks.

Source: w3.org/TR/CSP3.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import MutableHeaders

Scope = MutableMapping[str, Any]
MessageDict = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MessageDict]]
Send = Callable[[MessageDict], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

INLINE_SCRIPT = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
FIXED_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "x-dns-prefetch-control": "off",  # else a link in a reply is looked up unasked
}
RULES = (
    "default-src 'self'",
    "img-src 'self' data: blob:",  # Gradio's ticks are data:, a plot on its way to a file is blob:
    "font-src 'self' data:",  # one of KaTeX's fonts stands in its style sheet
    "style-src 'self' 'unsafe-inline'",  # Gradio places with style attributes; no script in them
    "connect-src 'self'",
    "base-uri 'self'",  # Gradio's page sets its own base, to itself
    "form-action 'self'",
    "worker-src 'none'",
    "media-src 'none'",
    "frame-src 'none'",
    "object-src 'none'",
    "frame-ancestors 'none'",
)
# Gradio 6 compiles the template of every gr.HTML, every `js=` handler and every plot in the
# browser; without 'unsafe-eval' the page stays empty. What it compiles are our own constants: a
# test holds that no template carries text. Inline scripts and handlers stay forbidden.
SCRIPT_RULE = "script-src 'self' 'unsafe-eval'"


def script_hashes(html: bytes) -> tuple[str, ...]:
    """CSP sources for the inline scripts of a page, in order."""
    digests = (hashlib.sha256(script).digest() for script in INLINE_SCRIPT.findall(html))
    return tuple(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def content_policy(scripts: tuple[str, ...] = ()) -> str:
    """The content policy, with the hashes of the inline scripts that may run."""
    return "; ".join((*RULES, " ".join((SCRIPT_RULE, *scripts))))


def with_headers(send: Send, policy: str | None = None, cache: str | None = "no-store") -> Send:
    """A `send` that adds the fixed headers and drops every permission for other origins. cache:
    see Route."""

    async def wrapped(message: MessageDict) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            for name in {name.lower() for name in headers}:
                if name.startswith("access-control-"):
                    del headers[name]
            for name, value in FIXED_HEADERS.items():
                headers.setdefault(name, value)
            headers["content-security-policy"] = policy or content_policy()
            if message["status"] >= 400:
                headers["cache-control"] = "no-store"
            elif cache is not None:
                headers["cache-control"] = cache
            message = {**message, "headers": headers.raw}
        await send(message)

    return wrapped
