"""Check 19: everything by keyboard, nothing that axe-core calls serious, one word at the end."""

from __future__ import annotations

import pytest

from tests.web.browser.checks import READY, ask, newest, open_tab
from tests.web.browser.visits import WAIT_MS, Open, Visit
from tests.web.site import Site

axe = pytest.importorskip("axe_playwright_python.base", reason="axe-core is not installed")

pytestmark = pytest.mark.slow

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


# Nothing moves any more, and on a narrow screen both sides are closed. Transitions of what is not
# laid out, as in closed details, stay in the list when they have ended.
STANDS = """() => !document.getAnimations().some(
    (one) => one instanceof CSSTransition && one.playState === 'running')
  && (innerWidth >= 768 || !document.querySelector('#ls-side.open, #ls-settings.open'))"""


# What scrolls sideways is looked for a while after a new width.
REACHED = """() => [...document.querySelectorAll('#ls-written :is(pre, table)')].every(
    (one) => (one.tabIndex === 0) === (one.scrollWidth > one.clientWidth))"""


def faults(visit: Visit) -> list[str]:
    """What axe-core finds serious or critical, as "rule: element"."""
    visit.page.wait_for_function(STANDS)
    if not visit.page.evaluate("'axe' in window"):
        visit.page.evaluate(axe.AXE_SCRIPT)
    found = visit.page.evaluate(
        """async (rules) => {
          const result = await axe.run(document, {
            runOnly: {type: 'tag', values: rules}, resultTypes: ['violations'], preload: false});
          return result.violations
            .filter((one) => ['serious', 'critical'].includes(one.impact))
            .flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.target.join(' ')} ${
              (node.any[0] ?? node.all[0] ?? node.none[0])?.message ?? ''}`));
        }""",
        RULES,
    )
    return list(found)


IS_DARK = "document.body.classList.contains('dark')"
FILLED = {"Race": "#ls-race-start", "Models": "#ls-models li", "Stats": "#ls-plots-box svg"}
LOOKS = [("light", 1280), ("dark", 360)]  # colours and widths have their faults apart


def faults_in_looks(visit: Visit, view: str) -> list[str]:
    """The faults of what is shown, in light and dark, wide and narrow."""
    found = []
    for scheme, width in LOOKS:
        visit.page.set_viewport_size({"width": width, "height": 780})
        visit.page.evaluate(
            "(dark) => document.body.classList.toggle('dark', dark)", scheme == "dark"
        )
        if view in ("chat", "popover"):
            visit.page.wait_for_function(REACHED)
        found += [f"{view}, {scheme}, {width}: {one}" for one in faults(visit)]
        widths = visit.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        if widths[0] > widths[1]:
            found.append(f"{view}, {scheme}, {width}: hangs over the edge by {widths}")
    visit.page.set_viewport_size({"width": 1280, "height": 780})
    return found


