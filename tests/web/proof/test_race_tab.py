"""The Race tab runs a race and the distribution test from the page, and stops them with it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from localspec.backend import Request
from localspec.chat.service import ChatService
from localspec.web.proof.race_html import trial_html
from localspec.web.proof.race_tab import Runs
from tests.web.conftest import Open, Site, Visit, until


def to_tab(one: Visit) -> Any:
    """The browser's page, on the Race tab."""
    one.page.click("button[role=tab]:has-text('Race')")
    one.page.wait_for_selector("#ls-race-start")
    return one.page


def test_a_race_shows_both_lanes_and_the_verdict(page: Visit, site: Site) -> None:
    one = to_tab(page)
    one.click("#ls-race-start")
    one.wait_for_selector("#ls-race-verdict")
    said = page.text("#ls-race-verdict")
    assert "Identical: all texts are the same" in said and "times" in said
    texts = one.locator(".ls-lane-text").all_inner_texts()
    assert len(texts) == 2 and texts[0] == texts[1] != ""
    assert site.store.turn_rows() == []  # a race is not logged


def test_closing_the_page_ends_the_race(site: Site, visit: Open) -> None:
    opened = visit()
    opened.open()
    one = to_tab(opened)
    one.fill("#ls-race-prompt textarea", "slow please")
    one.click("#ls-race-start")
    one.wait_for_selector(".ls-lane[data-phase=writing]")
    one.close()
    until(lambda: site.service.worker.current is None)


def test_the_distribution_test_can_be_stopped_and_says_what_it_found(
    page: Visit, site: Site
) -> None:
    one = to_tab(page)
    one.click("#ls-trial-start")
    one.wait_for_selector("#ls-trial progress")

    def drafted() -> list[Request]:
        return [request for request in site.backend.requests if request.num_draft_tokens == 4]

    until(lambda: len(drafted()) >= 4)
    one.click("#ls-trial-stop")
    one.wait_for_selector("#ls-trial-verdict")
    assert all(request.sampling.temperature == 1.0 for request in drafted())


def test_who_begins_alternates(site: Site) -> None:
    until(lambda: site.service.status().phase == "ready")
    runs, first = Runs(site.service), []
    for _ in range(4):
        asked = len(site.backend.requests)
        runs.race("hi", 0.0, 8, "auto").run(site.backend, threading.Event())
        first.append(site.backend.requests[asked + 1].drafter)
    assert first == ["off", "auto", "off", "auto"]


def test_the_test_takes_the_drafter_asked_for_or_the_first_there_is(site: Site) -> None:
    until(lambda: site.service.status().phase == "ready")
    runs = Runs(site.service)
    assert runs.drafters() == ["draft_model", "ngram"]
    trial = runs.trial(1.0, 5.0, "auto")
    assert trial.view.drafter == "draft_model"
    assert "0 replies each, 0 of 5 s" in trial_html(trial.view)


@pytest.mark.parametrize(
    ("there", "tried"),
    [
        (("ngram", "lookahead", "chained", "mtp"), "mtp"),
        (("ngram", "lookahead", "draft_tree"), "draft_tree"),
        (("ngram", "lookahead"), "ngram"),
    ],
)
def test_on_auto_the_test_takes_a_drafter_with_a_model_or_heads(
    service: ChatService, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], tried: str
) -> None:
    """Lookahead drafts next to nothing in six tokens, so its test said nothing."""
    runs = Runs(service)
    monkeypatch.setattr(runs, "drafters", lambda: list(there))
    trial = runs.trial(1.0, 5.0, "auto")
    assert trial.view.drafter == tried
