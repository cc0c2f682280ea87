"""The page in a real browser, on the fake backend: what a person sees is what the log holds."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path

import pytest

from tests.fakes import REPLY
from tests.web.checks import ask, newest
from tests.web.conftest import WAIT_MS, Site, Visit, until

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
    page.page.get_by_text("This conversation").click()
    page.wait_for(f"{row['tokens_per_second']:.1f}", "#ls-turns")
    exported = {}
    for name in ("CSV", "JSONL", "Markdown", "Database"):
        link = page.page.get_by_role("link", name=name)
        page.page.wait_for_function(
            "link => link.href.includes('conversation=')", arg=link.element_handle()
        )
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
    said = page.text("#ls-checking")
    assert "gives up that the text is what the model alone would write" in said
    assert page.page.get_by_role("radio", name="as set").is_checked()
    ask(page, "Write a function that adds.")
    assert (newest(site)["workload"], newest(site)["exact"]) == ("code", True)
    assert page.page.locator("#ls-chat .ls-lenient").count() == 0
    assert "ms · code · " in page.page.locator("#ls-chat .ls-footer").last.inner_text()

    page.page.get_by_role("radio", name="lenient", exact=True).check()
    page.page.click("#ls-workload input")
    page.page.get_by_role("option", name="Story").click()
    ask(page, "And once more.")
    row = newest(site)
    assert (row["workload"], row["exact"]) == ("story", False)
    assert json.loads(str(row["leniency"]))["threshold"] == 0.5
    counted = f"{row['num_lenient_tokens']} of {row['num_output_tokens']}"
    badge = f"lenient: {counted} tokens would have been refused"
    assert row["num_lenient_tokens"] != 0
    assert page.page.locator("#ls-chat .ls-lenient").all_inner_texts() == [badge]
    page.wait_for(f"Not exact, as you chose: {badge}. Kind of text: story.", "#ls-reason")
    page.page.get_by_role("radio", name="exact", exact=True).check()
    ask(page, "Exactly, please.")
    assert newest(site)["exact"] is True
    assert page.page.locator("#ls-chat .ls-lenient").count() == 1

    page.page.get_by_role("tab", name="Stats").click()
    page.page.get_by_text("This conversation").click()
    page.wait_for(f"1 turn was lenient: {counted} tokens", "#ls-summary")
    page.wait_for(badge, "#ls-turns")


def test_drafters_are_listed_with_their_reasons_and_off_is_named(
    own_page: Visit, site: Site
) -> None:
    page = own_page
    page.page.get_by_role("tab", name="Chat", exact=True).first.click()
    page.new_chat()
    open_settings(page)
    page.wait_for("The quantised copy (not available): a 4-bit copy needs", "#ls-drafter-note")
    page.page.click("#ls-drafter-choice input")
    options = page.page.get_by_role("option").all_inner_texts()
    assert [option.replace("✓", "").strip().split(":")[0] for option in options] == [
        "auto",
        "off",
        "the draft model",
        "n-gram lookup",
    ]
    page.page.get_by_role("option", name="off: without drafting").click()
    ask(page, "plainly")
    assert newest(site)["drafter"] == "off"
    assert page.text("#ls-reason").startswith("Speculation: off, because")
    assert page.text("#ls-acceptance") == "–"


def test_the_drafted_tokens_of_a_reply_add_up_to_its_text(page: Visit, site: Site) -> None:
    page.page.get_by_label("Show drafted tokens").check()
    ask(page, "show me")
    row = newest(site)
    page.wait_for(f"{row['num_steps']} checks", "#ls-rounds-sum")
    assert page.page.inner_text("#ls-rounds-text") == REPLY
    titles = page.page.eval_on_selector_all("#ls-rounds-text .ls-round", "s => s.map(x => x.title)")
    guessed = sum(int(t.split(": ")[1].split(" ")[0]) for t in titles if "guessed" in t)
    assert guessed == row["num_accepted_tokens"]


def test_a_fault_is_shown_with_its_remedy_and_the_next_turn_works(page: Visit, site: Site) -> None:
    from localspec.errors import MemoryShortage

    script = site.backend.script
    script.fault = MemoryShortage("The cache needs 1 GiB more. Shorten the context.")
    script.fail_at_round = site.backend.num_rounds + 3
    page.send("this will fail")
    page.wait_for("Shorten the context.", "#ls-chat .ls-error")
    assert newest(site)["state"] == "error"
    ask(page, "and this works")


def test_the_live_answer_is_plain_json(page: Visit, site: Site) -> None:
    body = page.page.evaluate("async () => (await fetch('/live')).text()")
    assert set(json.loads(body)) >= {"phase", "label", "clock", "speed", "reason", "notices"}


def test_the_strip_shows_off_with_its_remedy_and_a_sparkline(own_page: Visit) -> None:
    """The last of this page: afterwards it is answered by the test alone."""
    one = own_page
    one.send("steady: hello there")
    one.page.wait_for_selector("#ls-spark:not([hidden])")
    points = one.page.get_attribute("#ls-spark-line", "points").split()
    assert len(points) >= 2 and "tok/s" in one.text("#ls-spark-label")
    one.page.evaluate(
        "() => { window.fetch = async () => new Response(JSON.stringify({phase: 'ready', "
        "label: 'R', clock: '', waiting: 0, notices: [], reason: 'Speculation: off', off:"
        "{code: 'does_not_pay', remedy: 'Wait <b>a</b> bit.'}, hardware: 'Found it'})) }"
    )
    one.page.wait_for_selector("#ls-off:not([hidden])")
    assert one.text("#ls-off-remedy") == "Wait <b>a</b> bit."
    assert one.text("#ls-hardware") == "Found it"
