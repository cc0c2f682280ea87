"""Conversations in a real browser: branches, going on, the list, files, presets, keys, themes."""

from __future__ import annotations

import pytest

from tests.web.conftest import WAIT_MS, Open, Site, Visit, until

pytestmark = pytest.mark.slow


def begin(visit: Open) -> Visit:
    page = visit()
    page.open("&c=new")
    return page


def ask(page: Visit, text: str, num_replies: int) -> None:
    """Send, and wait until so many replies stand with their line of figures."""
    page.send(text)
    stand(page, num_replies)


def stand(page: Visit, num_replies: int) -> None:
    page.page.wait_for_function(
        "n => document.querySelectorAll('#ls-written .ls-footer').length === n",
        arg=num_replies,
        timeout=WAIT_MS,
    )


def menu(page: Visit, title: str, choice: str) -> None:
    row = page.page.locator("#ls-history .ls-row", has_text=title).first
    row.hover()
    row.locator(".ls-more").click()
    page.page.get_by_role("menuitem", name=choice).click()


def test_the_list_renames_pins_finds_deletes_and_undoes(page: Visit, site: Site) -> None:
    ask(page, "echo about owls", 1)
    page.new_chat()
    ask(page, "echo about bees", 1)
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
    menu(page, "about bees", "Delete")
    page.page.wait_for_function(
        "!document.querySelector('#ls-history').innerText.includes('bees')", timeout=WAIT_MS
    )
    page.page.get_by_role("button", name="Undo").click()
    page.wait_for("bees", "#ls-history")
    page.wait_for("echo about bees", "#ls-chat")


def test_files_travel_with_the_message_and_come_back_on_edit(page: Visit, site: Site) -> None:
    code = b"def f():\n    return '```'\n" * 30
    picture = bytes(range(256))
    page.page.set_input_files(
        "#ls-attach-file",
        files=[
            {"name": "f.py", "mimeType": "text/x-python", "buffer": code},
            {"name": "x.png", "mimeType": "image/png", "buffer": picture},
        ],
    )
    page.wait_for("x.png is not a text", "#ls-gauge-text")
    page.send("what is this?")
    page.wait_for("x.png is not a text", "#ls-toasts")
    assert page.page.input_value("#ls-message textarea") == "what is this?"
    page.page.get_by_role("button", name="Remove x.png").click()
    page.page.press("#ls-message textarea", "Enter")
    stand(page, 1)
    assert code.decode() in site.backend.requests[-1].messages[-1].content
    page.wait_for("f.py, 779 bytes", "#ls-chat")
    page.page.locator("#ls-chat a.ls-edit").click()
    page.page.locator(".ls-chip", has_text="f.py").wait_for()
    page.page.keyboard.press("Escape")
    assert page.page.locator(".ls-chip").count() == 0


def test_too_much_is_cut_only_where_the_person_says_so(page: Visit, site: Site) -> None:
    long = "echo " + "word " * 900
    ask(page, long, 1)
    ask(page, long, 2)
    num_requests = len(site.backend.requests)
    page.send(long)
    page.page.get_by_role("button", name="Allow a reply of at most").wait_for()
    assert len(site.backend.requests) == num_requests
    page.page.get_by_role("button", name="Go on without the 2 oldest messages").click()
    stand(page, 3)
    assert len(site.backend.requests[-1].messages) == 3
    page.wait_for("without the 2 oldest messages", "#ls-gauge-text")


