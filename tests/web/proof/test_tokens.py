"""The token view in a real browser: its text, its counts, its keys, and the replay."""

from __future__ import annotations

import re
import sqlite3
from typing import Any

import pytest

from localspec.chat.service import ReplySettings
from localspec.core import SamplingParams
from localspec.errors import StoreError
from localspec.web.proof.tokens import token_view
from tests.web.conftest import Open, Site, until

RUNS = "[...document.querySelectorAll('#ls-tv-text .ls-run')].map(run => run.textContent).join('')"


def answer(site: Site, text: str, temperature: float = 0.0) -> tuple[int, int]:
    """(conversation, message) of a finished, stored reply."""
    until(lambda: site.service.status().phase == "ready")
    settings = ReplySettings(SamplingParams(temperature=temperature))
    reply = site.service.submit(None, text, settings)
    assert reply is not None and reply.done.wait(60)
    assert site.service.flush()
    return reply.handle, site.store.turn_rows(conversation_id=reply.handle)[-1]["message_id"]


def opened(visit: Open, site: Site, text: str, temperature: float = 0.0) -> tuple[Any, int]:
    handle, message = answer(site, text, temperature)
    one = visit()
    one.open(f"&c={handle}")
    one.page.click(f"a.ls-m-{message}")
    one.page.wait_for_selector("#ls-tv-text")
    return one, message


def test_coloured_runs_joined_are_the_reply_and_counts_are_the_logs(
    site: Site, visit: Open
) -> None:
    one, message = opened(visit, site, "tell me")
    row = site.store.turn_of(message)
    assert row is not None
    assert one.page.evaluate(RUNS) == site.store.branch(message)[-1].text
    counts = {
        kind: int(re.search(r"\d+", one.page.inner_text(f".ls-tv-legend li[data-kind={kind}]"))[0])  # type: ignore[index]
        for kind in ("draft", "corrected", "bonus")
    }
    assert counts["draft"] == row["num_accepted_tokens"]
    assert sum(counts.values()) == row["num_output_tokens"]
    assert f"Guessed: {row['num_draft_tokens']}, of which {counts['draft']} right" in one.text(
        ".ls-tv-sum"
    )


def test_meaning_survives_greyscale(site: Site, visit: Open) -> None:
    one, _ = opened(visit, site, "grey please")
    kinds = ("draft", "self", "ngram", "corrected", "bonus", "plain")
    styles = one.page.evaluate(
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


def test_arrow_keys_and_pointing_tell_chance_outcome_and_round(site: Site, visit: Open) -> None:
    one, _ = opened(visit, site, "keys please")
    one.page.focus("#ls-tv-text")
    one.page.keyboard.press("ArrowRight")
    detail = one.text("#ls-tv-detail")
    assert "guessed by draft_model, accepted" in detail and "with 90 %" in detail
    assert "80 % sure" in detail and "round 1: 5 of 5 guesses right" in detail
    one.page.hover(".ls-missed >> nth=1")
    detail = one.text("#ls-tv-detail")
    assert "refused: “ wrong”" in detail and "stands instead" in detail and "20 %" in detail
    one.page.keyboard.press("Escape")
    assert not one.page.evaluate("document.querySelector('#ls-token-view').open")


def test_a_greedy_reply_is_replayed_without_speculation(site: Site, visit: Open) -> None:
    one, _ = opened(visit, site, "replay me")
    one.page.click(".ls-tv-audit button")
    one.page.wait_for_selector("#ls-tv-result[data-state=identical]")
    assert "Identical" in one.text("#ls-tv-result")
    assert site.backend.requests[-1].drafter == "off"


def test_a_sampled_reply_says_why_it_cannot_be_replayed(site: Site, visit: Open) -> None:
    one, _ = opened(visit, site, "sample me", temperature=0.8)
    one.page.click(".ls-tv-audit button")
    one.page.wait_for_selector("#ls-tv-result[data-state=refused]")
    assert "sampled at temperature 0.8" in one.text("#ls-tv-result")


def test_markup_in_a_reply_stays_text(site: Site, visit: Open) -> None:
    one, message = opened(visit, site, "xss please")
    assert one.page.evaluate(RUNS) == site.store.branch(message)[-1].text
    assert one.page.evaluate("window.__pwned") is None
    assert one.page.evaluate("document.querySelectorAll('#ls-token-view img, iframe').length") == 0


def test_a_reply_of_an_older_log_is_shown_by_asking_the_model(site: Site) -> None:
    _, message = answer(site, "from long ago")
    with sqlite3.connect(str(site.store.path)) as database:
        database.execute("UPDATE turn SET drafted = NULL WHERE message_id = ?", (message,))
    database.close()
    shown = token_view(site.service, message)
    assert shown["rounds"][0]["drafted"] == 5
    assert len(shown["tokens"]) == shown["num_output_tokens"]
    assert "before localspec kept" in shown["notes"][0]
    if shown["runs"] is not None:  # the fake knows pieces by a hash, which may be ambiguous
        assert "".join(text for text, _ in shown["runs"]) == shown["text"]


def test_an_unknown_message_is_said(site: Site) -> None:
    with pytest.raises(StoreError, match="no tokens of this reply"):
        token_view(site.service, 999_999)
