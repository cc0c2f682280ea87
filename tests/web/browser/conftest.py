"""A real server on the fake backend, and a real browser to look at it, one of each per process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.record.store import Store
from tests.kit.fakes import FakeBackend, session_info
from tests.kit.waiting import until
from tests.web.browser import witness
from tests.web.browser.tabs import VIEWPORT, Tabs
from tests.web.browser.visits import WAIT_MS, Open, Visit, end, launch, new_visit
from tests.web.site import Site, serve_page


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
