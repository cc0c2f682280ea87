"""Checks 4 to 6: one turn as it is seen while it runs, as it is kept, and as it is stopped."""

from __future__ import annotations

import csv
import io
import re
import threading
from pathlib import Path

import pytest

from localspec.core.units import compared, gain_words, took
from tests.kit.tally import Tally
from tests.kit.waiting import WAIT_S, until
from tests.web.browser.checks import (
    READY,
    ask,
    bubbles,
    newest,
    open_tab,
    unfold_turns,
    wait_for_reply,
)
from tests.web.browser.visits import WAIT_MS, Visit
from tests.web.site import Site, scripted_reply

pytestmark = pytest.mark.slow

MAX_BUBBLE_MS = 200
MAX_STOP_MS = 500

# Notes, frame by frame, what a person would see from the key press on.
WATCH = """(sent) => {
  const seen = window.seen = {phases: [], speeds: [], sent: null, bubble: null,
                              first: null, phaseAtBubble: null, stopped: null, changed: null};
  const isThere = () => [...document.querySelectorAll('#ls-chat [data-testid=user]')]
    .some((one) => one.innerText.includes(sent));
  const note = (list, id) => {
    const text = document.getElementById(id).textContent;
    if (list.at(-1) !== text) list.push(text);
  };
  const growing = () => [...document.querySelectorAll('#ls-growing .bot .message-content')]
    .map((one) => one.innerText).join('');
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Enter') seen.sent ??= performance.now();
  }, true);
  document.addEventListener('click', (event) => {
    if (event.target.closest('#ls-stop')) seen.stopped ??= performance.now();
  }, true);
  let last = '';
  const look = () => {
    if (window.seen !== seen) return; // a later test watches
    if (seen.sent !== null) {
      note(seen.phases, 'ls-phase');
      note(seen.speeds, 'ls-speed');
      if (seen.bubble === null && isThere()) {
        seen.bubble = performance.now();
        seen.phaseAtBubble = document.getElementById('ls-phase').textContent;
      }
      const text = growing();
      if (text && seen.first === null) seen.first = performance.now();
      if (text && text !== last) { last = text; seen.changed = performance.now(); }
    }
    requestAnimationFrame(look);
  };
  look();
}"""


def test_check_4_the_bubble_comes_before_the_engine_writes_and_the_figures_move(
    page: Visit, site: Site, tally: Tally
) -> None:
    may_write = threading.Event()
    site.backend.script.reply = lambda asked: (may_write.wait(WAIT_S), scripted_reply(asked))[1]
    page.page.evaluate(WATCH, "slow: what is speculation?")
    page.send("slow: what is speculation?")
    page.page.wait_for_function("() => window.seen.bubble !== null", timeout=WAIT_MS)
    page.wait_for("Reading", "#ls-phase")
    assert site.backend.num_rounds == 0, "nobody waited for the engine"
    may_write.set()
    moved = """() => window.seen.speeds.length >= 4
      && window.seen.phases.some((one) => /^Writing \\d s/.test(one))"""
    page.page.wait_for_function(moved, timeout=WAIT_MS)  # the first speed is from before
    site.pace(0.004)
    wait_for_reply(page, 0)
    seen = page.page.evaluate("window.seen")
    tally.measured("the bubble comes after", seen["bubble"] - seen["sent"], MAX_BUBBLE_MS, "ms")
    said = [phase.partition(" ")[0] for phase in seen["phases"]]
    assert said.index("Reading") < said.index("Writing"), "said before the first token"
    footer = page.page.locator("#ls-chat .bot .ls-footer").last.inner_text()
    assert re.search(
        r"^\d+ tokens in [\d.]+ m?s · writing at [\d.]+ tok/s · "
        r"[\d.]+x faster than without drafting · \d\d:\d\d · \S+ · details",
        footer,
    ), footer


