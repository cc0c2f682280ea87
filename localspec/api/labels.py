"""The headers of every answer to a program: the id of its request, and the fields it ignored.

Source: platform.openai.com/docs/api-reference/debugging-requests; docs.anthropic.com/en/api/errors.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from localspec.api.faults import REQUEST_ID, Scope, is_anthropics
from localspec.api.leftovers import HEADER, header_of

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ID_HEADER = "x-request-id"
ANTHROPICS_ID_HEADER = "request-id"
EXPOSED = (ID_HEADER, ANTHROPICS_ID_HEADER, HEADER, "retry-after")
IGNORED = "localspec.ignored"  # In the scope: names of the request's fields that were ignored.


def labelled(scope: Scope, send: Send) -> Send:
    """Return a `send` that adds the headers. A client's own id of its request is kept."""
    given = Headers(scope=scope).get(ID_HEADER, "")
    is_usable = re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", given) is not None
    scope[REQUEST_ID] = given if is_usable else f"req_{secrets.token_hex(12)}"
    scope[IGNORED] = list[str]()

    async def wrapped(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            headers[ID_HEADER] = scope[REQUEST_ID]
            if is_anthropics(scope):
                headers[ANTHROPICS_ID_HEADER] = scope[REQUEST_ID]
            if scope[IGNORED]:
                headers[HEADER] = header_of(scope[IGNORED])
            message = {**message, "headers": headers.raw}
        await send(message)

    return wrapped