def test_a_preset_is_saved_chosen_and_deleted_and_a_chat_keeps_its_prompt(
    own_page: Visit, site: Site
) -> None:
    page = own_page
    page.page.keyboard.press("Control+,")
    page.page.fill("#ls-system textarea", "Be brief.")
    page.page.click("#ls-preset-save")
    page.page.fill("#ls-line", "Brief")
    page.page.press("#ls-line", "Enter")
    chosen = "document.querySelector('#ls-preset input').value === '{}'"
    page.page.wait_for_function(chosen.format("Brief"))
    ask(page, "echo with a prompt", 1)
    assert site.backend.requests[-1].messages[0].content == "Be brief."
    page.page.fill("#ls-system textarea", "")
    page.page.click("#ls-preset input")
    page.page.get_by_role("option", name="Brief").click()
    prompt = "document.querySelector('#ls-system textarea').value === 'Be brief.'"
    page.page.wait_for_function(prompt)
    page.page.click("#ls-preset-delete")
    page.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.page.wait_for_function(chosen.format(""))
    page.page.fill("#ls-system textarea", "")
    page.page.reload()
    page.page.wait_for_selector("#ls-system textarea", state="attached")
    page.page.wait_for_function(prompt)


def test_the_keyboard_reaches_everything(page: Visit, site: Site) -> None:
    ask(page, "echo by keyboard", 1)
    page.page.evaluate("document.activeElement.blur()")
    page.page.keyboard.press("?")
    page.page.get_by_role("dialog").get_by_text("Answer the last message again").wait_for()
    page.page.keyboard.press("Escape")
    page.page.evaluate("document.activeElement.blur()")
    page.page.keyboard.press("/")
    assert page.page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.page.keyboard.press("ArrowUp")
    page.page.wait_for_function("document.querySelector('#ls-message textarea').value !== ''")
    page.page.keyboard.press("Escape")
    assert page.page.input_value("#ls-message textarea") == ""
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


def test_opening_the_advanced_settings_changes_nothing(own_page: Visit, site: Site) -> None:
    """Gradio's number fields become 0 when they are first shown, and γ = 0 drafts nothing."""
    page = own_page
    page.new_chat()
    page.page.get_by_role("button", name="Open settings").click()
    page.page.get_by_text("Advanced", exact=True).click()
    page.page.get_by_label("Fixed γ").wait_for()
    ask(page, "echo with a look", 1)
    asked = site.backend.requests[-1]
    assert asked.num_draft_tokens is None and asked.sampling.seed != 0
    page.page.get_by_label("Fixed γ").fill("3")
    page.page.get_by_label("Seed").fill(" 7 ")
    ask(page, "echo with both", 2)
    asked = site.backend.requests[-1]
    assert (asked.num_draft_tokens, asked.sampling.seed) == (3, 7)
    page.page.get_by_label("Seed").fill("seven")
    page.page.get_by_label("Max tokens").fill("0")
    page.send("echo refused")
    page.wait_for("The seed is 'seven', but takes a whole number.", "#ls-toasts")
    page.page.get_by_label("Seed").fill("")
    page.page.press("#ls-message textarea", "Enter")
    page.wait_for("Max tokens is 0, but needs at least 1.", "#ls-toasts")
    assert page.page.input_value("#ls-message textarea") == "echo refused"


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


def test_mathematics_is_set_and_an_amount_is_not(page: Visit) -> None:
    ask(page, r"echo $a^2$ for $5 or $10, \(x_1\) and $$\frac{1}{2}$$", 1)
    page.page.wait_for_function(
        "document.querySelectorAll('#ls-written [data-testid=bot] .katex').length === 3"
    )
    assert "for $5 or $10," in page.text("#ls-written [data-testid=bot]")


def test_a_double_click_on_everything_does_it_once(page: Visit, site: Site) -> None:
    page.page.fill("#ls-message textarea", "echo once")
    page.page.dblclick("#ls-message .submit-button")
    stand(page, 1)
    page.page.dblclick("#ls-regenerate")
    page.wait_for("2/2")
    page.page.wait_for_timeout(500)
    assert "/3" not in page.text("#ls-chat")
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
    page.page.set_viewport_size({"width": 360, "height": 740})
    page.page.wait_for_selector("#ls-side:not(.open)")
    page.page.get_by_role("tab", name="Stats").first.click(timeout=WAIT_MS)
