"""Checks 10 and 13: branches of a conversation, and messages that are too long or empty."""

from __future__ import annotations

import pytest

from tests.kit.samples import siblings
from tests.kit.tally import Tally
from tests.kit.waiting import until
from tests.web.browser.checks import READY, ask, bubbles, newest, num_rows, wait_for_reply
from tests.web.browser.visits import WAIT_MS, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow

MAX_CLICK_MS = 200
PASTE = """(text) => {
  const box = document.querySelector('#ls-message textarea');
  const data = new DataTransfer();
  data.setData('text/plain', text);
  const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
  if (box.dispatchEvent(event)) {
    box.value = text;
    box.dispatchEvent(new Event('input', {bubbles: true}));
  }
}"""


def parents_of(site: Site, message_id: int) -> list[str]:
    """The texts from the root to a message, as the log's tree has them."""
    return [message.text for message in site.store.branch(message_id)]


def reply_after(site: Site, message_id: int) -> int:
    """The next reply, once it is complete."""
    until(lambda: newest(site)["message_id"] > message_id and newest(site)["state"] == "complete")
    return int(newest(site)["message_id"])


def arrow(visit: Visit, title: str) -> None:
    visit.page.locator(f"#ls-chat a.ls-show[title='{title}']").last.click()


def test_check_10_regenerate_edit_and_switch_keep_every_branch(page: Visit, site: Site) -> None:
    ask(page, "echo one", "echo one")
    ask(page, "echo two", "echo two")
    old = newest(site)["message_id"]
    page.page.locator("#ls-chat a.ls-again").last.click()
    again = reply_after(site, old)
    page.wait_for("2/2")
    assert parents_of(site, old) == parents_of(site, again) == ["echo one"] * 2 + ["echo two"] * 2
    assert set(siblings(site.store, again)) == {old, again}

    page.page.locator("#ls-chat .user-row").first.hover()
    page.page.locator("#ls-chat .user-row a.ls-edit").first.click()
    assert page.page.input_value(".ls-editor textarea") == "echo one"
    following = page.page.locator("#ls-written .ls-edited ~ .message-row")
    shown = [one.evaluate("(row) => getComputedStyle(row).opacity") for one in following.all()]
    assert shown == ["0.4"] * 3, "what follows is dimmed"
    page.page.fill(".ls-editor textarea", "echo another one")
    page.page.keyboard.press("Enter")
    edited = reply_after(site, again)
    page.wait_for("echo another one")
    assert parents_of(site, edited) == ["echo another one"] * 2
    page.page.wait_for_function(
        "() => !document.querySelector('#ls-chat').innerText.includes('echo two')", timeout=WAIT_MS
    )

    arrow(page, "earlier version")
    page.wait_for("echo two")
    assert bubbles(page, "user") == ["echo one", "echo two"]
    assert "echo another one" not in page.text("#ls-chat")
    arrow(page, "earlier version")  # of the second reply
    page.wait_for("1/2")
    page.reload()
    page.wait_for("echo two")
    assert bubbles(page, "user") == ["echo one", "echo two"], "the branch shown is remembered"
    assert parents_of(site, edited) == ["echo another one"] * 2, "and nothing was lost"


def test_check_10_a_stopped_reply_is_continued_in_its_place(page: Visit, site: Site) -> None:
    page.send("steady: to be continued")
    page.wait_for("guess a few tokens")
    page.page.click("#ls-stop")
    page.wait_for("stopped")
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    first = parents_of(site, newest(site)["message_id"])[-1]
    proceed = page.page.locator("#ls-chat a.ls-continue")
    proceed.click()
    proceed.wait_for(state="detached", timeout=WAIT_MS)  # its line of figures goes with it
    wait_for_reply(page, 0, "guess a few tokens")
    whole = parents_of(site, newest(site)["message_id"])
    assert whole[0] == "steady: to be continued" and len(whole) == 2
    assert whole[-1].startswith(first) and len(whole[-1]) > len(first)
    assert site.backend.requests[-1].continues
    assert len(bubbles(page)) == 1, "one reply, not two"


# Answers with the time from a click that waits its turn to the next frame.
CLICK = """() => new Promise((done) => {
  const button = document.getElementById('ls-theme');
  const started = performance.now();
  button.addEventListener('click', () => requestAnimationFrame(
    () => done(performance.now() - started)), {once: true});
  setTimeout(() => button.click());
})"""


def test_check_13_a_megabyte_is_pasted_and_the_page_answers(
    page: Visit, site: Site, tally: Tally
) -> None:
    rows = num_rows(site)
    page.page.evaluate(PASTE, "word " * 200_000)
    tally.measured("a click beside it", page.page.evaluate(CLICK), MAX_CLICK_MS, "ms")
    page.page.wait_for_selector("#ls-chips .ls-chip", timeout=WAIT_MS)
    page.page.locator("#ls-chips", has_not_text="reading").wait_for()  # which is not sent
    page.page.click("#ls-message .submit-button")
    page.page.wait_for_selector("dialog[open]", timeout=WAIT_MS)
    said = page.text("dialog[open]")
    assert "does not fit the context" in said and "4096" in said.replace(",", "")
    assert "Nothing was cut" in said
    page.page.get_by_role("button", name="Shorten the message").click()
    assert page.page.locator("#ls-chips .ls-chip").count() == 2, "what was pasted is still there"
    assert num_rows(site) == rows, "and nothing was sent"
    for _ in range(2):
        page.page.locator("#ls-chips .ls-chip button").first.click()
    assert page.page.locator("#ls-chips .ls-chip").count() == 0


def test_check_13_a_message_beyond_the_context_is_asked_about(page: Visit, site: Site) -> None:
    rows, text = num_rows(site), "word " * 5000
    page.page.fill("#ls-message textarea", text)
    page.page.press("#ls-message textarea", "Enter")
    page.page.wait_for_selector("dialog[open]", timeout=WAIT_MS)
    assert "tokens" in page.text("dialog[open]")
    assert page.page.locator("dialog[open] meter").count() == 0
    page.page.wait_for_selector("#ls-gauge[data-state='over']", timeout=WAIT_MS)
    page.page.get_by_role("button", name="Shorten the message").click()
    assert page.page.input_value("#ls-message textarea") == text
    assert num_rows(site) == rows
    page.page.fill("#ls-message textarea", "")
    ask(page, "echo short", "echo short")


COUNT_REFUSED = """() => {
  window.numRefused = 0;
  addEventListener("ls-signal", ({ detail }) => {
    const signal = typeof detail === "string" ? JSON.parse(detail) : detail;
    window.numRefused += signal.unsent ? 1 : 0;
  }, true);
}"""


def test_check_13_nothing_is_sent_of_an_empty_message(page: Visit, site: Site) -> None:
    num_before, num_refused = len(site.backend.requests), 0
    page.page.evaluate(COUNT_REFUSED)
    for text in ("", "   ", "\n\n", "\u200b \u00a0"[1:]):
        page.page.fill("#ls-message textarea", text)
        for send in (
            lambda: page.page.press("#ls-message textarea", "Enter"),
            lambda: page.page.click("#ls-message .submit-button", force=True),
        ):
            send()
            num_refused += 1  # until it is refused, the page takes no other message
            page.page.wait_for_function("n => window.numRefused >= n", arg=num_refused)
    ask(page, "echo some words", "echo some words")
    assert len(site.backend.requests) == num_before + 1, "only what came after them was sent"
    assert bubbles(page, "user") == ["echo some words"]
