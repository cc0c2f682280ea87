"""Conversations in a real browser: branches, going on, the list, files, keys, themes."""

from __future__ import annotations

import threading
from base64 import b64encode

import pytest

from tests.kit.documents import pdf, word
from tests.kit.waiting import until
from tests.web.browser.checks import READY, ask_until, bubbles, menu, stand
from tests.web.browser.visits import WAIT_MS, Open, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow


def begin(visit: Open) -> Visit:
    page = visit()
    page.open("&c=new")
    return page


def test_the_list_renames_pins_finds_deletes_and_undoes(page: Visit, site: Site) -> None:
    ask_until(page, "echo about owls", 1)
    page.new_chat()
    ask_until(page, "echo about bees", 1)
    menu(page, "about owls", "Rename")
    page.page.fill("#ls-line", "<b>Night</b> birds")
    page.page.press("#ls-line", "Enter")
    page.wait_for("<b>Night</b> birds", "#ls-history")
    menu(page, "Night", "Pin to the top")
    page.wait_for("Pinned", "#ls-history")
    page.page.fill("#ls-search", "owls")
    page.wait_for("Found", "#ls-history")
    assert "bees" not in page.text("#ls-history")
    page.page.fill("#ls-search", "")
    page.wait_for("bees", "#ls-history")
    menu(page, "about bees", "When the context is full")
    page.page.locator("dialog[open]").get_by_role("button", name="Leave out the oldest").click()
    menu(page, "about bees", "When the context is full")
    now = page.page.locator("dialog[open] .ls-main")
    assert now.inner_text() == "Leave out the oldest (now)"
    now.press("Escape")
    menu(page, "about bees", "Delete")
    page.page.wait_for_function(
        "!document.querySelector('#ls-history').innerText.includes('bees')", timeout=WAIT_MS
    )
    page.page.get_by_role("button", name="Undo").click()
    page.wait_for("bees", "#ls-history")
    page.wait_for("echo about bees", "#ls-chat")


