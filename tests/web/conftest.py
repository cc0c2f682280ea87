"""A real server on the fake backend, and a real browser to look at it, one of each per process."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.core.backend import Request
from localspec.record.store import Store
from localspec.web.talk.plain_markdown import MARK
from tests.kit import waiting
from tests.kit.fakes import REPLY, FakeBackend, Script, session_info
from tests.kit.own_cookie import KEY, TOKEN
from tests.kit.servers import HOST, serve_app
from tests.web import witness
from tests.web.tabs import VIEWPORT, Tabs, new_tab

THOUGHT = "They ask about **drafts**, and <b>this</b> is `code`."
WAIT_MS = 60_000
# Gradio shows its form before it listens to it; the first news comes when it does. Our own scripts
# come later still: they name the button of the settings, which they close where there is no room.
LISTENS = """() => window.lsBridges === 2 && Boolean(window.lsSignal)
  && Boolean(document.querySelector('#ls-settings .toggle-button[aria-expanded]'))"""
until = waiting.until

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


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ChatService]:
    """A service on the fake that nobody has started."""
    store = Store.open(tmp_path / "localspec.db")
    quick = Script(prefill_s=0.0, round_s=0.002)
    made = ChatService(store, session_info, lambda *_: FakeBackend(quick))
    yield made
    made.close()
    store.close()


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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    store = Store.open(tmp_path_factory.mktemp("site") / "localspec.db")
    backend = FakeBackend()
    service = ChatService(store, session_info, lambda report: backend)
    refusable: list[tuple[str, int]] = []
    with serve_page(service, refusable=refusable) as port:
        yield Site("127.0.0.1", port, service, store, backend, refusable)
    service.close()
    store.close()


@pytest.fixture(scope="module")
def site(server: Site) -> Site:
    """The server without what the tests of other modules left on it."""
    server.clear()
    return server


BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
)


def launch(playwright: Any, *flags: str) -> Any:
    """A headless Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    return playwright.chromium.launch(executable_path=chromium, args=[*BROWSER_FLAGS, *flags])


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def browser(playwright: Any) -> Iterator[Any]:
    opened = launch(playwright)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def context(browser: Any) -> Iterator[Any]:
    """The browser context of all pages that need no fresh one: what it has fetched of Gradio's
    scripts it keeps."""
    made = browser.new_context(viewport=VIEWPORT, accept_downloads=True)
    made.set_default_timeout(WAIT_MS)
    witness.watch(made)
    yield made
    made.close()


@dataclass
class Visit:
    """A page open in the browser, and what it did that it should not have."""

    page: Any
    site: Site
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def open(self, query: str = "") -> None:
        self.show()
        self.page.goto(f"{self.site.url}{query}")
        self.page.wait_for_selector('#ls-strip[data-phase="ready"]', timeout=WAIT_MS)
        self.page.wait_for_function(LISTENS, timeout=WAIT_MS)

    def show(self) -> None:
        """Make it the page in front: of the others Chromium draws one frame a second, and every
        click and most waits need frames."""
        self.page.bring_to_front()

    def reload(self) -> None:
        self.page.reload()

    def send(self, text: str) -> None:
        self.show()
        self.page.fill("#ls-message textarea", text)
        self.page.press("#ls-message textarea", "Enter")

    def wait_for(self, text: str, selector: str = "#ls-chat") -> None:
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)",
            arg=[selector, text],
            timeout=WAIT_MS,
        )

    def text(self, selector: str) -> str:
        """What a person reads there: without the invisible marks."""
        return str(self.page.inner_text(selector)).replace(MARK, "")

    def new_chat(self) -> None:
        """Begin a new chat, and wait for the news that it is shown. The news is listened for: other
        news may follow it before anybody looks."""
        self.page.evaluate(
            """() => {
              window.movedTo = null;
              window.addEventListener('ls-signal', (event) => {
                window.movedTo = JSON.parse(event.detail).moved ?? window.movedTo;
              });
            }"""
        )
        self.page.click("#ls-new")
        is_new = """() => window.movedTo === 0
          && !document.querySelector('#ls-chat [data-testid=user]')"""
        self.page.wait_for_function(is_new, timeout=WAIT_MS)

    def open_chat(self, handle: int) -> None:
        """Show a stored conversation, as a click in the list does."""
        script = "(handle) => window.dispatchEvent(new CustomEvent('ls-command', "
        script += "{ detail: { do: 'open', handle } }))"
        self.page.evaluate(script, handle)
        self.page.wait_for_url(f"**/?c={handle}")


