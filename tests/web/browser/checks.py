"""What the checks of the page have in common: asking, waiting, reading the log.

Contract: helpers over a `Visit` and its `Site`; nothing here asserts what a check is
about.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from localspec.web.talk.plain_markdown import MARK
from tests.web.browser.visits import WAIT_MS, Visit
from tests.web.site import Site

READY = "() => document.querySelector('#ls-strip').dataset.phase === 'ready'"
FOOTERS = "#ls-chat .bot .ls-footer"


def ask(visit: Visit, text: str, answer: str = "only sooner.") -> None:
    """Send and wait until the reply is complete, with its line of figures."""
    num_before = visit.page.locator(FOOTERS).count()
    visit.send(text)
    wait_for_reply(visit, num_before, answer)


REPLY_STANDS = """([footers, n, answer, mark]) => {
  const all = document.querySelectorAll(footers);
  const reply = all[all.length - 1]?.closest('.bot');
  return all.length > n && reply.innerText.replaceAll(mark, '').includes(answer);
}"""


def wait_for_reply(visit: Visit, num_before: int, answer: str = "only sooner.") -> None:
    """Wait until a further reply has its figures and its text. Words of the question do not count:
    the page may draw the figures before the text."""
    visit.page.wait_for_function(
        REPLY_STANDS, arg=[FOOTERS, num_before, answer, MARK], timeout=WAIT_MS
    )
    visit.page.wait_for_function(READY, timeout=WAIT_MS)


def newest(site: Site) -> dict[str, Any]:
    """The log's row of the latest turn."""
    assert site.service.flush()
    return site.store.turn_rows()[-1]


def num_rows(site: Site) -> int:
    assert site.service.flush()
    return len(site.store.turn_rows())


@dataclass
class Traffic:
    """Every request of a browser context, and the answers that failed."""

    urls: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def num_of(self, part: str) -> int:
        return sum(part in url for url in self.urls)


@contextmanager
def recorded(context: Any, origin: str) -> Iterator[Traffic]:
    """Record a context's requests; what would leave `origin` is stopped and noted."""
    traffic = Traffic()

    def refuse(one: Any) -> None:
        traffic.refused.append(one.request.url)
        one.abort()

    def answered(response: Any) -> None:
        if response.status >= 400:
            traffic.failed.append(f"{response.status} {response.url}")

    def asked(request: Any) -> None:
        traffic.urls.append(request.url)

    context.on("request", asked)
    context.on("response", answered)
    elsewhere = re.compile(rf"^(?!{re.escape(origin)}/|data:|blob:)")
    context.route(elsewhere, refuse)
    yield traffic
    context.unroute(elsewhere)
    context.remove_listener("request", asked)
    context.remove_listener("response", answered)


def open_tab(visit: Visit, name: str) -> None:
    visit.page.get_by_role("tab", name=name, exact=True).first.click()


def unfold_turns(visit: Visit) -> None:
    """Open the table of turns in Stats; another test may have left it open."""
    fold = visit.page.locator("#ls-turns details")
    if fold.get_attribute("open") is None:
        fold.locator("summary").click()


def bubbles(visit: Visit, role: str = "bot") -> list[str]:
    """The texts of the messages of one side, their notes left out."""
    script = """(role) => [...document.querySelectorAll(`#ls-chat [data-testid="${role}"]`)]
      .map((one) => one.cloneNode(true))
      .filter((one) => !one.querySelector('.ls-footer, .ls-error, .ls-lenient, .ls-own'))
      .map((one) => one.innerText.replaceAll("\\u2063", "").trim()).filter(Boolean)"""
    return list(visit.page.evaluate(script, role))


def status_of(url: str, cookie: str | None = None) -> tuple[int, str]:
    """Return the status and the body of a GET."""
    request = urllib.request.Request(url, headers={"cookie": cookie} if cookie else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def ask_until(page: Visit, text: str, num_replies: int) -> None:
    """Send, and wait until so many replies stand with their line of figures."""
    page.send(text)
    stand(page, num_replies)


def stand(page: Visit, num_replies: int) -> None:
    """Wait until the conversation has so many replies with their line of figures."""
    page.page.wait_for_function(
        "n => document.querySelectorAll('#ls-written .ls-footer').length === n",
        arg=num_replies,
        timeout=WAIT_MS,
    )


def menu(page: Visit, title: str, choice: str) -> None:
    """Choose an entry of the menu of a chat in the list."""
    row = page.page.locator("#ls-history .ls-row", has_text=title).first
    row.hover()
    row.locator(".ls-more").click()
    page.page.get_by_role("menuitem", name=choice).click()


def shows(page: Visit, title: str) -> None:
    """Wait until the list marks this chat as the open one."""
    page.page.locator("#ls-history [aria-current]", has_text=title).wait_for()


def open_chat(page: Visit, title: str) -> None:
    """Open a chat of the list."""
    page.page.locator("#ls-history .ls-open", has_text=title).first.click()
    shows(page, title)
