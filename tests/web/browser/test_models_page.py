"""The Models tab in a real browser: card, downloads, load, tune-up, narrow screens, focus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.fakes import Script
from tests.kit.own_cookie import TOKEN
from tests.web.browser.tabs import new_tab
from tests.web.browser.visits import WAIT_MS
from tests.web.models_site import DRAFT, HEAD, TARGET, ModelsSite, models_site
from tests.web.site import serve_page

# Whether no line lies over the form that asked.
IS_WHOLE = """(asked) => !asked.matches('form')
  || asked.closest('[data-part]').getBoundingClientRect().bottom
    <= document.querySelector('#ls-models-said').getBoundingClientRect().top"""
FIRST = '#ls-models [data-part="first"]'


@pytest.fixture(scope="module")
def shared_models_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelsSite]:
    folder = tmp_path_factory.mktemp("models")
    with models_site(folder, Script(prefill_s=0.0, round_s=0.002)) as place:
        yield place


@pytest.fixture(scope="module")
def models_page(shared_models_site: ModelsSite, context: Any) -> Iterator[Any]:
    """The page on its Models tab; every request elsewhere and every console error is a failure."""
    with serve_page(shared_models_site.service) as port:
        opened = new_tab(context)
        wrong: list[str] = []
        opened.on(
            "request",
            lambda each: wrong.append(each.url) if f"127.0.0.1:{port}/" not in each.url else None,
        )
        opened.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
        opened.get_by_role("tab", name="Models").first.click(timeout=WAIT_MS)
        opened.wait_for_selector(f"{FIRST} li", timeout=WAIT_MS)
        yield opened
        opened.close()
        assert wrong == []


def progress(page: Any, model_id: str) -> Any:
    """The download in the line of its model, wherever that stands."""
    return page.locator(f'#ls-models [data-download="{model_id}"]:visible').first


def others(page: Any) -> None:
    page.locator('#ls-models [data-key="others"] > summary').click()


def start_download(page: Any, place: ModelsSite) -> None:
    """By the button of its row, wherever the model stands."""
    button = page.locator(f'#ls-models button[data-act="download"][data-id="{TARGET}"]').first
    if not button.is_visible():
        others(page)
    button.click()


def test_the_card_says_what_the_pair_is_and_the_bar_what_it_needs(
    models_page: Any, shared_models_site: ModelsSite
) -> None:
    line = models_page.locator(f"{FIRST} li").first
    assert line.bounding_box()["height"] < 90, "one line a model"
    assert "fits, " in line.inner_text()
    line.locator("summary").click()
    text = line.inner_text()
    words = ("Drafts", "Why", "Licence", "Download", "Gain", "estimate", "disk left")
    for word in words:
        assert word.lower() in text.lower(), word
    label = models_page.get_attribute("#ls-models .ls-mbar", "aria-label")
    assert label.startswith("Memory: target ") and "spare" in label
    widths = models_page.eval_on_selector_all(
        '#ls-models [data-part="first"] details[open] .ls-mbar i',
        "all => all.map(e => e.getBoundingClientRect().width)",
    )
    assert len(widths) >= 4 and max(widths) > 10 * min(widths) > 0, widths
    assert "free" in models_page.inner_text("#ls-models .ls-mfound")
    assert shared_models_site.hub.requests == [], "nothing is asked of the hub without a click"


def test_the_tune_up_is_one_click_and_ends_in_words(
    models_page: Any, shared_models_site: ModelsSite
) -> None:
    models_page.get_by_role("button", name="Start the tune-up").press("Enter", timeout=WAIT_MS)
    models_page.locator("#ls-models .ls-mverdict").wait_for(timeout=WAIT_MS)
    where = "document.activeElement.closest('[data-part]')?.dataset.part"
    assert models_page.evaluate(where) == "tune", "the focus stays where its button was"
    assert "faster than without drafting" in models_page.inner_text("#ls-models .ls-mverdict")
    assert models_page.locator("#ls-models .ls-mtune tbody tr").count() == 3


def test_load_anyway_is_asked_once_more(models_page: Any, shared_models_site: ModelsSite) -> None:
    """A model that does not fit is loaded only by somebody who was told what may come."""
    asked: list[str] = []
    models_page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    models_page.evaluate(
        """() => { const made = document.createElement('button'); made.dataset.act = 'load';
        made.dataset.id = 'someone/huge'; made.dataset.anyway = '1';
        made.dataset.confirm = 'Load it all the same?';
        document.querySelector('#ls-models').append(made); made.click(); }"""
    )
    assert asked == ["Load it all the same?"] and len(shared_models_site.opened) <= 1


def test_the_context_is_chosen_by_arrow_keys(models_page: Any) -> None:
    """The list that has the focus keeps it, though it is made anew after each key."""
    models_page.get_by_label("Plan for a context of").focus()
    for tokens in (16384, 32768):
        models_page.keyboard.press("ArrowDown")
        made_anew = f"[data-key=context]:has([value='{tokens}'][selected])"
        models_page.locator(f"#ls-models {made_anew}").wait_for(timeout=WAIT_MS)
        assert models_page.evaluate("document.activeElement.dataset.key") == "context"
    models_page.get_by_label("Plan for a context of").select_option("8192")


def test_nothing_is_wider_than_a_narrow_screen(models_page: Any) -> None:
    others(models_page)
    for width in (360, 760, 1200):
        models_page.set_viewport_size({"width": width, "height": 780})
        models_page.wait_for_function(
            """(width) => innerWidth === width && [...document.querySelectorAll('#ls-models *')]
            .every(e => e.closest('.ls-mscroll')
              || e.getBoundingClientRect().right <= width + 1)""",
            arg=width,
            timeout=WAIT_MS,
        )
    others(models_page)


def wait_until(page: Any, until: Any) -> None:
    for _ in range(WAIT_MS // 50):
        if until():
            return
        page.wait_for_timeout(50)
    raise AssertionError("it did not come to that")


def test_a_download_runs_pauses_goes_on_and_is_loaded(
    models_page: Any, shared_models_site: ModelsSite
) -> None:
    shared_models_site.hub.pace_s = 0.1
    start_download(models_page, shared_models_site)
    target = progress(models_page, TARGET)
    target.get_by_text(re.compile(r"[1-9]\d* kB/s")).wait_for(timeout=WAIT_MS)
    target.get_by_role("button", name="Pause").focus()
    before = target.inner_text()
    wait_until(models_page, lambda: target.inner_text() != before)
    focused = models_page.evaluate("() => document.activeElement.dataset.act")
    assert focused == "pause", "what has the focus keeps it while the figures change"
    models_page.keyboard.press("Enter")
    target.get_by_text("paused").wait_for(timeout=WAIT_MS)
    go_on = target.get_by_role("button", name=re.compile(r"Continue \([\d.]+( kB| MB)? of 2 MB\)"))
    go_on.wait_for(timeout=WAIT_MS)
    shared_models_site.hub.pace_s = 0.0
    go_on.click()
    target.get_by_text("every file checked").wait_for(timeout=WAIT_MS)
    progress(models_page, DRAFT).get_by_text("every file checked").wait_for(timeout=WAIT_MS)
    assert shared_models_site.hub.ranges, "what had arrived was not fetched again"
    load = models_page.locator(f'#ls-models button[data-act="load"][data-id="{TARGET}"]').first
    load.wait_for(timeout=WAIT_MS)
    load.click()
    wait_until(models_page, lambda: len(shared_models_site.opened) > 1)
    assert (shared_models_site.opened[-1].model, shared_models_site.opened[-1].draft) == (
        TARGET,
        DRAFT,
    )


def test_a_published_head_is_fetched_and_loaded_with_its_target_by_two_clicks(
    models_page: Any, shared_models_site: ModelsSite
) -> None:
    """After the target, which the test above has fetched."""
    about = models_page.locator(f'#ls-models [data-key="about-{TARGET}"]').first
    about.locator("summary").first.click()
    offered = about.locator(".ls-moffers li").filter(has_text=HEAD)
    offered.get_by_role("button", name=re.compile(r"Fetch 131 kB")).click()
    load = offered.get_by_role("button", name="Load with it")
    load.wait_for(timeout=WAIT_MS)
    num_opened = len(shared_models_site.opened)
    load.click()
    wait_until(models_page, lambda: len(shared_models_site.opened) > num_opened)
    assert shared_models_site.opened[-1].draft == HEAD
    about.locator("summary").first.click()


def test_a_key_for_a_program_is_made_shown_once_copied_and_revoked(
    models_page: Any, shared_models_site: ModelsSite, context: Any
) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    part, said = (
        models_page.locator('#ls-models [data-part="programs"]'),
        models_page.locator("#ls-models-said"),
    )
    part.locator("summary").click()
    assert models_page.url.split("/?")[0] + "/v1" in part.inner_text(), "the address to give"
    part.get_by_label("A name for the new key").fill("<b>laptop</b>")
    part.get_by_role("button", name="Create a key").click()
    said.locator("code").wait_for(timeout=WAIT_MS)
    key = said.locator("code").inner_text()
    assert shared_models_site.service.api_keys.opens(key)
    said.get_by_role("button", name="Copy").click()
    said.get_by_text("Copied").wait_for(timeout=WAIT_MS)
    assert models_page.evaluate("() => navigator.clipboard.readText()") == key
    part.get_by_text(re.compile(r"made 20.* UTC · used 20.* UTC")).wait_for(timeout=WAIT_MS)
    assert "<b>laptop</b>" in part.locator("li").inner_text()
    assert key not in models_page.evaluate("() => fetch('/models').then((answer) => answer.text())")
    models_page.once("dialog", lambda dialog: dialog.accept())
    part.get_by_role("button", name="Revoke").click()
    part.get_by_text("There is no key yet").wait_for(timeout=WAIT_MS)
    assert not shared_models_site.service.api_keys.opens(key) and said.inner_text() == ""
    part.locator("summary").click()


@pytest.mark.parametrize("act", ["make-key", "download"])
def test_an_answer_is_read_where_it_was_asked_for(models_page: Any, act: str) -> None:
    """Of a form at the end of the tab, and of a model in its middle, both with the tab's end and
    its beginning out of sight."""

    def refuse(route: Any) -> None:
        is_act = route.request.method == "POST"
        route.fulfill(body='{"error": "This cannot be done."}') if is_act else route.fallback()

    models_page.route("**/models", refuse)
    others(models_page)
    models_page.locator('#ls-models [data-part="programs"] details').evaluate(
        "(fold) => fold.open = true"
    )
    models_page.get_by_label("A name for the new key").fill("laptop")
    asked = models_page.locator(f"#ls-models [data-act={act}]:is(button, form)").last
    asked.evaluate("(element) => element.scrollIntoView({ block: 'end' })")
    asked.evaluate("(one) => one.matches('form') ? one.requestSubmit() : one.click()")
    said = models_page.locator("#ls-models-said")
    said.get_by_text("This cannot be done.").wait_for(timeout=WAIT_MS)
    part = asked.evaluate("(element) => element.closest('[data-part]').dataset.part")
    assert said.evaluate("(line) => line.previousElementSibling.dataset.part") == part
    wait_until(models_page, lambda: asked.evaluate(IS_WHOLE))
    box, height = said.bounding_box(), models_page.evaluate("innerHeight")
    assert box["y"] > 0 and box["y"] + box["height"] <= height
    models_page.unroute("**/models")
    others(models_page)


def test_a_folder_is_refused_to_a_browser_elsewhere() -> None:
    from localspec.web.guard.security import is_this_machine

    served_at = ("192.0.2.1", 7860)
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "192.0.2.1"):
        assert is_this_machine({"client": (host, 1), "server": served_at})
    for host in ("192.0.2.7", "::ffff:192.0.2.7", "testclient", ""):
        assert not is_this_machine({"client": (host, 1), "server": served_at})
    assert not is_this_machine({"client": None, "server": served_at})


def test_a_model_clicked_in_the_switcher_is_loaded(
    models_page: Any, shared_models_site: ModelsSite
) -> None:
    before = len(shared_models_site.opened)
    models_page.get_by_role("tab", name="Chat").first.click()
    models_page.click("#ls-model")
    menu = models_page.get_by_role("menu", name="Models that are ready here")
    menu.get_by_role("menuitem", name="demo").first.click()
    wait_until(models_page, lambda: len(shared_models_site.opened) > before)
    assert shared_models_site.opened[-1].model == "localspec/demo"
    models_page.get_by_role("tab", name="Models").first.click()
    models_page.wait_for_selector(f"{FIRST} li", timeout=WAIT_MS)
