"""The frame of the chat: one line, its popover, the first screen, and nothing that moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.fakes import REPLY
from tests.kit.own_cookie import TOKEN
from tests.web.browser.checks import READY, ask, newest
from tests.web.browser.tabs import VIEWPORT, new_tab
from tests.web.browser.visits import LISTENS, WAIT_MS, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow

# Where each standing message lies in the column, and where the line, the column and the message box
# lie in the window, frame by frame; kept are the places that were ever left.
WATCH_PLACES = """() => {
  const column = document.querySelector('#ls-chat');
  const places = () => {
    const top = column.getBoundingClientRect().top - column.scrollTop;
    const found = {};
    column.querySelectorAll('#ls-written .message-row').forEach((row, place) => {
      const box = row.getBoundingClientRect();
      found[`message ${place}`] = [box.top - top, box.left, box.width];
    });
    for (const id of ['ls-strip', 'ls-chat', 'ls-compose']) {
      const box = document.getElementById(id).getBoundingClientRect();
      found[id] = [box.top, box.left, box.width, box.height];
    }
    return found;
  };
  const seen = window.places = {moved: {}, frames: 0, began: null};
  const first = places();
  const look = () => {
    if (window.places !== seen) return;
    seen.frames += 1;
    const now = places();
    for (const [name, place] of Object.entries(first)) {
      const by = now[name] ? Math.max(...place.map((one, n) => Math.abs(one - now[name][n]))) : 1e9;
      if (by > 0) seen.moved[name] = Math.max(by, seen.moved[name] ?? 0);
    }
    const text = document.querySelector('#ls-growing .bot .message-content');
    const end = [...column.querySelectorAll('#ls-written .bot-row')].at(-1)
      ?.querySelector('.message-content');
    const top = column.getBoundingClientRect().top - column.scrollTop;
    const place = (box) => [box.top - top, box.left];
    if (text) seen.growing = place(text.getBoundingClientRect());
    else if (seen.growing && end) seen.ended = place(end.getBoundingClientRect());
    requestAnimationFrame(look);
  };
  look();
}"""


def watched(page: Visit, act: Any) -> dict[str, Any]:
    """What moved while `act` asks for a reply and waits for its end."""
    page.page.evaluate(WATCH_PLACES)
    act()
    page.page.wait_for_function("window.places.ended", timeout=WAIT_MS)
    found = dict(page.page.evaluate("({...window.places})"))
    page.page.evaluate("window.places = null")
    return found


@pytest.fixture
def narrow(page: Visit) -> Iterator[Visit]:
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.page.locator("#ls-side.open").wait_for(state="detached")
    yield page
    page.page.set_viewport_size(VIEWPORT)
    page.page.locator("#ls-side.open").wait_for()  # it comes back


def stands_still(page: Visit) -> None:
    ask(page, "first")
    for message in ("brisk: second", "brisk: a third"):
        seen = watched(page, lambda said=message: ask(page, said))
        assert seen["frames"] > 10
        assert seen["moved"] == {}, "in px"
        assert seen["ended"] == seen["growing"], "the text stays where it grew"


def test_nothing_moves_while_a_reply_begins_runs_and_ends(page: Visit) -> None:
    stands_still(page)


def test_nothing_moves_on_a_narrow_page_of_which_most_is_the_conversation(narrow: Visit) -> None:
    stands_still(narrow)
    share = "document.querySelector('#ls-chat').clientHeight / innerHeight"
    assert narrow.page.evaluate(share) >= 0.6
    assert narrow.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_arrows_of_a_replys_versions_stay_on_one_line(narrow: Visit) -> None:
    ask(narrow, "first")
    narrow.page.locator("#ls-chat a.ls-again").click()
    narrow.wait_for("2/2")
    narrow.page.wait_for_function(READY, timeout=WAIT_MS)
    torn = """() => {
      const line = document.querySelector('#ls-chat .ls-footer');
      const parts = [...line.querySelectorAll('.ls-show, .ls-place, .ls-arrow')];
      const isTorn = (width) => {
        line.style.width = `${width}px`;
        const lows = parts.map((one) => one.getBoundingClientRect().bottom);
        return parts.length !== 3 || Math.max(...lows) - Math.min(...lows) > 8;
      };
      return Array.from({ length: 300 }, (_, n) => n + 100).filter(isTorn);
    }"""
    assert narrow.page.evaluate(torn) == [], "at these widths in px"


def test_the_sign_of_the_settings_ends_where_the_line_of_the_tabs_does(page: Visit) -> None:
    """And it keeps its place when the settings open."""
    ends = """() => {
      const handle = document.querySelector('#ls-settings > .toggle-button');
      const sign = parseFloat(getComputedStyle(handle, '::before').width);
      const box = handle.getBoundingClientRect();
      const line = document.querySelector('#ls-tabs > .tab-wrapper').getBoundingClientRect();
      return [box.right - (box.width - sign) / 2, line.right];
    }"""
    sign, line = page.page.evaluate(ends)
    assert sign == line
    page.page.get_by_role("button", name="Open settings").click()
    page.page.get_by_role("button", name="Close settings").wait_for()
    assert page.page.evaluate(ends)[0] == sign
    page.page.get_by_role("button", name="Close settings").click()


LINES: tuple[dict[str, Any], ...] = (
    {"label": "Connecting", "model": ["–", ""], "speed": "–", "gain": "", "guesses": ""},
    {"label": "Loading 12 s", "model": ["A-Model-8B-Instruct", ""], "speed": "–"},
    {
        "label": "Writing 12 s",
        "model": ["A-Model-8B-Instruct", "4-bit · draft A-Model-0.6B-Instruct"],
        "speed": "103",
        "gain": "2.1x faster",
        "guesses": "100 % of checked guesses right",
    },
    {
        "label": "Ready",
        "model": ["demo", "bf16 · draft demo-draft"],
        "speed": "31",
        "gain": "as fast",
        "gain_is": "",
        "guesses": "100 % of checked guesses right",
    },
)
# Words of the gain and the guesses that are seen, and not from their beginning.
BEHEADED = """() => {
  const box = document.querySelector('.ls-won p').getBoundingClientRect();
  return [...document.querySelectorAll('.ls-won span')].filter((one) => {
    const { left, top, width } = one.getBoundingClientRect();
    return width && top < box.bottom - 2 && left < box.left - 1;
  }).map((one) => one.textContent);
}"""
LEFT = """() => ['.ls-dot', '#ls-phase', '#ls-speed', '#ls-why-open']
  .map((one) => document.querySelector(`#ls-strip ${one}`).getBoundingClientRect().left)"""
ASIDE = """() => {
  const middle = ({ left, right }) => (left + right) / 2;
  const [line, model] = ['#ls-strip', '#ls-model']
    .map((one) => middle(document.querySelector(one).getBoundingClientRect()));
  return Math.abs(model - line);
}"""


@pytest.mark.parametrize("width", (1440, 1280, 600, 390))
def test_what_goes_on_keeps_its_place_whatever_the_line_says(own_page: Visit, width: int) -> None:
    """And the model stands in the middle."""
    page = own_page.page
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_function(f"document.querySelector('#ls-strip').offsetWidth <= {width}")
    places = []
    for line in LINES:
        told = {**page.evaluate("fetch('/live').then((answer) => answer.json())"), **line}
        page.route("**/live*", lambda route, _, told=told: route.fulfill(json=told))
        page.keyboard.press("Shift")  # after a key the page asks more often
        own_page.wait_for(line["label"], "#ls-phase")
        places.append(page.evaluate(LEFT))
        assert page.evaluate(ASIDE) < 24, told["model"]  # px, beside a long name on a phone
        assert page.evaluate(BEHEADED) == []
        page.unroute("**/live*")
    assert places[1:] == places[:1] * (len(LINES) - 1)


SEEN = """() => {
  const end = document.querySelector('#ls-notices p')?.getBoundingClientRect();
  const rows = [...document.querySelectorAll('#ls-written .message-row')];
  const boxes = rows.map((row) => row.getBoundingClientRect());
  const box = document.querySelector('#ls-compose').getBoundingClientRect();
  return {tops: boxes.map(({ top }) => top), below: boxes.at(-1).bottom - end?.top,
    box: [box.top, box.bottom]};
}"""


def test_a_notice_moves_nothing_and_what_is_below_it_can_be_scrolled_up(page: Visit) -> None:
    ask(page, "first")
    was = page.page.evaluate(SEEN)
    told = page.page.evaluate("fetch('/live').then((answer) => answer.json())")
    told["notices"] = ["The disk is full. Make room on it.", "Less memory is free than before."]
    page.page.route("**/live*", lambda route: route.fulfill(json=told))
    page.page.keyboard.press("Shift")  # after a key the page asks more often
    page.wait_for("The disk is full", "#ls-notices")
    seen = page.page.evaluate(SEEN)
    assert (seen["tops"], seen["box"]) == (was["tops"], was["box"])
    assert seen["below"] < 0
    page.page.set_viewport_size({"width": 1280, "height": 360})
    page.page.wait_for_function(f"({SEEN})().tops[0] < 0", timeout=WAIT_MS)
    assert page.page.evaluate(SEEN)["below"] <= 0
    page.page.set_viewport_size(VIEWPORT)
    page.page.unroute("**/live*")
    page.page.wait_for_function("!document.querySelector('#ls-notices p')")


def test_the_verdict_of_stats_lies_over_nothing_on_a_phone(narrow: Visit) -> None:
    ask(narrow, "hello")
    narrow.page.get_by_role("tab", name="Stats", exact=True).first.click()
    said = narrow.page.locator("#ls-summary .ls-verdict")
    said.wait_for()
    bottom, top = said.evaluate("""said => {
      said.append(' It says more than has room. '.repeat(9));
      const below = document.querySelector('#ls-stats-top');
      return [said.getBoundingClientRect().bottom, below.getBoundingClientRect().top];
    }""")  # in one moment: Stats may be drawn anew
    assert bottom <= top
    narrow.page.get_by_role("tab", name="Chat", exact=True).first.click()


def test_the_button_of_the_settings_keeps_its_place_on_a_phone(narrow: Visit) -> None:
    button = narrow.page.locator("#ls-settings > .toggle-button")
    was = button.bounding_box()
    button.click()
    narrow.page.get_by_role("button", name="Close settings").wait_for()
    assert button.bounding_box() == was
    button.click()


OUT_OF_SIGHT = """() => [...document.querySelectorAll('#ls-strip *, #ls-tabs [role=tab], '
    + '#ls-compose *, #ls-chat .ls-footer *, .toggle-button, #ls-settings.open :is(input, select)')]
  .filter((one) => one.checkVisibility() && one.offsetWidth)
  .map((one) => [one.id || one.className || one.tagName, one.getBoundingClientRect()])
  .filter(([, box]) => box.left < 0 || box.right > innerWidth).map(([name]) => name)"""


def test_the_page_is_used_at_twice_its_size(page: Visit, site: Site) -> None:
    """As a window of 1280 x 800 is at 200 %."""
    screen = page.page.context.new_cdp_session(page.page)
    size = {"width": 640, "height": 400, "deviceScaleFactor": 2, "mobile": False}
    screen.send("Emulation.setDeviceMetricsOverride", size)
    page.page.locator("#ls-side.open").wait_for(state="detached")
    assert page.page.evaluate("[innerWidth, devicePixelRatio]") == [640, 2]
    ask(page, "at twice the size")
    assert page.page.evaluate(OUT_OF_SIGHT) == []
    assert page.page.evaluate("document.querySelector('#ls-chat').clientHeight / innerHeight") > 0.4
    page.page.locator("#ls-chat a.ls-tokens").click()
    page.page.locator("#ls-token-view .ls-tv-close").click(timeout=WAIT_MS)
    page.page.get_by_role("button", name="How fast, and why").click()
    page.page.locator("#ls-why-close").click()
    page.page.get_by_role("button", name="Open settings").click()
    page.page.get_by_label("Temperature").first.scroll_into_view_if_needed()
    assert page.page.evaluate(OUT_OF_SIGHT) == []
    page.page.get_by_role("button", name="Close settings").click()
    for tab in ("Models", "Race", "Stats", "Chat"):
        page.page.get_by_role("tab", name=tab, exact=True).first.click()
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 640, tab
    screen.send("Emulation.clearDeviceMetricsOverride")
    page.page.set_viewport_size(VIEWPORT)
    page.page.locator("#ls-side.open").wait_for()


def test_the_line_is_one_line_and_no_label_is_cut(page: Visit, site: Site) -> None:
    ask(page, "hello")
    page.wait_for("% of checked guesses right", "#ls-guesses")
    cut = """() => [...document.querySelectorAll('#ls-strip *, #ls-tabs [role=tab]')]
      .filter((one) => one.offsetParent && one.scrollWidth > one.clientWidth + 1
        && getComputedStyle(one).display !== 'inline').map((one) => one.id || one.className)"""
    assert page.page.evaluate(cut) == []
    assert page.page.evaluate("document.querySelector('#ls-strip').offsetHeight") == 40
    page.page.get_by_role("tab", name="Stats", exact=True).first.click()
    page.page.locator("#ls-strip").wait_for(state="hidden")
    page.page.get_by_role("tab", name="Chat", exact=True).first.click()


def test_the_popover_says_why_stays_where_it_was_put_and_goes_by_escape(
    page: Visit, site: Site
) -> None:
    button = page.page.get_by_role("button", name="How fast, and why")
    button.focus()
    page.page.keyboard.press("Enter")
    popover = page.page.get_by_role("dialog", name="How fast, and why")
    popover.locator("summary").click()
    ask(page, "brisk: show me")
    assert popover.is_visible(), "it stays while a reply is written"
    row = newest(site)
    right = f"{row['num_accepted_tokens']} of {row['num_checked_tokens']} checked guesses right"
    page.wait_for(right, "#ls-facts")
    assert "The small model was the fastest" in page.text("#ls-reason")
    assert len(str(page.page.get_attribute("#ls-spark-line", "points")).split()) >= 2
    page.wait_for(f"{row['num_steps']} checks", "#ls-rounds-sum")
    assert page.page.inner_text("#ls-rounds-text") == REPLY
    titles = page.page.eval_on_selector_all("#ls-rounds-text .ls-round", "s => s.map(x => x.title)")
    guessed = sum(int(one.split(": ")[1].split(" ")[0]) for one in titles if "guessed" in one)
    assert guessed == row["num_accepted_tokens"]
    was = popover.bounding_box()
    page.page.get_by_role("heading", name="How fast, and why").hover()
    page.page.mouse.down()
    page.page.mouse.move(400, 300)
    page.page.mouse.move(was["x"] - 10, was["y"] + 60)
    page.page.mouse.up()
    popover.get_by_role("button", name="Move").press("ArrowLeft")
    put = popover.bounding_box()
    assert put["x"] < was["x"] - 30 and put["y"] > was["y"] + 20
    page.reload()
    popover.wait_for()
    is_there = """([x, y]) => {
      const box = document.getElementById('ls-why').getBoundingClientRect();
      return box.x === x && box.y === y;
    }"""
    page.page.wait_for_function(is_there, arg=[put["x"], put["y"]])  # when the sides have come in
    popover.get_by_role("button", name="Close").focus()
    page.page.keyboard.press("Escape")
    popover.wait_for(state="hidden")
    assert page.page.evaluate("document.activeElement.id") == "ls-why-open"


def test_an_example_stands_in_the_box_and_the_first_screen_goes_with_the_first_message(
    page: Visit, site: Site
) -> None:
    assert page.page.locator(".ls-example").count() == 4
    page.page.get_by_role("button", name="Fill in a form").click()
    text = page.page.input_value("#ls-message textarea")
    assert text.startswith("Make a JSON object with name Clara")
    page.page.keyboard.press("Enter")
    page.wait_for("only sooner.")
    assert site.backend.requests[-1].messages[-1].content == text
    assert not page.page.locator(".ls-welcome").is_visible()


def test_the_switcher_leads_to_the_models_and_a_new_chat_back(page: Visit) -> None:
    page.page.click("#ls-model")
    within = page.page.get_by_role("main")  # a landmark
    menu = within.get_by_role("menu", name="Models that are ready here")
    menu.get_by_role("menuitem", name="More models…").click()
    page.page.locator("#ls-models").wait_for()
    shown = "document.querySelector('#ls-tabs [role=tab][aria-selected=true]').textContent.trim()"
    assert page.page.evaluate(shown) == "Models"
    page.new_chat()
    page.page.locator("#ls-models").wait_for(state="hidden")
    assert page.page.evaluate(shown) == "Chat"


def test_a_list_of_chats_that_is_drawn_after_its_side_gives_no_error(
    site: Site, context: Any
) -> None:
    page = new_tab(context)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.add_init_script("""
        const find = document.getElementById.bind(document);
        let asked = 0;
        document.getElementById = (id) => id === "ls-history" && ++asked <= 5 ? null : find(id);
    """)
    try:
        page.goto(f"{site.origin}/?token={TOKEN}")
        page.wait_for_function(LISTENS, timeout=WAIT_MS)
        page.locator("#ls-new").focus()
        assert wrong == []
    finally:
        page.close()
