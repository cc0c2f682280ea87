"""The page in a real browser, on the fake backend: what a person sees is what the log holds."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path

import pytest

from localspec.core.workloads import AS_SET
from tests.kit.fakes import REPLY
from tests.kit.waiting import until
from tests.web.browser.checks import ask, newest, unfold_turns
from tests.web.browser.visits import WAIT_MS, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow


def choose(visit: Visit, title: str) -> None:
    visit.page.locator("#ls-history .ls-open", has_text=title).first.click()


def open_settings(visit: Visit) -> None:
    if not visit.page.locator("#ls-settings.open").count():
        visit.page.get_by_role("button", name="Open settings").click()
    visit.page.get_by_role("button", name="Close settings").wait_for()


def test_every_format_of_the_log_is_downloaded_from_the_stats_tab(
    page: Visit, site: Site, tmp_path: Path
) -> None:
    ask(page, "What is speculative decoding?")
    row = newest(site)
    page.page.get_by_role("tab", name="Stats").click()
    page.page.get_by_label("This conversation").click()
    unfold_turns(page)
    page.wait_for(f"{row['tokens_per_second']:.1f}", "#ls-turns")
    exported = {}
    for name in ("CSV", "JSONL", "Markdown", "Database"):
        link = page.page.locator("#ls-exports a[href*='conversation=']", has_text=name)
        with page.page.expect_download() as download:
            link.click()
        exported[name] = tmp_path / name
        download.value.save_as(exported[name])
        assert download.value.suggested_filename.startswith("localspec-conversation-")
    text = exported["CSV"].read_text(encoding="utf-8-sig")
    (line,) = csv.DictReader(io.StringIO(text))
    assert float(line["tokens_per_second"]) == pytest.approx(row["tokens_per_second"])
    assert any("tokens_per_second" in one for one in exported["JSONL"].read_text().splitlines())
    assert REPLY.splitlines()[-1] in exported["Markdown"].read_text(encoding="utf-8")
    with sqlite3.connect(exported["Database"]) as database:
        stored = database.execute("SELECT max(tokens_per_second) FROM turn").fetchone()[0]
    database.close()
    assert stored == pytest.approx(row["tokens_per_second"])


def test_another_conversation_can_be_read_while_a_reply_is_written(page: Visit, site: Site) -> None:
    ask(page, "echo first conversation", "echo first conversation")
    page.new_chat()
    page.send("slow: second conversation")
    page.wait_for("Speculative decoding lets")
    choose(page, "echo first conversation")
    site.backend.script.round_s = 2.0  # it cannot end meanwhile
    page.page.wait_for_function(
        "() => !document.querySelector('#ls-chat').innerText.includes('Speculative')",
        timeout=WAIT_MS,
    )
    page.page.wait_for_timeout(400)  # a text sent late would be here by then
    assert site.service.current is not None
    assert "Speculative" not in page.text("#ls-chat")
    site.backend.script.round_s = 0.01
    choose(page, "slow: second conversation")
    page.wait_for("tok/s", "#ls-chat")
    until(lambda: newest(site)["state"] == "complete")  # the log is written by its own thread


def test_a_lenient_reply_wears_its_badge_and_an_exact_one_does_not(
    own_page: Visit, site: Site
) -> None:
    page = own_page
    open_settings(page)
    page.page.click("#ls-advanced summary")
    said = page.page.text_content("#ls-help-of-checking")
    assert "every word is what the model alone would write" in said
    assert "; \\n means a line break" in page.page.text_content("#ls-help-of-stop")
    assert page.page.input_value("#ls-set-checking") == AS_SET
    ask(page, "Write a function that adds.")
    assert (newest(site)["workload"], newest(site)["exact"]) == ("code", True)
    assert page.page.locator("#ls-chat .ls-lenient").count() == 0

    page.page.select_option("#ls-set-checking", "lenient")
    page.page.select_option("#ls-set-workload", "story")
    ask(page, "And once more.")
    row = newest(site)
    assert (row["workload"], row["exact"]) == ("story", False)
    assert json.loads(str(row["leniency"]))["threshold"] == 0.5
    counted = f"{row['num_lenient_tokens']} of {row['num_output_tokens']}"
    badge = f"lenient: {counted} tokens would have been refused"
    assert row["num_lenient_tokens"] != 0
    assert page.page.locator("#ls-chat .ls-lenient").all_inner_texts() == [badge]
    page.wait_for(f"Not exact, as you chose: {badge}.", "#ls-reason")
    page.page.select_option("#ls-set-checking", label="exact")
    ask(page, "Exactly, please.")
    assert newest(site)["exact"] is True
    assert page.page.locator("#ls-chat .ls-lenient").count() == 1

    page.page.get_by_role("tab", name="Stats").click()
    page.page.get_by_label("This conversation").click()
    page.wait_for(f"1 turn was lenient: {counted} tokens", "#ls-summary")
    unfold_turns(page)
    page.wait_for(badge, "#ls-turns")


def test_off_is_named_and_shows_no_guesses(own_page: Visit, site: Site) -> None:
    page = own_page
    page.page.get_by_role("tab", name="Chat", exact=True).first.click()
    page.new_chat()
    open_settings(page)
    page.page.click("#ls-speed-choice summary")
    page.page.locator("#ls-speed-choice .ls-way", has_text="Off").click()
    ask(page, "plainly")
    assert newest(site)["drafter"] == "off"
    page.wait_for("without drafting", "#ls-gain")
    assert page.text("#ls-reason") == "You switched drafting off."
    assert page.text("#ls-guesses") == ""


def test_a_fault_is_shown_with_its_remedy_and_the_next_turn_works(page: Visit, site: Site) -> None:
    from localspec.core.errors import MemoryShortage

    script = site.backend.script
    script.fault = MemoryShortage("The cache needs 1 GiB more. Shorten the context.")
    script.fail_at_round = site.backend.num_rounds + 3
    page.send("this will fail")
    page.wait_for("Shorten the context.", "#ls-chat .ls-error")
    assert newest(site)["state"] == "error"
    ask(page, "and this works")


def test_the_live_answer_is_plain_json(page: Visit, site: Site) -> None:
    body = page.page.evaluate("async () => (await fetch('/live')).text()")
    assert set(json.loads(body)) >= {"phase", "label", "speed", "reason", "facts", "notices"}