def test_check_5_shown_logged_and_exported_numbers_are_the_same(
    page: Visit, site: Site, tmp_path: Path
) -> None:
    ask(page, "one before it")
    page.new_chat()
    ask(page, "count this")
    row = newest(site)
    rate = row["num_accepted_tokens"] / row["num_draft_tokens"]
    assert row["acceptance_rate"] == pytest.approx(rate)
    assert row["tokens_per_second"] == pytest.approx(
        1000 * row["num_output_tokens"] / row["decode_ms"]
    )
    page.wait_for(f"{row['tokens_per_second']:.0f}", "#ls-speed")
    assert page.text("#ls-gain") == gain_words(row["speedup"])
    right = row["num_accepted_tokens"] / row["num_checked_tokens"]
    assert page.text("#ls-guesses") == f"{100 * right:.0f} % of checked guesses right"
    footer = page.page.locator("#ls-chat .bot .ls-footer").last.inner_text()
    speed = f"{row['tokens_per_second']:.0f} tok/s"  # of the fake it is always above 20
    counted = f"{row['num_output_tokens']} tokens in {took(row['reply_ms'])}"
    assert f"{counted} · writing at {speed} · {compared(row['speedup'])} · " in footer
    answer = page.page.request.get(f"{site.origin}/export?format=csv&scope=all")
    lines = list(csv.DictReader(io.StringIO(answer.text().removeprefix("\ufeff"))))
    for name in ("tokens_per_second", "speedup", "ttft_ms", "num_output_tokens"):
        assert float(lines[-1][name]) == pytest.approx(row[name])
    assert float(lines[-1]["acceptance_rate"]) == pytest.approx(rate)
    open_tab(page, "Stats")
    page.page.get_by_label("Everything").click()
    unfold_turns(page)
    page.wait_for(f"{row['tokens_per_second']:.1f}", "#ls-turns")
    page.page.evaluate("document.querySelector('#ls-turns details').removeAttribute('open')")
    page.page.wait_for_selector("#ls-turns details[open]")  # Gradio drew as many rows again
    page.page.evaluate("document.querySelector('#ls-turns details').dataset.before = 'yes'")
    page.page.get_by_label("This conversation").click()
    page.page.wait_for_selector("#ls-turns details[open]:not([data-before])", timeout=WAIT_MS)


def _bare(text: str) -> str:
    """Without blanks, emphasis, fences and the numbers of lists, which are no text on the page: a
    reply may be stopped between the two stars of a `**` and before the first word of an item."""
    marks = r"^\d+\.|^```\w*|\*"
    return "".join(re.sub(marks, "", text, flags=re.MULTILINE).split())


def test_check_6_stop_freezes_text_engine_and_log(page: Visit, site: Site, tally: Tally) -> None:
    page.page.evaluate(WATCH, "steady endless: to be halted")
    page.send("steady endless: to be halted")
    page.wait_for("Speculative decoding lets")
    page.page.click("#ls-stop")
    page.wait_for("stopped")
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    text = bubbles(page)[-1]
    assert page.page.evaluate("document.activeElement.tagName") == "TEXTAREA", "ready to go on"
    seen = page.page.evaluate("window.seen")
    tally.measured("the text stands after", seen["changed"] - seen["stopped"], MAX_STOP_MS, "ms")
    row = newest(site)
    assert (row["state"], row["finish_reason"]) == ("stopped", "cancelled")
    stored = site.store.branch(row["message_id"])[-1].text
    assert _bare(stored) == _bare(text)
    ask(page, "and now?")
    assert newest(site)["state"] == "complete"
    assert bubbles(page)[0] == text, "nothing was added to the stopped reply"
    num_logged = sum(
        len(site.store.step_rows(one["turn_id"])) for one in site.store.turn_rows()[-2:]
    )
    assert site.backend.num_rounds == num_logged, "no round was run for it after its end"


@pytest.mark.parametrize("moment", ["twice at once", "while the prompt is read"])
def test_check_6_stop_works_at_every_moment(page: Visit, site: Site, moment: str) -> None:
    text = "steady endless: stop me"
    if moment == "while the prompt is read":
        site.backend.script.prefill_s = 30.0
        text = "stop me"  # without a reply to it the next message is asked for together with it
    page.send(text)
    page.page.wait_for_selector("#ls-stop:not([disabled])", timeout=WAIT_MS)
    if moment == "while the prompt is read":
        page.wait_for("Reading", "#ls-phase")
    # Both clicks at once: the button is gone as soon as the page has seen the first.
    number = 2 if moment == "twice at once" else 1
    page.page.eval_on_selector("#ls-stop", "(stop, n) => { while (n--) stop.click(); }", number)
    until(lambda: site.service.current is None)
    site.begin()
    assert newest(site)["state"] == "stopped"
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    ask(page, "and now?")
