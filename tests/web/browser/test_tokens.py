"""The token view in a real browser: its text, its counts, its keys, and the replay."""

from __future__ import annotations

import sqlite3

import pytest

from localspec.chat.service import ReplySettings
from localspec.core.decoding import SamplingParams
from localspec.core.errors import StoreError
from localspec.web.proof.tokens import Audits, token_view
from tests.kit.waiting import until
from tests.web.browser.visits import Visit
from tests.web.site import Site


def answer(site: Site, text: str, temperature: float = 0.0) -> tuple[int, int]:
    """(conversation, message) of a finished, stored reply."""
    until(lambda: site.service.status().phase == "ready")
    settings = ReplySettings(SamplingParams(temperature=temperature))
    reply = site.service.submit(None, text, settings)
    assert reply is not None and reply.done.wait(60)
    assert site.service.flush()
    return reply.handle, site.store.turn_rows(conversation_id=reply.handle)[-1]["message_id"]


def opened(page: Visit, text: str, temperature: float = 0.0) -> int:
    """The token view of a reply to `text`; the id of the reply."""
    handle, message = answer(page.site, text, temperature)
    page.open_chat(handle)
    page.page.click(f"a.ls-m-{message}")
    page.page.wait_for_selector("#ls-tv-text")
    return message


def test_meaning_survives_greyscale(page: Visit, site: Site) -> None:
    opened(page, "grey please")
    kinds = ("draft", "self", "ngram", "corrected", "bonus", "plain")
    styles = page.page.evaluate(
        """kinds => kinds.map(kind => {
          const span = document.createElement('span');
          span.className = `ls-run ls-k-${kind}`;
          document.querySelector('#ls-tv-text').append(span);
          const style = getComputedStyle(span);
          const found = `${style.textDecorationLine} ${style.textDecorationStyle} `
            + style.textDecorationThickness;
          span.remove();
          return found;
        })""",
        list(kinds),
    )
    assert len(set(styles)) == len(kinds), styles
    assert all(style.startswith("underline") for style in styles)


def test_arrow_keys_and_pointing_tell_outcome_and_round(page: Visit, site: Site) -> None:
    opened(page, "keys please")
    page.page.focus("#ls-tv-text")
    page.page.keyboard.press("ArrowRight")
    detail = page.text("#ls-tv-detail")
    assert "guessed by the small model, accepted" in detail
    assert "80 % sure" in detail and "round 1: 5 of 5 guesses right" in detail
    page.page.hover(".ls-missed >> nth=1")
    detail = page.text("#ls-tv-detail")
    assert "refused: “ wrong”" in detail and "stands instead" in detail
    page.page.keyboard.press("Escape")
    assert not page.page.evaluate("document.querySelector('#ls-token-view').open")


def test_a_sampled_reply_is_made_again_with_its_seed_and_any_drafter(
    page: Visit, site: Site
) -> None:
    message = opened(page, "sample me", temperature=0.8)
    row = site.service.store.turn_of(message)
    assert row is not None and row["seed"] is not None
    for drafter, words in (("off", "without drafting"), ("ngram", "with drafting")):
        page.page.select_option(".ls-tv-drafter", drafter)
        page.page.click(".ls-tv-audit button")
        page.wait_for(words, "#ls-tv-result[data-state=identical]")
        asked = site.backend.requests[-1]
        assert (asked.drafter, asked.sampling.seed) == (drafter, row["seed"])


def test_a_reply_of_a_log_without_seeds_says_why_it_cannot_be_made_again(
    page: Visit, site: Site
) -> None:
    _, message = answer(site, "from before", temperature=0.8)
    with sqlite3.connect(str(site.store.path)) as database:
        database.execute("UPDATE turn SET seed = NULL WHERE message_id = ?", (message,))
    database.close()
    state = Audits(site.service).start(message, "off")
    assert state["state"] == "refused" and "its seed was not logged" in state["text"]


def test_a_replay_loads_a_model_that_was_let_go(site: Site) -> None:
    _, message = answer(site, "and once more")
    site.service.unload()
    until(lambda: site.service.status().phase == "unloaded")
    audits = Audits(site.service)
    assert audits.start(message, "off")["state"] == "running"
    until(lambda: audits.state(message)["state"] != "running")
    assert audits.state(message)["state"] == "identical"


@pytest.mark.slow
def test_a_replay_that_nobody_waits_for_any_more_is_stopped(site: Site) -> None:
    """As where its window is closed."""
    site.backend.requests.clear()
    audits = Audits(site.service)
    _, message = answer(site, "a steady one")
    assert audits.stop(message)["state"] == "none"
    assert audits.start(message, "off")["state"] == "running"
    until(lambda: len(site.backend.requests) == 2)
    assert audits.start(message, "off")["state"] == "running", "no second one is begun"
    audits.stop(message)
    until(lambda: audits.state(message)["state"] != "running")
    state = audits.state(message)
    assert state["state"] == "cancelled" and state["text"].startswith("Stopped after the first")
    assert len(site.backend.requests) == 2


def test_a_reply_of_an_older_log_has_no_view(site: Site) -> None:
    _, message = answer(site, "from long ago")
    with sqlite3.connect(str(site.store.path)) as database:
        database.execute("UPDATE turn SET drafted = NULL WHERE message_id = ?", (message,))
    database.close()
    with pytest.raises(StoreError, match="as an earlier localspec wrote it"):
        token_view(site.service, message)


def test_an_unknown_message_is_said(site: Site) -> None:
    with pytest.raises(StoreError, match="no tokens of this reply"):
        token_view(site.service, 999_999)
