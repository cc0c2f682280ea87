"""A page open in a real browser, and what it did that it should not have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from localspec.web.talk.plain_markdown import MARK
from tests.web.browser.tabs import new_tab
from tests.web.site import Site

WAIT_MS = 60_000


# Gradio shows its form before it listens to it; the first news comes when it does. Our own scripts
# come later still: they name the button of the settings, which they close where there is no room.
LISTENS = """() => window.lsBridges === 2 && Boolean(window.lsSignal)
  && Boolean(document.querySelector('#ls-settings .toggle-button[aria-expanded]'))"""


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


def note_request(visit: Visit, url: str) -> None:
    if not url.startswith((visit.site.origin, "data:", "blob:", "about:")):
        visit.outside.append(url)
