"""The page over a service on the fake backend, and the script that its replies follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from localspec.chat.service import ChatService
from localspec.core.backend import Request
from localspec.record.store import Store
from tests.kit.fakes import REPLY, FakeBackend, Script
from tests.kit.own_cookie import KEY, TOKEN
from tests.kit.servers import HOST, serve_app
from tests.kit.waiting import until

THOUGHT = "They ask about **drafts**, and <b>this</b> is `code`."


XSS = """<script>window.__pwned = 1</script>
<img src=x onerror="window.__pwned = 2">
![remote](http://198.51.100.7/pixel.png)
<img src="http://198.51.100.7/pixel2.png">
[click](javascript:window.__pwned=3)
<svg onload="window.__pwned=4"><use href="http://198.51.100.7/x.svg#a"/></svg>
<iframe src="http://198.51.100.7/"></iframe>
<style>body{background:url(http://198.51.100.7/s.png)}</style>
```html
<b>kept as code</b>
```
the end"""


def scripted_reply(request: Request) -> str:
    """Answers by key word, so that one server serves all tests of a module."""
    asked = request.messages[-1].content
    if "xss" in asked:
        return XSS
    if "ponder" in asked:
        return f"<think>\n{THOUGHT}\n</think>\n\n{REPLY}"
    if "echo" in asked:
        return asked
    return 20 * REPLY if "endless" in asked else REPLY


PACES = {"slow": 0.25, "steady": 0.06, "brisk": 0.02}  # seconds a round


def scripted_pace(request: Request) -> float:
    """Where the message asks for it, slow enough to be stopped by a browser on a busy machine, or
    brisk: the page draws the text many times before it is whole."""
    asked = request.messages[-1].content
    return next((pace for word, pace in PACES.items() if word in asked), 0.004)


@dataclass
class Site:
    """A running server and everything behind it."""

    host: str
    port: int
    service: ChatService
    store: Store
    backend: FakeBackend
    refusable: list[tuple[str, int]] = field(default_factory=list)  # see `serving`

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.origin}/?token={TOKEN}"

    def clear(self) -> None:
        """No reply is being written, and no chat and no prompt is there."""
        service = self.service
        if service.current is not None:
            service.stop(service.current)
        until(lambda: service.current is None and service.status().phase == "ready")
        assert service.flush()
        for row in service.conversations():
            service.delete(row.id)
        for name in service.prompts.all():
            service.prompts.delete(name)
        self.backend.requests.clear()
        self.begin()

    def begin(self) -> None:
        """A test begins: the script is the usual, and replies begin with the same rounds."""
        self.backend.script = Script(reply=scripted_reply, round_s=scripted_pace)
        self.backend.num_rounds = 0

    def pace(self, round_s: float) -> None:
        """The reply that is being written goes on at this pace."""
        self.backend.script.round_s = round_s


@contextlib.contextmanager
def serve_page(
    service: ChatService, refusable: list[tuple[str, int]] | None = None
) -> Iterator[int]:
    """The page over a service, in a thread of this process; gives the port. refusable: gets the
    path and the status of every answer to what a browser did not ask for our own page."""
    from localspec.web.server import make_app

    def noting_page(port: int) -> Any:
        app = make_app(service, HOST, port, TOKEN, key=KEY)

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            is_ours = (b"sec-fetch-site", b"same-origin") in scope.get("headers", ())

            async def note(message: Any) -> None:
                starts = message["type"] == "http.response.start"
                if starts and refusable is not None and not is_ours:
                    refusable.append((scope["path"], message["status"]))
                await send(message)

            await app(scope, receive, note)

        return noted

    with serve_app(noting_page) as running:
        service.start()
        yield running.port
