"""Check 20: a long reply in a long chat neither outruns the page nor is held up by it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ChatService, ReplySettings
from localspec.record.store import Store
from tests.kit.fakes import FakeBackend, Script, session_info
from tests.kit.tally import Tally
from tests.kit.waiting import WAIT_S, until
from tests.web.browser.checks import FOOTERS
from tests.web.browser.tabs import new_tab
from tests.web.browser.visits import Visit
from tests.web.site import Site, serve_page

pytestmark = pytest.mark.slow

QUICK_TOKENS, NUM_TOKENS = 600, 3000
TOKENS_A_SECOND = 600
NUM_MESSAGES = 100
# On two cores that browser, server and fake engine share: 0.996, 0.32 s and 95 ms.
MAX_TIMES = 1 / 0.95  # as long as a reply that nobody looks at
MAX_BEHIND_S = 1.0
MAX_TASK_MS = 200


LINES = itertools.cycle(
    (
        "A line of plain words that goes on for a while. ",
        "\n\n- an item with `code`\n- another\n\n",
        "**bold** and *slanted* words. ",
        "\n\n```python\nfor number in range(10):\n    print(number)\n```\n\n",
    )
)
LONG = "".join(itertools.islice(LINES, 900))
SHORT = "An answer with **words**, `code` and a list:\n\n- one\n- two\n" * 3
TOKENS_A_ROUND = 9


@pytest.fixture
def long_chat(tmp_path: Path) -> Iterator[tuple[ChatService, Store, int]]:
    """A service with a chat of 100 messages."""
    store = Store.open(tmp_path / "localspec.db")
    pace_s = TOKENS_A_ROUND / TOKENS_A_SECOND
    script = Script(
        reply=LONG, prefill_s=0.0, round_s=pace_s, context_length=10**6,
        num_draft_tokens=TOKENS_A_ROUND - 1, accepted=(TOKENS_A_ROUND - 1,),
    )  # fmt: skip
    service = ChatService(store, session_info, lambda report: FakeBackend(script))
    service.start()
    talk = [
        {"role": role, "content": SHORT if role == "assistant" else f"question {number}"}
        for number in range(NUM_MESSAGES // 2)
        for role in ("user", "assistant")
    ]
    (handle,) = service.import_conversations(json.dumps({"messages": talk}).encode())
    yield service, store, handle
    service.close()
    store.close()


def alone(service: ChatService, num_tokens: int) -> float:
    """Tokens a second of a long reply that nobody looks at."""
    started_s = time.monotonic()
    reply = service.submit(None, "a long one", ReplySettings(max_tokens=num_tokens))
    assert reply is not None and reply.done.wait(WAIT_S)
    return num_tokens / (time.monotonic() - started_s)


# The longest task of the page's thread, and when the reply's end was on the page.
OBSERVE = """() => {
  window.tasks = [];
  new PerformanceObserver((list) => {
    for (const one of list.getEntries()) window.tasks.push(Math.round(one.duration));
  }).observe({type: 'longtask'});
}"""


def watched(
    service: ChatService, handle: int, page: Any, num_tokens: int
) -> tuple[float, float, int]:
    """A reply of so many tokens on the page: its tokens a second, how long after its end the page
    shows it whole, and the longest task of the page's thread, ms."""
    num_before = page.locator(FOOTERS).count()
    page.evaluate(OBSERVE)
    page.fill("#ls-message textarea", "a long one")
    page.press("#ls-message textarea", "Enter")
    until(lambda: service.current is not None)
    reply = service.running(handle)
    assert reply is not None and reply.done.wait(WAIT_S)
    ended_s = time.monotonic()
    page.wait_for_function(
        "([s, n]) => document.querySelectorAll(s).length > n", arg=[FOOTERS, num_before]
    )
    behind_s = time.monotonic() - ended_s
    view = reply.view
    assert view.stats is not None and view.stats.num_output_tokens == num_tokens
    return num_tokens / view.seconds, behind_s, max(page.evaluate("window.tasks"), default=0)


def test_check_20_a_long_reply_in_a_long_chat_keeps_pace(
    long_chat: tuple[ChatService, Store, int], context: Any, tally: Tally
) -> None:
    service, store, handle = long_chat
    num_tokens = tally.size(QUICK_TOKENS, NUM_TOKENS)
    plain = alone(service, 300)
    with serve_page(service) as port, closing(new_tab(context)) as page:
        page.set_viewport_size({"width": 1500, "height": 900})
        visit = Visit(page, Site("127.0.0.1", port, service, store, FakeBackend()))
        visit.open(f"&c={handle}")
        visit.wait_for("question 49")
        if not page.locator("#ls-settings").evaluate("e => e.classList.contains('open')"):
            page.keyboard.press("Control+,")
        page.get_by_label("Max tokens").fill(str(num_tokens))
        page.keyboard.press("Tab")
        seen, behind_s, longest_ms = watched(service, handle, page, num_tokens)
        tally.measured("beside the page a reply takes", plain / seen, MAX_TIMES, "times as long")
        tally.measured("the page is behind by", behind_s, MAX_BEHIND_S, "s")
        tally.measured("its longest task takes", longest_ms, MAX_TASK_MS, "ms")
