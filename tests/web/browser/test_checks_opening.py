"""Checks 1 to 3: the page opens at once, asks nobody else, and only by its link."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ReplySettings
from tests.kit.own_cookie import TOKEN
from tests.kit.tally import Tally
from tests.web.browser.checks import ask, open_tab, recorded, status_of
from tests.web.browser.visits import WAIT_MS, Open, launch
from tests.web.site import Site

pytestmark = pytest.mark.slow

MAX_OPEN_S = 3.0
NET_LOG_FLAGS = ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",)
# Chromium's own errands (updates, accounts, autofill), whatever page is open. What a page asks
# for is caught in the test before, these hosts included.
BROWSERS_OWN = re.compile(r"https?://(?!fonts)[\w.-]+\.(googleapis|google|gvt1|gstatic)\.com[/:]")


@dataclass
class Opened:
    """The page in a browser that has never seen it, and how long it took to be there."""

    page: Any
    seconds: float


@pytest.fixture(scope="module")
def opened_page(browser: Any, site: Site) -> Iterator[Opened]:
    errors: list[str] = []
    context = browser.new_context()
    page = context.new_page()
    page.on("console", lambda m: m.type in ("error", "warning") and errors.append(m.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto("about:blank")
    started_s = time.monotonic()
    page.goto(site.url)
    page.wait_for_function(
        """() => document.activeElement?.closest('#ls-message')
          && document.querySelector('#ls-strip')?.getBoundingClientRect().height > 0""",
        timeout=WAIT_MS,
    )
    yield Opened(page, time.monotonic() - started_s)
    context.close()
    assert errors == []


def test_check_1_the_page_is_there_with_the_box_to_write_in(
    opened_page: Opened, tally: Tally
) -> None:
    tally.measured("the page is there after", opened_page.seconds, MAX_OPEN_S, "s")
    opened_page.page.wait_for_timeout(500)
    assert opened_page.page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    assert opened_page.page.is_visible("#ls-strip")


def test_check_3_the_token_becomes_a_cookie_and_leaves_the_address(
    opened_page: Opened, site: Site
) -> None:
    page, context = opened_page.page, opened_page.page.context
    assert TOKEN not in page.url and TOKEN not in page.content()
    cookie = next(one for one in context.cookies() if one["name"] == f"localspec_{site.port}")
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and cookie["expires"] > 0
    assert "localspec_" not in page.evaluate("document.cookie + document.referrer")
    entries = page.evaluate("performance.getEntriesByType('navigation').map(e => e.name).join()")
    assert TOKEN not in entries
    page.go_back()
    assert TOKEN not in page.url, "the address with the token is no entry of the history"
    tab = context.new_page()  # several tabs, and a reload, need no token any more
    assert tab.goto(site.origin).status == 200
    assert tab.reload().status == 200
    tab.wait_for_selector("#ls-message textarea", timeout=WAIT_MS)


def test_check_2_a_whole_session_asks_nobody_else(visit: Open, site: Site) -> None:
    page = visit()
    with recorded(page.page.context, site.origin) as traffic:
        page.open("&c=new")
        ask(page, "Say something with a [link](http://198.51.100.7/), please.")
        ask(page, "xss", "the end")
        page.page.locator("#ls-chat a.ls-tokens").last.click()
        page.page.wait_for_selector("#ls-tv-text", timeout=WAIT_MS)
        page.page.keyboard.press("Escape")
        for tab in page.page.get_by_role("tab").all():
            if tab.is_visible():
                tab.click()
                page.page.wait_for_timeout(300)
        open_tab(page, "Chat")
        page.reload()
        page.wait_for("only sooner.")
    assert traffic.refused == []
    assert traffic.failed == [], "the page is complete: nothing it asks for is missing"
    assert traffic.num_of("/assets/") > 20 and traffic.num_of("queue/join") > 2
    shown = page.page.evaluate("[...document.images].map(i => [i.src, i.complete, i.naturalWidth])")
    assert all(complete and width for _, complete, width in shown), shown
    fonts = page.page.evaluate("[...document.fonts].filter(f => f.status === 'error').length")
    assert fonts == 0


def test_check_2_chromium_itself_sees_no_other_address(
    playwright: Any, site: Site, tmp_path: Path
) -> None:
    log = tmp_path / "net.json"
    with contextlib.closing(launch(playwright, f"--log-net-log={log}", *NET_LOG_FLAGS)) as browser:
        page = browser.new_page()
        page.goto(f"{site.url}&c=new")
        page.wait_for_selector("#ls-message textarea", timeout=WAIT_MS)
        page.wait_for_timeout(800)
        page.fill("#ls-message textarea", "echo [a](http://leak.test/) http://leak2.test/ done")
        page.press("#ls-message textarea", "Enter")
        page.wait_for_selector("#ls-chat .bot a[href='http://leak.test/']", timeout=WAIT_MS)
        page.hover("#ls-chat .bot a[href='http://leak.test/']")
        page.wait_for_timeout(800)
        with contextlib.suppress(Exception):  # a control: the log does hold what is tried
            browser.new_page().goto("http://control.test/")
    written = log.read_text(encoding="utf-8")
    events = json.loads(written)["events"]
    urls = {str(event["params"]["url"]) for event in events if "url" in event.get("params", {})}
    ours = {url for url in urls if url.startswith(site.origin)}
    assert len(ours) > 20, "the log holds the session"
    assert "leak" not in "".join(urls - ours)
    looked_up = {str(event.get("params", {}).get("host", "")) for event in events}
    assert not [host for host in looked_up if "leak" in host], "a link is not even looked up"
    assert "http://control.test/" in urls
    inner = ("data:", "blob:", "chrome", "about:", "http://control.test/")
    others = {one for one in urls - ours if not one.startswith(inner)}
    assert {one for one in others if not BROWSERS_OWN.match(one)} == set()


def test_check_3_without_the_token_there_is_no_data(browser: Any, site: Site) -> None:
    reply = site.service.submit(None, "echo a secret of mine", ReplySettings())
    assert reply is not None and reply.done.wait(30) and site.service.flush()
    for path in ("/", "/?c=1", "/live", "/export?format=csv", "/config", "/tokens?message=1"):
        status, body = status_of(f"{site.origin}{path}")
        assert status == 401 and "secret" not in body and "gradio" not in body.lower()
    stranger = browser.new_context().new_page()
    answer = stranger.goto(site.origin)
    assert answer.status == 401
    assert "Open the link from its window" in stranger.inner_text("body")
    stranger.context.close()
