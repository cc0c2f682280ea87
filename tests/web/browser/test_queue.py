"""Gradio's queue in a real browser: an answer whose stream closed too early is still heard."""

from __future__ import annotations

import pytest

from tests.web.browser.visits import WAIT_MS, Open, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow

# A stream's end reaches the page late, as on a crowded machine; all else comes at once.
LATE_MS = 400
LATE_STREAMS = """(() => {
  const ask = window.fetch;
  window.fetch = async (...request) => {
    const response = await ask(...request);
    if (!String(request[0].url ?? request[0]).includes('/queue/data')) return response;
    const decoder = new TextDecoder();
    const late = new TransformStream({
      async transform(chunk, out) {
        if (decoder.decode(chunk).includes('close_stream'))
          await new Promise((done) => setTimeout(done, LATE_MS));
        out.enqueue(chunk);
      },
    });
    return new Response(response.body.pipeThrough(late), response);
  };
})()""".replace("LATE_MS", str(LATE_MS))


def pin(page: Visit, is_pinned: bool) -> None:
    page.page.evaluate(
        """(is_pinned) => {
          const handle = Number(document.querySelector('#ls-history .ls-row').dataset.handle);
          const detail = { do: 'pin', handle, is_pinned };
          window.dispatchEvent(new CustomEvent('ls-command', { detail }));
        }""",
        is_pinned,
    )


def test_an_event_taken_while_the_stream_was_closing_is_answered_on_the_page(
    visit: Open, site: Site
) -> None:
    page = visit(is_new=True)
    page.page.add_init_script(LATE_STREAMS)
    page.open("&c=new")
    page.send("echo about owls")
    page.wait_for("tok/s")
    page.page.wait_for_timeout(3 * LATE_MS)  # the turn's own streams have ended
    for is_pinned in (True, False, True):
        pin(page, is_pinned)
        page.wait_for("Pinned" if is_pinned else "Today", "#ls-history")
    # The first was seen on the page; its stream's end was not, when the next was taken.
    assert site.store.conversations()[0].is_pinned
    assert page.page.locator("#ls-history .ls-row[data-pinned]").count() == 1
    page.send("echo about bees")
    page.page.wait_for_function(
        "document.querySelectorAll('#ls-written .ls-footer').length === 2", timeout=WAIT_MS
    )


# The page learns late that an event was accepted, as on a crowded machine.
LATE_JOINS = """(() => {
  const ask = window.fetch;
  window.numListens = 0;
  window.addEventListener('ls-command', (event) => {
    window.numListens += event.detail.do === 'listen';
  });
  window.fetch = async (...request) => {
    const response = await ask(...request);
    if (String(request[0].url ?? request[0]).includes('/queue/join'))
      await new Promise((done) => setTimeout(done, LATE_MS));
    return response;
  };
})();""".replace("LATE_MS", str(LATE_MS))
COUNTED_FRAMES = """(() => {
  const ask = window.requestAnimationFrame.bind(window);
  window.numFrames = 0;
  window.requestAnimationFrame = (act) => { window.numFrames += 1; return ask(act); };
})();"""
COUNTED_COPIES = """(() => {
  const copy = window.structuredClone;
  window.numCopies = 0;
  window.structuredClone = (...asked) => { window.numCopies += 1; return copy(...asked); };
})();"""
RESTED_MS = 600
NUM_WINDOWS = 6
MOST_FRAMES = 10
MOST_WAKES = 240  # where one looks every millisecond there are some 600


def test_an_answer_that_is_read_before_its_event_is_known_is_not_asked_for_again(
    visit: Open, site: Site
) -> None:
    page = visit(is_new=True)
    page.page.add_init_script(LATE_JOINS + COUNTED_FRAMES + COUNTED_COPIES)
    page.open("&c=new")
    page.page.evaluate("window.numCopies = 0")  # Gradio's scripts may start before the page's own
    page.send("endless steady")
    page.wait_for("guess a few tokens")  # the stream is open
    for is_pinned in (True, False):
        pin(page, is_pinned)
        page.wait_for("Pinned" if is_pinned else "Today", "#ls-history")
    page.page.click("#ls-stop")
    page.wait_for("stopped")
    page.page.wait_for_timeout(3 * LATE_MS)  # the turn's own streams have ended
    assert page.page.evaluate("window.numListens") == 0
    assert page.page.evaluate("window.numCopies") == 0, "of what is no object"
    assert_rests(page)


def assert_rests(page: Visit) -> None:
    """While nothing happens, neither the page nor the server takes time from the engine. Gradio
    fades what a turn's end changes, and other threads of the tests wake up too, so one of several
    windows of time has to be quiet; whoever looks again and again leaves none."""
    resource = pytest.importorskip("resource", reason="this system does not count wake-ups")
    counts = list[tuple[int, int]]()
    while len(counts) < NUM_WINDOWS:
        num_frames = page.page.evaluate("window.numFrames")
        num_wakes = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        page.page.wait_for_timeout(RESTED_MS)
        num_wakes = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - num_wakes
        counts.append((page.page.evaluate("window.numFrames") - num_frames, num_wakes))
        if counts[-1][0] < MOST_FRAMES and counts[-1][1] < MOST_WAKES:
            return
    raise AssertionError(f"(frames, wakes) in {RESTED_MS} ms: {counts}")