def test_check_19_axe_finds_nothing_serious(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    assert not page.page.evaluate(IS_DARK), "as the system"
    found = faults_in_looks(page, "empty")
    ask(page, "say something with code and a list")
    found += faults_in_looks(page, "chat")
    page.page.click("#ls-why-open")
    found += faults_in_looks(page, "popover")
    page.page.click("#ls-why-close")
    page.page.keyboard.press("Control+,")
    page.page.locator("#ls-settings.open #ls-advanced summary").click()
    for is_dark in (False, True):
        page.page.evaluate("(dark) => document.body.classList.toggle('dark', dark)", is_dark)
        found += [f"settings, dark {is_dark}: {one}" for one in faults(page)]
    page.page.keyboard.press("Control+,")
    page.page.locator("#ls-chat a.ls-tokens").last.click()
    page.page.wait_for_selector("#ls-tv-text", timeout=WAIT_MS)
    found += faults_in_looks(page, "tokens")
    page.page.keyboard.press("Escape")
    for tab in ("Race", "Stats", "Models"):  # the last has most elements, and keeps them
        open_tab(page, tab)
        page.page.locator(FILLED[tab]).first.wait_for()
        found += faults_in_looks(page, tab)
    assert not found, "\n".join(found)


def focus_by_tab(visit: Visit, selector: str, key: str = "Tab", most: int = 80) -> None:
    """Press a key until the element has the focus."""
    for _ in range(most):
        if visit.page.evaluate("(s) => Boolean(document.activeElement?.closest(s))", selector):
            return
        visit.page.keyboard.press(key)
    raise AssertionError(f"{selector} is not reached by {key}")


def test_check_19_everything_is_done_by_keyboard(page: Visit, site: Site) -> None:
    keyboard = page.page.keyboard
    keyboard.type("steady: by keyboard")  # the box has the focus
    keyboard.press("Enter")
    page.wait_for("Speculative decoding lets")
    keyboard.press("Escape")  # stop
    page.wait_for("stopped")
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    assert newest(site)["state"] == "stopped"
    num_before = len(site.backend.requests)
    keyboard.press("Alt+R")  # regenerate
    page.wait_for("2/2")
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    assert len(site.backend.requests) == num_before + 1
    focus_by_tab(page, "#ls-chat a.ls-tokens")
    keyboard.press("Enter")
    page.page.wait_for_selector("#ls-tv-text", timeout=WAIT_MS)
    keyboard.press("Escape")
    page.page.wait_for_selector("#ls-tv-text", state="hidden", timeout=WAIT_MS)
    focus_by_tab(page, "[role=tab]", "Shift+Tab")
    page.page.get_by_role("tab", name="Stats", exact=True).first.focus()
    keyboard.press("Enter")
    page.page.wait_for_selector("#ls-exports a", timeout=WAIT_MS)
    focus_by_tab(page, "#ls-exports a")
    with page.page.expect_download() as download:
        keyboard.press("Enter")
    assert download.value.suggested_filename.startswith("localspec-")


def test_check_19_what_has_the_focus_is_seen(page: Visit, site: Site) -> None:
    unseen = []
    for _ in range(25):
        page.page.keyboard.press("Tab")
        seen = page.page.evaluate(
            """() => {
              const one = document.activeElement;
              if (!one || one === document.body) return ['', true];
              const style = getComputedStyle(one);
              const around = getComputedStyle(one.parentElement);
              const ring = style.outlineStyle !== 'none' || style.boxShadow !== 'none'
                || around.boxShadow !== 'none' || around.outlineStyle !== 'none'
                || one.matches('input[type=range], input[type=checkbox], input[type=radio]');
              return [one.outerHTML.slice(0, 90), ring];
            }"""
        )
        if not seen[1]:
            unseen.append(seen[0])
    assert unseen == []


def test_check_19_a_finished_reply_is_announced_once(page: Visit, site: Site) -> None:
    page.page.evaluate(
        """() => {
          window.said = [];
          const live = (node) => node.closest?.('[aria-live=polite], [aria-live=assertive], '
            + '[role=status], [role=alert], [role=log]');
          window.observer = new MutationObserver((changes) => {
            for (const change of changes) {
              const target = change.target.nodeType === 1 ? change.target
                : change.target.parentElement;
              const box = target && live(target);
              if (!box || box.getAttribute('aria-live') === 'off') continue;
              const text = box.textContent.trim();
              if (text && window.said.at(-1) !== text) window.said.push(text);
            }
          });
          window.observer.observe(
            document.body, {subtree: true, childList: true, characterData: true});
        }"""
    )
    ask(page, "brisk: announce this")
    page.page.wait_for_timeout(500)
    said = page.page.evaluate("window.said")
    whole = [text for text in said if "complete" in text]
    assert len(whole) == 1 and "tokens" in whole[0], said
    assert not [text for text in said if "Speculative" in text], "the text itself is not read out"
    assert len(said) <= 6, said
