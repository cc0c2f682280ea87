"""A real server on the fake backend, and a real browser to look at it, one of each per module."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localspec.backend import Request
from localspec.chat.service import ChatService
from localspec.record.store import Store
from tests.fakes import REPLY, FakeBackend, Script, session_info

TOKEN = "a-token-of-this-launch"
WAIT_MS = 60_000

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
    if "echo" in asked:
        return asked
    return REPLY


def scripted_pace(request: Request) -> float:
    """Slow enough to be stopped by a browser on a busy machine, where the message asks for it."""
    return 0.25 if "slow" in request.messages[-1].content else 0.02


@dataclass
class Site:
    """A running server and everything behind it."""

    host: str
    port: int
    service: ChatService
    store: Store
    backend: FakeBackend

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.origin}/?token={TOKEN}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    import uvicorn

    from localspec.web.server import make_app

    store = Store.open(tmp_path_factory.mktemp("site") / "localspec.db")
    backend = FakeBackend(Script(reply=scripted_reply, round_s=scripted_pace))
    service = ChatService(store, session_info, lambda report: backend)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    app = make_app(service, "127.0.0.1", port, TOKEN)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    service.start()
    yield Site("127.0.0.1", port, service, store, backend)
    server.should_exit = True
    thread.join(timeout=10)
    service.close()
    store.close()
    bound.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=chromium,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
            ],
        )
        yield opened
        opened.close()


@dataclass
class Visit:
    """A page open in the browser, and what it did that it should not have."""

    page: Any
    site: Site
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def open(self, query: str = "") -> None:
        self.page.goto(f"{self.site.url}{query}")
        self.page.wait_for_selector("#ls-message textarea", timeout=WAIT_MS)
        self.page.wait_for_selector('#ls-strip[data-phase="ready"]', timeout=WAIT_MS)
        # Gradio shows its form before it listens to it; a key pressed in between is lost.
        self.page.wait_for_timeout(800)

    def send(self, text: str) -> None:
        self.page.fill("#ls-message textarea", text)
        self.page.press("#ls-message textarea", "Enter")

    def wait_for(self, text: str, selector: str = "#ls-chat") -> None:
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)",
            arg=[selector, text],
            timeout=WAIT_MS,
        )

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def new_chat(self) -> None:
        is_empty = "() => !document.querySelector('#ls-chat [data-testid=user]')"
        for _ in range(6):  # a click while the page still shows the turn before may be lost
            self.page.click("#ls-new")
            self.page.wait_for_timeout(1500)
            if self.page.evaluate(is_empty):
                return
        raise AssertionError("New chat did not empty the chat")


Open = Callable[..., Visit]


@pytest.fixture
def visit(site: Site, browser: Any) -> Iterator[Open]:
    """Open pages in one fresh browser context; at the end no page may have erred or called out."""
    context = browser.new_context(viewport={"width": 1280, "height": 850}, accept_downloads=True)
    context.set_default_timeout(WAIT_MS)
    visits: list[Visit] = []

    def make() -> Visit:
        one = Visit(context.new_page(), site)
        one.page.on("pageerror", lambda error: one.errors.append(str(error)))
        one.page.on("console", lambda m: m.type == "error" and one.errors.append(m.text))
        one.page.on("request", lambda request: note_request(one, request.url))
        visits.append(one)
        return one

    yield make
    context.close()
    for one in visits:
        # A page that is left aborts its own requests, and Gradio's code reports that as an error.
        assert [e for e in one.errors if not e.startswith("AbortError: signal is aborted")] == []
        assert one.outside == []


def note_request(visit: Visit, url: str) -> None:
    if not url.startswith((visit.site.origin, "data:", "blob:", "about:")):
        visit.outside.append(url)


def until(is_true: Callable[[], bool], wait_s: float = 60.0) -> None:
    deadline = time.monotonic() + wait_s
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gradio counts its queue with options that this pandas has deprecated."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(
                pytest.mark.filterwarnings("ignore:.*(no_silent_downcasting|The copy keyword)")
            )