def test_an_earlier_list_of_chats_that_comes_late_replaces_no_later_one(
    page: Visit, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat that had been pinned had no "Unpin" in its menu."""
    ask_until(page, "echo about newts", 1)
    handle = site.service.conversations("newts")[0].id
    is_asked, may_answer = threading.Event(), threading.Event()
    settings_of = site.service.settings_of

    def late(wanted: int) -> dict[str, str]:
        is_asked.set()
        assert may_answer.wait(WAIT_MS / 1000)
        return settings_of(wanted)

    page.page.evaluate(
        """() => {
          window.told = 0;
          window.addEventListener('ls-signal', ({ detail }) => {
            window.told += 'moved' in JSON.parse(detail);
          });
        }"""
    )
    with monkeypatch.context() as patched:
        patched.setattr(site.service, "settings_of", late)
        page.page.locator("#ls-history .ls-open", has_text="newts").click()
        until(is_asked.is_set)  # the list has been read
        site.service.rename(handle, "Amphibians")
        page.page.fill("#ls-search", "newts")
        page.wait_for("Found\nAmphibians", "#ls-history")
        may_answer.set()
        page.page.wait_for_function("window.told === 1", timeout=WAIT_MS)
    page.page.wait_for_timeout(200)
    assert "Found\nAmphibians" in page.text("#ls-history")
    page.page.fill("#ls-search", "")
    page.page.locator("#ls-history").get_by_text("Found").wait_for(state="detached")


def test_files_travel_with_the_message_and_with_another_version_of_it(
    page: Visit, site: Site
) -> None:
    code = b"def f():\n    return '```'\n" * 30
    picture = bytes(range(256))
    page.page.set_input_files(
        "#ls-attach-file",
        files=[
            {"name": "f.py", "mimeType": "text/x-python", "buffer": code},
            {"name": "x.png", "mimeType": "image/png", "buffer": picture},
        ],
    )
    page.wait_for("x.png is not a text", "#ls-toasts")
    page.wait_for("f.py\n", "#ls-chips")
    page.wait_for("tokens", "#ls-chips")
    assert page.page.locator(".ls-chip").count() == 1
    page.send("what is this?")
    stand(page, 1)
    assert code.decode() in site.backend.requests[-1].messages[-1].content
    page.wait_for("f.py, 779 bytes", "#ls-chat")
    page.page.locator("#ls-chat .user-row").first.hover()
    page.page.locator("#ls-chat .user-row a.ls-edit").click()
    page.wait_for("f.py stay attached", "#ls-chat")
    page.page.fill("#ls-chat .ls-editor textarea", "and what is this?")
    page.page.keyboard.press("Enter")
    page.wait_for("2/2")
    asked = site.backend.requests[-1].messages[-1].content
    assert code.decode() in asked and asked.startswith("and what is this?")


DROP = """(files) => {
  const carried = new DataTransfer();
  for (const [name, data] of files) {
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    carried.items.add(new File([bytes], name));
  }
  for (const kind of ["dragover", "drop"]) {
    const event = new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true });
    document.querySelector("#ls-chat").dispatchEvent(event);
  }
}"""


SIDEWAYS = """[...document.querySelectorAll('#ls-chat .user-row *')].filter((one) =>
  getComputedStyle(one).overflowX === 'auto' && one.scrollWidth > one.clientWidth)
  .map((one) => one.innerText)"""


def test_dropped_files_say_what_was_read_of_them(page: Visit, site: Site) -> None:
    dropped = {
        "the notes of March.txt": b"plain words",
        "the report of March.pdf": pdf("first page", "second page"),
        "the letter of March.docx": word("Dear all,"),
    }
    page.page.evaluate(DROP, [[name, b64encode(data).decode()] for name, data in dropped.items()])
    sizes = {name[-4:]: len(data) for name, data in dropped.items()}
    size = f"{sizes['.pdf']} bytes" if sizes[".pdf"] < 1000 else f"{sizes['.pdf'] / 1000:.0f} kB"
    for said in (f"March.pdf\n{size}, 2 pages, ", ", 2 paragraphs, ", "March.txt\n11 bytes"):
        page.wait_for(said, "#ls-chips")
    names = page.page.locator("#ls-chips span")
    assert not any(names.evaluate_all("all => all.map(one => one.scrollWidth > one.clientWidth)"))
    page.send("what do they say?")
    stand(page, 1)
    asked = site.backend.requests[-1].messages[-1].content
    assert "plain words" in asked and "second page" in asked and "Dear all," in asked
    page.page.get_by_text("March.txt, 11 bytes").wait_for(timeout=WAIT_MS)
    assert page.page.evaluate(SIDEWAYS) == [], "a line of files wraps"


def test_too_much_is_cut_only_where_the_person_says_so(page: Visit, site: Site) -> None:
    long = "echo " + "word " * 900
    ask_until(page, long, 1)
    ask_until(page, long, 2)
    num_requests = len(site.backend.requests)
    page.send(long)
    page.page.get_by_role("button", name="Allow a reply of at most").wait_for()
    assert len(site.backend.requests) == num_requests
    page.page.get_by_role("button", name="Go on without the 2 oldest messages").click()
    stand(page, 3)
    assert len(site.backend.requests[-1].messages) == 3
    page.wait_for("without the 2 oldest messages", "#ls-gauge-text")


def test_the_keyboard_reaches_everything(page: Visit, site: Site) -> None:
    ask_until(page, "echo by keyboard", 1)
    page.page.evaluate("document.activeElement.blur()")
    page.page.keyboard.press("?")
    page.page.get_by_role("dialog").get_by_text("Answer the last message again").wait_for()
    page.page.keyboard.press("Escape")
    page.page.evaluate("document.activeElement.blur()")
    page.page.keyboard.press("/")
    assert page.page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.page.keyboard.press("ArrowUp")
    page.page.wait_for_function("document.activeElement.closest('.ls-editor') !== null")
    page.page.keyboard.press("Escape")
    assert page.page.locator(".ls-editor").count() == 0
    page.page.keyboard.press("Alt+KeyR")
    page.wait_for("2/2")
    page.page.keyboard.press("Alt+KeyF")
    assert page.page.evaluate("document.activeElement.id") == "ls-search"
    page.page.keyboard.press("Alt+KeyN")
    page.page.wait_for_function("!document.querySelector('#ls-chat [data-testid=user]')")


def test_a_dialog_that_closes_gives_the_focus_back_and_never_takes_it_again(page: Visit) -> None:
    page.page.click("#ls-keys")
    page.page.keyboard.press("Escape")
    assert page.page.evaluate("document.activeElement.id") == "ls-keys"
    page.page.click("#ls-keys")
    focused = page.page.evaluate(
        """async () => {
          const dialog = document.querySelector('dialog[open]');
          dialog.close();
          document.querySelector('#ls-message textarea').focus();
          while (dialog.isConnected) await new Promise((react) => setTimeout(react, 10));
          return document.activeElement.tagName;
        }"""
    )
    assert focused == "TEXTAREA"


def test_the_focus_stays_where_a_chat_or_a_message_was_deleted(page: Visit) -> None:
    ask_until(page, "echo about owls", 1)
    page.new_chat()
    ask_until(page, "echo about bees", 1)
    focused = "document.activeElement.closest(%r) !== null"
    menu(page, "about bees", "Export")
    assert "CSV: speed figures of the replies written here" in page.text("dialog[open]")
    page.page.keyboard.press("Escape")
    assert page.page.evaluate(focused % "#ls-history .ls-more")
    page.page.locator("#ls-written a.ls-remove").last.focus()
    page.page.keyboard.press("Enter")
    stand(page, 0)
    page.page.wait_for_function("document.activeElement.id === 'ls-chat'", timeout=WAIT_MS)
    page.page.get_by_role("button", name="Undo").focus()
    page.page.keyboard.press("Enter")
    stand(page, 1)
    assert page.page.evaluate("document.activeElement.id") == "ls-chat"
    at_owls = focused % "[aria-label='More: echo about owls']"
    pinned = page.page.locator("#ls-history [data-pinned]", has_text="about owls")
    for act, state in (("Pin to the top", "attached"), ("Unpin", "detached")):
        menu(page, "about owls", act)
        pinned.wait_for(state=state)
        page.page.wait_for_function(at_owls, timeout=WAIT_MS)
    menu(page, "about bees", "Delete")
    page.page.get_by_text("Deleted “echo about bees”").wait_for(timeout=WAIT_MS)
    # The next chat of the list has it, or New chat where none follows.
    at_next = "document.activeElement.closest('#ls-new, #ls-history .ls-more') !== null"
    page.page.wait_for_function(at_next, timeout=WAIT_MS)


def test_versions_of_a_reply_are_stepped_through_by_keyboard(page: Visit) -> None:
    ask_until(page, "echo one", 1)
    for place in ("2/2", "3/3"):
        page.page.locator("#ls-chat a.ls-again").last.click()
        page.wait_for(place)
        page.page.wait_for_function(READY, timeout=WAIT_MS)
    page.page.locator("#ls-chat a.ls-show[title='earlier version']").focus()
    for place in ("2/3", "1/3", "2/3"):
        page.page.keyboard.press("Enter")
        page.wait_for(place)
        has_focus = "document.activeElement.matches('a.ls-show')"
        page.page.wait_for_function(has_focus, timeout=5_000)


def test_the_theme_follows_the_system_until_it_is_chosen_and_is_remembered(
    own_page: Visit,
) -> None:
    page = own_page
    is_dark = "document.body.classList.contains('dark')"
    page.page.evaluate("localStorage.removeItem('ls-theme')")  # which another test may have chosen
    page.page.emulate_media(color_scheme="light")
    page.page.emulate_media(color_scheme="dark")
    page.page.wait_for_function(is_dark)
    page.page.click("#ls-theme")  # light
    page.page.wait_for_function(f"!{is_dark}")
    page.page.reload()
    page.page.wait_for_selector("#ls-theme[title='Theme: light']")
    assert not page.page.evaluate(is_dark)
    page.page.evaluate("localStorage.clear()")  # other tests open their pages in this browser
    page.page.reload()
    page.page.wait_for_function(is_dark)


RICH = """echo this:

