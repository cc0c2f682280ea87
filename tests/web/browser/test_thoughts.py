"""What a model thinks is one folded line while it grows and after, and is not copied."""

from __future__ import annotations

import pytest

from tests.kit.fakes import REPLY
from tests.kit.waiting import until
from tests.web.browser.checks import wait_for_reply
from tests.web.browser.visits import WAIT_MS, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow

FOLD = "#ls-chat .thought-group"


def test_a_thought_is_folded_stays_open_when_it_was_opened_and_is_not_copied(
    page: Visit, site: Site
) -> None:
    site.pace(0.4)  # a thought of some seconds: a busy machine shows it late
    page.send("ponder")
    page.page.wait_for_selector(f"{FOLD}:has-text('Thinking…')", timeout=WAIT_MS)
    assert "They ask" not in page.text("#ls-chat")
    page.page.click(f"{FOLD} [role=button]")
    page.wait_for("They ask")
    site.pace(0.004)
    wait_for_reply(page, 0)
    page.wait_for("They ask about drafts")  # it stays open
    title = page.page.inner_text(f"{FOLD} [role=button]")
    assert "Thought for" in title and "tokens" in title and "They ask" not in title
    assert page.page.locator(f"{FOLD} b").count() == 0, "what is thought is no markup"
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.page.locator("#ls-chat .bot-row").last.hover()
    page.page.click("#ls-chat .bot a.ls-copy")
    copied = "navigator.clipboard.readText()"
    until(lambda: page.page.evaluate(copied).strip() == REPLY)