Open = Callable[..., Visit]


def new_visit(context: Any, site: Site) -> Visit:
    """A page of this context that notes what it should not do."""
    one = Visit(new_tab(context), site)
    one.page.on("pageerror", lambda error: one.errors.append(str(error)))
    one.page.on("console", lambda m: m.type == "error" and one.errors.append(m.text))
    one.page.on("request", lambda request: note_request(one, request.url))
    return one


def end(visits: list[Visit], leave: Callable[[Visit], None]) -> None:
    """The tests of these pages are over: none of them may have erred or called out. What one says
    while it is left nobody hears, as where its tab is closed."""
    for one in visits:
        if not one.page.is_closed():
            one.page.title()  # what it has said so far arrives before the answer
    said = [([*one.errors], [*one.outside]) for one in visits]
    for one in visits:
        leave(one)
        one.errors.clear()
        one.outside.clear()
    assert said == [([], [])] * len(visits)


@pytest.fixture(scope="session")
def shared_page(server: Site, context: Any) -> Iterator[Visit]:
    """One open page for all tests that need no fresh one."""
    one = new_visit(context, server)
    one.open("&c=new")
    yield one
    one.page.close()


@pytest.fixture
def page(site: Site, shared_page: Visit) -> Iterator[Visit]:
    """The shared page on a new chat; at the end it must not have erred or called out. What a test
    observes with is `window.observer`, which the next one ends."""
    until(lambda: site.service.current is None)
    site.begin()
    shared_page.show()
    shared_page.page.evaluate("sessionStorage.clear(); window.observer?.disconnect()")
    shared_page.page.keyboard.press("Escape")  # what the test before has left open
    shared_page.page.get_by_role("tab", name="Chat", exact=True).first.click()
    shared_page.new_chat()
    shared_page.page.focus("#ls-message textarea")
    yield shared_page
    end([shared_page], lambda one: None)


@pytest.fixture
def own_page(module_page: Visit) -> Visit:
    """One open page for the tests of a module that change its settings or its size."""
    module_page.show()
    return module_page


@pytest.fixture(scope="session")
def tabs(server: Site, context: Any) -> Tabs:
    return Tabs(f"{server.origin}/healthz", lambda: new_visit(context, server))


@pytest.fixture(scope="module")
def module_page(site: Site, tabs: Tabs) -> Iterator[Visit]:
    """The page behind `own_page`."""
    site.begin()
    one = tabs.take()
    one.open("&c=new")
    yield one
    end([one], tabs.give_back)


@pytest.fixture
def visit(site: Site, context: Any, tabs: Tabs) -> Iterator[Open]:
    """Open pages; at the end none of them may have erred or called out. is_new: in a tab that no
    other test gets."""
    used, own = list[Visit](), list[Visit]()
    site.begin()

    def make(is_new: bool = False) -> Visit:
        one = new_visit(context, site) if is_new else tabs.take()
        (own if is_new else used).append(one)
        return one

    yield make
    end([*own, *used], lambda one: one.page.close() if one in own else tabs.give_back(one))


def note_request(visit: Visit, url: str) -> None:
    if not url.startswith((visit.site.origin, "data:", "blob:", "about:")):
        visit.outside.append(url)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Iterator[None]:
    """A test that fails beside an open page says what the page and its server were doing."""
    report = yield
    given = getattr(item, "funcargs", {})
    if report.failed and report.when != "teardown" and "browser" in given:
        server = next((one for one in given.values() if isinstance(one, Site)), None)
        if server is not None:
            report.sections.append(("the server", witness.account_of_site(server)))
        report.sections.append(("the pages", witness.account(given["browser"])))
    return report
