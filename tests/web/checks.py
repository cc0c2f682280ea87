"""What the checks of the page have in common: asking, waiting, reading the log.

Contract: helpers over a `Visit` and its `Site` (conftest); nothing here asserts what a check is
about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.web.conftest import WAIT_MS, Site, Visit

READY = "() => document.querySelector('#ls-strip').dataset.phase === 'ready'"
FOOTERS = "#ls-chat .bot .ls-footer"


def ask(visit: Visit, text: str, answer: str = "only sooner.") -> None:
    """Send and wait until the reply is complete, with its line of figures."""
    num_before = visit.page.locator(FOOTERS).count()
    visit.send(text)
    wait_for_reply(visit, num_before, answer)


def wait_for_reply(visit: Visit, num_before: int, answer: str = "only sooner.") -> None:
    visit.page.wait_for_function(
        "([selector, n]) => document.querySelectorAll(selector).length > n",
        arg=[FOOTERS, num_before],
        timeout=WAIT_MS,
    )
    visit.wait_for(answer)
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
