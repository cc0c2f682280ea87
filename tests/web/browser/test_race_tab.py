"""The Race tab runs a race from the page, and stops it by its button and with the page."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.compare import Answer
from localspec.chat.race import Lane, RaceView
from localspec.core.backend import Server
from localspec.core.errors import ConfigError, LocalspecError, RequestError
from localspec.core.turn_stats import TurnStats
from localspec.web.proof.race_html import race_html
from localspec.web.proof.race_tab import Runs
from tests.kit.fakes import Script
from tests.kit.services import close, open_service
from tests.kit.waiting import WAIT_S, until
from tests.web.browser.visits import Open, Visit
from tests.web.site import Site


def to_tab(one: Visit) -> Any:
    """The browser's page, on the Race tab."""
    one.page.click("button[role=tab]:has-text('Race')")
    one.page.wait_for_selector("#ls-race-start")
    return one.page


def test_a_race_shows_both_lanes_and_the_verdict(page: Visit, site: Site) -> None:
    one = to_tab(page)
    drafter = one.locator("#ls-race-drafter select")
    drafter.locator("option", has_text="small model").wait_for(state="attached")
    drafter.press("ArrowDown")
    drafter.press("Enter")
    assert one.evaluate("document.activeElement.tagName") == "SELECT", "no key takes its focus"
    one.click("#ls-race-start")
    one.wait_for_selector("#ls-race-verdict")
    asked = {request.drafter for request in site.backend.requests[-6:]}
    assert asked == {"off", drafter.input_value()} != {"off", "auto"}
    said = page.text("#ls-race-verdict")
    assert "Identical: all texts are the same" in said and "without drafting" in said
    texts = one.locator(".ls-lane-text").all_inner_texts()
    assert len(texts) == 2 and texts[0] == texts[1] != ""
    assert site.store.turn_rows() == []  # a race is not logged
    one.evaluate("document.querySelector('.ls-lane small').textContent = '9 to 10 '.repeat(9)")
    tops = "[...document.querySelectorAll('.ls-lane-text')].map(e => e.getBoundingClientRect().top)"
    assert len(set(one.evaluate(tops))) == 1, "both texts are level, whatever wraps above them"


def test_a_race_in_which_nothing_was_drafted_tells_no_gain() -> None:
    stats = TurnStats(9, num_output_tokens=2, num_steps=2, decode_ms=1900.0)
    plain = Answer(0.0, 2.0, tokens=(1, 2), stats=stats)
    lucky = replace(plain, seconds=1.0)
    lanes = Lane("plain", runs=(plain,)), Lane("speculative", runs=(lucky,))
    said = race_html(RaceView(True, *lanes, phase="done"))
    assert "Nothing was drafted" in said and "times" not in said
    assert said.count("<dt>Drafter</dt><dd>–</dd>") == 2
    made = {"num_draft_tokens": 3, "num_drafts": 1, "drafted_by": {"ngram": 3}}
    drafted = replace(lucky, stats=replace(lucky.stats, **made))
    for runs in ((drafted,), (drafted, lucky)):  # the last of them may not have drafted
        both = (plain,) * len(runs), runs
        lanes = tuple(replace(lane, runs=its) for lane, its in zip(lanes, both, strict=True))
        said = race_html(RaceView(True, *lanes, phase="done"))
        assert "<dd>word lookup</dd>" in said
    assert "The reply came 2.0x faster than without drafting." in said
    assert "<dt>Clock</dt><dd>1.00 s</dd>" in said


def test_the_figures_of_a_lane_are_of_all_its_runs() -> None:
    """Auto may draft in one run and not in another."""
    made = [TurnStats(9, num_output_tokens=8, num_steps=num, decode_ms=900.0) for num in (3, 3, 8)]
    runs = tuple(Answer(0.0, 2.0, tokens=(1, 2), stats=stats) for stats in made)
    lane = Lane("speculative", runs[-1], runs=runs)
    said = race_html(RaceView(True, lane, lane, phase="done"))
    assert said.count("<dt>Checks</dt><dd>3 <small>3 to 8</small></dd>") == 2
    assert said.count("<dt>Clock</dt><dd>2.00 s</dd>") == 2, "no range where all are alike"