| City | Inhabitants | Share |
|:--|--:|:-:|
| Lima | 10,092,000 | 62 % |

```python
print("hello")
```

```
of no language
```"""
ALIGNED = """() => [...document.querySelectorAll('#ls-written .bot td')]
  .map((cell) => getComputedStyle(cell).textAlign)"""
LANGUAGES = """() => [...document.querySelectorAll('#ls-written .bot pre')]
  .map((block) => getComputedStyle(block, '::before').content)"""


def test_columns_stand_as_they_were_meant_and_code_says_its_language(page: Visit) -> None:
    ask_until(page, RICH, 1)
    page.page.locator("#ls-written .bot pre").nth(1).wait_for()
    assert page.page.evaluate(ALIGNED) == ["left", "right", "center"]
    assert page.page.evaluate(LANGUAGES) == ['"python"', "none"]


def test_mathematics_is_set_and_an_amount_is_not(page: Visit) -> None:
    ask_until(page, r"echo $a^2$ for $5 or $10, \(x_1\) and $$\frac{1}{2}$$", 1)
    page.page.wait_for_function(
        "document.querySelectorAll('#ls-written [data-testid=bot] .katex').length === 3"
    )
    assert "for $5 or $10," in page.text("#ls-written [data-testid=bot]")


def test_a_double_click_on_everything_does_it_once(page: Visit, site: Site) -> None:
    num_before = len(site.backend.requests)
    page.page.fill("#ls-message textarea", "echo once")
    page.page.dblclick("#ls-message .submit-button")
    stand(page, 1)
    page.page.dblclick("#ls-chat a.ls-again")
    page.wait_for("2/2")
    ask_until(page, "echo after it", 2)
    assert "/3" not in page.text("#ls-chat")
    assert len(site.backend.requests) == num_before + 3
    assert bubbles(page, "user") == ["echo once", "echo after it"]
    page.page.dblclick("#ls-new")
    page.page.wait_for_function("!document.querySelector('#ls-chat [data-testid=user]')")
    until(lambda: site.service.current is None)


def test_the_gauge_comes_back_with_the_model(page: Visit) -> None:
    """It stayed empty until something was typed."""
    service = page.site.service
    page.wait_for("of 4,096 tokens", "#ls-gauge-text")
    service.unload()
    page.page.wait_for_selector('#ls-strip[data-phase="unloaded"]')
    page.page.fill("#ls-message textarea", "How full is it?")
    page.page.wait_for_selector("#ls-gauge[hidden]", state="attached")
    service.retry()
    page.wait_for("of 4,096 tokens", "#ls-gauge-text")
    page.page.fill("#ls-message textarea", "")


def test_a_page_made_narrow_does_not_lie_under_its_sides(own_page: Visit) -> None:
    page = own_page
    page.page.wait_for_selector("#ls-side.open")
    for width in (768, 360):  # an upright tablet has the largest at which sides lie over the page
        page.page.set_viewport_size({"width": width, "height": 740})
        page.page.wait_for_selector("#ls-side:not(.open)", timeout=5_000)
        page.page.get_by_role("tab", name="Stats").first.click(timeout=WAIT_MS)


def test_a_dialog_keeps_clear_of_the_edges_of_a_narrow_page(own_page: Visit) -> None:
    page = own_page.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("#ls-side:not(.open)").wait_for()
    page.keyboard.press("?")
    page.locator("dialog[open]").wait_for()
    box = page.locator("dialog[open]").bounding_box()
    page.keyboard.press("Escape")
    assert box["x"] >= 8 and box["x"] + box["width"] <= 390 - 8
