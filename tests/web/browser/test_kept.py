"""Nothing of the person's is lost on the page: drafts, deleted chats, the way back, large files."""

from __future__ import annotations

import json
import threading
import urllib.request
import zipfile
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import Reply
from localspec.core.errors import EngineLost
from tests.web.browser.checks import ask_until, menu, open_chat, shows, stand
from tests.web.browser.visits import WAIT_MS, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow

BOX = "document.querySelector('#ls-message textarea')"


def holds(page: Visit, text: str) -> None:
    """Wait until the message box has this text."""
    page.page.wait_for_function(f"text => {BOX}?.value === text", arg=text, timeout=WAIT_MS)


def test_what_is_typed_stays_with_its_chat_over_a_look_elsewhere_and_a_reload(page: Visit) -> None:
    ask_until(page, "echo drafts one", 1)
    page.page.fill("#ls-message textarea", "half a thought")
    page.page.click("#ls-new")
    holds(page, "")
    assert page.page.evaluate(f"document.activeElement === {BOX}"), "New chat is there to write in"
    page.page.fill("#ls-message textarea", "another")
    open_chat(page, "echo drafts one")
    holds(page, "half a thought")
    page.reload()
    holds(page, "half a thought")
    page.page.click("#ls-new")
    holds(page, "another")
    page.page.press("#ls-message textarea", "Enter")
    stand(page, 1)
    holds(page, "")
    page.reload()
    stand(page, 1)
    assert page.page.input_value("#ls-message textarea") == "", "what was sent is no draft"