def test_stop_and_closing_the_page_end_the_race(site: Site, visit: Open) -> None:
    opened = visit()
    opened.open()
    one = to_tab(opened)
    one.fill("#ls-race-prompt textarea", "slow please")
    one.click("#ls-race-start")
    one.wait_for_selector(".ls-lane[data-phase=writing]")
    one.click("#ls-race-stop:not([disabled])")
    opened.wait_for("Stopped.", "#ls-race .ls-verdict")
    assert one.evaluate("document.activeElement.id") == "ls-race-start"
    one.click("#ls-race-start")
    one.wait_for_selector(".ls-lane[data-phase=writing]")
    one.close()
    until(lambda: site.service.worker.task is None)


def test_a_wrong_number_of_tokens_is_said_and_nothing_runs(page: Visit, site: Site) -> None:
    from localspec.web.proof.race_tab import Runs

    one, before = to_tab(page), len(site.backend.requests)
    one.get_by_label("Max tokens").last.fill("")
    one.click("#ls-race-start")
    page.wait_for("Max tokens is 0, but must lie", "#ls-race")
    one.wait_for_selector("#ls-race-stop[disabled]")
    assert len(site.backend.requests) == before
    one.get_by_label("Max tokens").last.fill("128")
    with pytest.raises(RequestError, match="Max tokens is 99,999, but must lie"):
        Runs(site.service).race("hi", 0.0, 99_999, "auto")


def test_a_race_loads_a_model_that_was_let_go_or_says_why_there_is_none(
    page: Visit, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = site.service.lifecycle
    works = lifecycle.opener

    def refuse(report: Any) -> Any:
        raise ConfigError("There is no such model.")

    one = to_tab(page)
    for opener, said in ((refuse, "There is no such model."), (works, "Identical")):
        monkeypatch.setattr(lifecycle, "opener", opener)
        site.service.unload()
        until(lambda: site.service.status().phase == "unloaded")
        one.click("#ls-race-start")
        page.wait_for(said, "#ls-race")


@pytest.mark.parametrize(
    ("script", "is_stopped", "said"),
    [
        (Script(fault=ValueError("odd"), fail_at_round=2), False, "an unexpected fault"),
        (Script(fault=LocalspecError("The GPU is gone."), fail_at_round=2), False, "GPU is gone"),
        (Script(), True, "Stopped."),
    ],
)
def test_however_a_race_ends_the_tab_says_so(
    tmp_path: Path, script: Script, is_stopped: bool, said: str
) -> None:
    service, _ = open_service(tmp_path, script)
    runs = Runs(service)
    before = service.enqueue("before it", lambda backend, cancel: cancel.wait(WAIT_S) and None)

    async def last_shown() -> str:
        seen = list[str]()
        async for shown in runs.follow("page", runs.race("hi", 0.0, 8, "auto")):
            seen.append(shown)
            if is_stopped:  # while it waits
                runs.stop("page")
            before.cancel.set()
        return seen[-1]

    shown = asyncio.run(last_shown())
    close(service)
    assert said in shown and "Running" not in shown and "Waiting" not in shown


@pytest.mark.slow
def test_who_begins_alternates(site: Site) -> None:
    until(lambda: site.service.status().phase == "ready")
    runs, first = Runs(site.service), []
    for _ in range(4):
        asked = len(site.backend.requests)
        runs.race("hi", 0.0, 8, "auto").run(site.backend, threading.Event())
        first.append(site.backend.requests[asked + 1].drafter)
    assert first == ["off", "auto", "off", "auto"]


def test_a_server_is_not_raced_and_the_tab_says_so_before_the_click(
    page: Visit, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = site.backend.describe()
    server = Server("vLLM", "http://127.0.0.1:1", (told.target,))
    status = replace(site.service.status(), description=replace(told, server=server))
    monkeypatch.setattr(site.service, "status", lambda *_: status)
    one = to_tab(page)
    page.wait_for("A server answers", "#ls-race-note")
    assert one.locator("#ls-race-start").is_disabled()
    monkeypatch.undo()
    one.get_by_role("tab", name="Chat", exact=True).first.click()
    to_tab(page)
    one.wait_for_selector("#ls-race-start:not([disabled])")