@pytest.fixture
def may_begin(site: Site, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, the server answers no message."""
    event, submit = threading.Event(), site.service.submit

    def held(*asked: Any) -> Reply:
        assert event.wait(WAIT_MS / 1000)
        return submit(*asked)

    monkeypatch.setattr(site.service, "submit", held)
    return event


def test_what_is_typed_while_a_message_is_sent_stays_in_the_box(
    page: Visit, may_begin: threading.Event
) -> None:
    page.send("echo the first")
    page.page.keyboard.type(" and more")
    may_begin.set()
    holds(page, " and more")
    stand(page, 1)
    assert page.text("#ls-chat .user").strip().startswith("echo the first\n")
    page.reload()
    holds(page, " and more")
    page.page.fill("#ls-message textarea", "")


def test_what_is_sent_while_a_message_is_sent_follows_it_and_a_second_enter_sends_nothing(
    page: Visit, site: Site, may_begin: threading.Event
) -> None:
    page.send("echo the first")
    for text in ("", " and the next", "", ""):
        page.page.keyboard.type(text)
        page.page.keyboard.press("Enter")
    may_begin.set()
    stand(page, 2)
    holds(page, "")
    assert [one.messages[-1].content for one in site.backend.requests[-2:]] == [
        "echo the first",
        " and the next",
    ]


def test_an_edit_leaves_the_draft_where_it_is(page: Visit) -> None:
    ask_until(page, "echo edit me", 1)
    page.page.fill("#ls-message textarea", "not sent yet")
    for end in ("Escape", "Enter"):
        page.page.locator("#ls-chat .user-row").hover()
        page.page.locator("#ls-chat .user-row a.ls-edit").click()
        page.page.wait_for_selector(".ls-editor textarea")
        assert page.page.input_value(".ls-editor textarea") == "echo edit me"
        page.page.keyboard.press(end)
        page.page.wait_for_selector(".ls-editor", state="detached")
        holds(page, "not sent yet")
    page.wait_for("2/2")


def test_back_leads_to_the_chat_before_and_forward_to_the_next(page: Visit) -> None:
    ask_until(page, "echo way one", 1)
    page.page.wait_for_function("/c=[0-9]/.test(location.search)")
    page.new_chat()
    ask_until(page, "echo way two", 1)
    open_chat(page, "echo way one")
    page.page.go_back()
    shows(page, "echo way two")
    page.wait_for("echo way two")
    page.page.go_forward()
    shows(page, "echo way one")
    page.page.locator("#ls-chat a.ls-fork").last.click()
    shows(page, "Fork of echo way one")
    page.page.go_back()
    page.page.locator("#ls-history [aria-current][title='echo way one']").wait_for()


def test_an_address_that_is_told_late_takes_no_step_out_of_the_history(page: Visit) -> None:
    """After Back or Forward the page hears of the address again; a chat may be chosen by then."""
    ask_until(page, "echo told late", 1)
    handle = page.site.service.conversations("told late")[0].id
    page.page.wait_for_url(f"**/?c={handle}")
    page.page.evaluate(
        """() => {
          [...document.querySelectorAll('#ls-chat a.ls-fork')].at(-1).click();
          window.lsAddress(location.pathname + location.search);
        }"""
    )
    shows(page, "Fork of echo told late")
    page.page.go_back()
    page.page.locator("#ls-history [aria-current][title='echo told late']").wait_for()


def test_two_chats_deleted_in_a_row_can_both_be_brought_back(page: Visit) -> None:
    ask_until(page, "echo first to go", 1)
    deleted = page.site.service.conversations("first to go")[0].id
    page.new_chat()
    ask_until(page, "echo next to go", 1)
    for title in ("first to go", "next to go"):
        page.page.locator("#ls-history .ls-open", has_text=title).click()
        page.wait_for(title)
        menu(page, title, "Delete")
        page.page.locator(".ls-toast", has_text=title).wait_for()
    page.page.set_input_files(
        "#ls-attach-file", files=[{"name": "x", "mimeType": "", "buffer": b"\0"}]
    )
    toast = page.page.locator(".ls-toast:visible")
    toast.get_by_text("x is not a text").wait_for()
    assert toast.count() == 1, "one at a time"
    toast.get_by_role("button", name="Close").click()
    open_it = "(handle) => window.dispatchEvent(new CustomEvent('ls-command', "
    page.page.evaluate(open_it + "{ detail: { do: 'open', handle } }))", deleted)
    toast.get_by_text("first to go").wait_for()
    for title in ("first to go", "next to go"):
        assert toast.count() == 1
        toast.filter(has_text=title).get_by_text("Undo").click()
        page.wait_for(title, "#ls-history")
    assert toast.count() == 0


def test_the_menu_of_a_chat_closes_by_key_wherever_the_focus_is(page: Visit) -> None:
    ask_until(page, "echo menu", 1)
    more = page.page.locator("#ls-history .ls-more").first
    for key in ("Tab", "Escape"):
        more.click()
        page.page.locator("#ls-menu").wait_for()
        if key == "Escape":
            page.page.evaluate("document.activeElement.blur()")
        page.page.keyboard.press(key)
        page.page.locator("#ls-menu").wait_for(state="detached")


def test_the_first_and_the_last_line_of_a_menu_have_a_key(page: Visit) -> None:
    ask_until(page, "echo menu", 1)
    page.page.locator("#ls-history .ls-more").first.click()
    for key, line in (("End", "Delete"), ("Home", "Rename"), ("ArrowUp", "Delete")):
        page.page.keyboard.press(key)
        assert page.page.evaluate("document.activeElement.textContent") == line
    page.page.keyboard.press("Escape")


def test_twenty_megabytes_and_a_zip_come_in_and_a_broken_file_is_refused(
    page: Visit, tmp_path: Path
) -> None:
    words = "meta path \\u " + "x" * 20_000_000  # what Gradio's bodies are searched for
    talk = {
        "messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "so"}]
    }
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A cat."}]
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("conversations.json", json.dumps([{"conversations": turns}]))
    (tmp_path / "big.json").write_text(json.dumps(talk))
    (tmp_path / "bad.json").write_text("{")
    for name, said in (
        ("other.zip", "One chat was imported. Not imported: pictures (1)."),
        ("big.json", "One chat was imported."),
    ):
        page.page.set_input_files("#ls-import-file", tmp_path / name)
        page.page.locator(".ls-toast", has_text=said).wait_for()
    with page.page.expect_console_message(lambda message: "409" in message.text, timeout=WAIT_MS):
        page.page.set_input_files("#ls-import-file", tmp_path / "bad.json")
    refusal = "This is not a chat export. Nothing was imported."
    page.page.locator(".ls-toast", has_text=refusal).wait_for()
    page.wait_for("of 20,000,013 characters")
    assert all("409" in error for error in page.errors)
    page.errors.clear()  # the browser notes a refusal by itself


def test_a_copied_message_is_what_was_written(page: Visit) -> None:
    written = "a < b &lt; ![x](y) $x^2$\n\n~~~\nc < d\n~~~\n\n    e < f\n\n&#60; <https://x.org/>"
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask_until(page, f"echo {written}", 1)
    copied = "navigator.clipboard.readText()"
    for button in page.page.locator("#ls-chat a.ls-copy").all():
        page.page.evaluate("navigator.clipboard.writeText('')")
        button.click()
        there = f"async () => (await {copied}).includes('echo')"
        page.page.wait_for_function(there, timeout=WAIT_MS)
        assert page.page.evaluate(copied).rstrip("\n") == f"echo {written}"
    page.page.evaluate("getSelection().selectAllChildren(document.querySelector('#ls-written'))")
    page.page.keyboard.press("Control+c")
    assert "echo a < b &lt; !x" in page.page.evaluate(copied), "without the marks"


def test_an_engine_lost_for_good_is_started_again_from_the_chat(page: Visit, site: Site) -> None:
    script = site.backend.script
    try:
        for num_lost in (1, 2, 3):
            script.fault, script.fail_at_round = EngineLost("The engine ended."), 0
            site.backend.num_rounds = 0
            page.send("echo lost")
            stand(page, num_lost)
    finally:
        script.fault, script.fail_at_round = None, None
    button = page.page.get_by_role("button", name="Start the engine again")
    button.wait_for()
    assert page.text("#ls-notices").count("The engine ended") == 1
    button.click()
    page.page.wait_for_selector('#ls-strip[data-phase="ready"]')
    page.page.wait_for_function("!document.querySelector('#ls-notices').innerText")


def test_a_wrong_number_in_the_strips_address_fails_nothing(site: Site) -> None:
    opened = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    opened.open(site.url).read()
    assert opened.open(f"{site.origin}/live?rounds_from=abc").status == 200
