"""The page in a real browser, on the fake backend: what a person sees is what the log holds."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path

import pytest

from tests.fakes import REPLY
from tests.record.samples import siblings
from tests.web.conftest import WAIT_MS, Open, Site, Visit, until

pytestmark = pytest.mark.slow

DONE = "() => document.querySelector('#ls-strip').dataset.phase === 'ready'"


def ask(visit: Visit, text: str, answer: str = "only sooner.") -> None:
    """Send and wait until the reply is complete, with its line of figures."""
    num_before = visit.page.locator("#ls-chat .ls-footer").count()
    visit.send(text)
    visit.page.wait_for_function(
        "n => document.querySelectorAll('#ls-chat .ls-footer').length > n",
        arg=num_before,
        timeout=WAIT_MS,
    )
    visit.wait_for(answer)


def choose(visit: Visit, title: str) -> None:
    visit.page.locator("#ls-history .ls-open", has_text=title).first.click()


def open_settings(visit: Visit) -> None:
    visit.page.get_by_role("button", name="Open settings").click()
    visit.page.get_by_role("button", name="Close settings").wait_for()


def newest(site: Site) -> dict[str, object]:
    assert site.service.flush()
    return site.store.turn_rows()[-1]


def test_a_message_is_answered_and_the_strip_moves(visit: Open, site: Site) -> None:
    page = visit()
    page.open()
    assert page.page.url.startswith(site.origin) and "token" not in page.page.url
    focused = page.page.evaluate("document.activeElement.tagName")
    assert focused == "TEXTAREA"
    page.new_chat()
    page.page.evaluate(
        """() => {
          window.seen = {phase: new Set(), speed: new Set(), clock: new Set()};
          const look = () => {
            for (const name of Object.keys(seen))
              seen[name].add(document.getElementById(`ls-${name}`).textContent);
            requestAnimationFrame(look);
          };
          look();
        }"""
    )
    page.send("a slow one, please")
    page.wait_for("only sooner.")
    is_noted = "() => [...seen.phase].some((one) => one.startsWith('Done'))"
    page.page.wait_for_function(is_noted, timeout=WAIT_MS)
    seen = page.page.evaluate(
        "() => Object.fromEntries(Object.entries(seen).map(([k, v]) => [k, [...v]]))"
    )
    assert "Writing" in seen["phase"]
    assert len(seen["speed"]) >= 3 and len(seen["clock"]) >= 5
    assert page.text("#ls-reason").startswith("Speculation: on, by draft_model")


def test_the_numbers_shown_are_those_of_the_log_and_the_export(
    visit: Open, site: Site, tmp_path: Path
) -> None:
    page = visit()
    page.open()
    page.new_chat()
    ask(page, "What is speculative decoding?")
    page.page.wait_for_function(DONE, timeout=WAIT_MS)
    row = newest(site)
    speed, speedup, rate = (
        row["tokens_per_second"],
        row["speedup"],
        row["acceptance_rate"],
    )
    assert isinstance(speed, float) and isinstance(speedup, float) and isinstance(rate, float)
    assert rate == pytest.approx(row["num_accepted_tokens"] / row["num_draft_tokens"])  # type: ignore[operator]
    assert page.text("#ls-speed") == f"{speed:.1f}"
    assert page.text("#ls-speedup") == f"{speedup:.2f} ×"
    assert page.text("#ls-acceptance") == f"{100 * rate:.0f} %"
    assert page.text("#ls-drafter") == row["drafter"]
    footer = page.page.locator("#ls-chat .ls-footer").last.inner_text()
    assert f"{speed:.1f} tok/s" in footer and f"{row['num_output_tokens']} tokens" in footer

    page.page.get_by_role("tab", name="Stats").click()
    page.page.get_by_text("This conversation").click()
    page.wait_for(f"{speed:.1f}", "#ls-turns")
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
    line = list(csv.DictReader(io.StringIO(text)))[-1]
    for name in ("tokens_per_second", "acceptance_rate", "speedup", "num_output_tokens"):
        assert float(line[name]) == pytest.approx(row[name])
    assert any("tokens_per_second" in one for one in exported["JSONL"].read_text().splitlines())
    assert REPLY.splitlines()[-1] in exported["Markdown"].read_text(encoding="utf-8")
    with sqlite3.connect(exported["Database"]) as database:
        stored = database.execute("SELECT max(tokens_per_second) FROM turn").fetchone()[0]
    database.close()
    assert stored == pytest.approx(speed)


def test_stop_freezes_the_reply_and_the_next_turn_works(visit: Open, site: Site) -> None:
    page = visit()
    page.open()
    page.new_chat()
    page.send("a slow one to stop")
    page.wait_for("Speculative decoding lets")
    page.page.click("#ls-stop")
    page.wait_for("stopped ·", "#ls-chat")
    num_rounds = site.backend.num_rounds
    row = newest(site)
    assert row["state"] == "stopped" and row["finish_reason"] == "cancelled"
    page.page.wait_for_timeout(300)
    assert site.backend.num_rounds == num_rounds
    ask(page, "and now?")
    assert newest(site)["state"] == "complete"


def test_a_reload_shows_the_conversation_and_the_address_names_it(visit: Open, site: Site) -> None:
    page = visit()
    page.open()
    page.new_chat()
    ask(page, "Remember this sentence.")
    page.page.wait_for_url("**/?c=*")
    page.page.reload()
    page.wait_for("Remember this sentence.")
    page.wait_for("only sooner.")
    assert page.page.locator("#ls-chat [data-testid=user]").count() == 1
    other = visit()
    other.open()
    other.wait_for("Remember this sentence.")


def test_closing_the_page_stops_the_reply_and_keeps_it(visit: Open, site: Site) -> None:
    page = visit()
    page.open()
    page.new_chat()
    page.send("a slow one to leave")
    page.wait_for("Speculative decoding lets")
    page.page.close()
    until(lambda: site.service.current is None, wait_s=5.0)
    row = newest(site)
    assert row["state"] == "stopped"
    again = visit()
    again.open()
    again.wait_for("Speculative decoding lets")
    again.wait_for("stopped")


def test_another_conversation_can_be_read_while_a_reply_is_written(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    ask(page, "echo first conversation", "echo first conversation")
    page.new_chat()
    page.send("slow: second conversation")
    page.wait_for("Speculative decoding lets")
    choose(page, "echo first conversation")
    page.page.wait_for_function(
        "() => !document.querySelector('#ls-chat').innerText.includes('Speculative')",
        timeout=WAIT_MS,
    )
    assert site.service.current is not None
    page.page.wait_for_timeout(400)
    assert "Speculative" not in page.text("#ls-chat")
    choose(page, "slow: second conversation")
    page.wait_for("tok/s", "#ls-chat")
    until(lambda: newest(site)["state"] == "complete")  # the log is written by its own thread


def test_regenerate_answers_the_same_message_again(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    ask(page, "Again, please.")
    num_rows = len(site.store.turn_rows())
    page.page.click("#ls-regenerate")
    until(lambda: len(site.store.turn_rows()) == num_rows + 1)
    page.page.wait_for_function(DONE, timeout=WAIT_MS)
    page.wait_for("tok/s", "#ls-chat")
    assert page.page.locator("#ls-chat [data-testid=user]").count() == 1
    assert len(siblings(site.store, int(str(newest(site)["message_id"])))) == 2


def test_a_lenient_reply_wears_its_badge_and_an_exact_one_does_not(
    visit: Open, site: Site, tmp_path: Path
) -> None:
    page = visit()
    page.open("&c=new")
    open_settings(page)
    said = page.text("#ls-checking")
    assert "gives up that the text is what the model alone would write" in said
    assert page.page.get_by_role("radio", name="as set").is_checked()
    ask(page, "Write a function that adds.")
    assert (newest(site)["workload"], newest(site)["exact"]) == ("code", True)
    assert page.page.locator("#ls-chat .ls-lenient").count() == 0
    assert "kind: code" in page.page.locator("#ls-chat .ls-footer").last.inner_text()

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
    page.page.screenshot(path=tmp_path / "badge.png")

    page.page.get_by_role("radio", name="exact", exact=True).check()
    ask(page, "Exactly, please.")
    assert newest(site)["exact"] is True
    assert page.page.locator("#ls-chat .ls-lenient").count() == 1

    page.page.get_by_role("tab", name="Stats").click()
    page.page.get_by_text("This conversation").click()
    page.wait_for(f"1 turn was lenient: {counted} tokens", "#ls-summary")
    page.wait_for(badge, "#ls-turns")


def test_a_hostile_reply_runs_nothing_and_asks_nobody(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    ask(page, "xss", "the end")
    page.page.wait_for_timeout(500)
    assert page.page.evaluate("window.__pwned") is None
    shown = page.text("#ls-chat")
    assert "<script>window.__pwned = 1</script>" in shown  # the source stays readable
    assert "<b>kept as code</b>" in shown
    assert page.page.locator("#ls-chat .message img, #ls-chat iframe").count() == 0
    hrefs = page.page.eval_on_selector_all("#ls-chat a", "links => links.map(a => a.href)")
    assert not any(href.startswith("javascript:") for href in hrefs)


def test_the_policy_itself_stops_a_script_that_got_into_the_page(visit: Open) -> None:
    page = visit()
    page.open("&c=new")
    page.page.evaluate(
        """() => {
          document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.__pwned=1">');
          const script = document.createElement('script');
          script.textContent = 'window.__pwned = 2';
          document.body.append(script);
        }"""
    )
    page.page.wait_for_timeout(300)
    assert page.page.evaluate("window.__pwned") is None
    assert any("Content Security Policy" in error for error in page.errors)
    page.errors.clear()
    page.outside.clear()


def test_difficult_text_is_shown_and_stored_as_it_is(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    text = "echo 👩‍👩‍👧 שלום عليكم <|im_end|> <b>x</b> &amp; 2 < 3"
    ask(page, text, "2 < 3")
    shown = page.page.locator("#ls-chat :is([data-testid=user], [data-testid=bot])")
    assert shown.all_inner_texts()[:2] == [text, text]
    message_id = int(str(newest(site)["message_id"]))
    assert [message.text for message in site.store.branch(message_id)] == [text, text]


def test_copying_a_message_gives_what_was_written(visit: Open, site: Site) -> None:
    page = visit()
    page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.open("&c=new")
    text = "echo a < b &amp; ![x](y) `c &lt; d`"
    ask(page, text, "echo a < b")
    for button in page.page.get_by_title("Copy message").all():
        button.click()
        assert page.page.evaluate("navigator.clipboard.readText()") == text


def test_an_empty_message_does_nothing(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    num_rows = len(site.store.turn_rows())
    page.send("   ")
    page.page.wait_for_timeout(400)
    assert len(site.store.turn_rows()) == num_rows
    assert page.page.locator("#ls-chat [data-testid=user]").count() == 0


def test_an_overflow_is_said_and_the_text_stays_in_the_box(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    text = "word " * 5000
    page.send(text)
    page.page.get_by_text("but the context holds 4,096").wait_for()
    page.page.get_by_role("button", name="Shorten the message").click()
    assert page.page.input_value("#ls-message textarea") == text
    page.page.fill("#ls-message textarea", "")
    ask(page, "short")


def test_drafters_are_listed_with_their_reasons_and_off_is_named(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    open_settings(page)
    page.wait_for("self_quant (not available): a 4-bit copy needs", "#ls-drafter-note")
    page.page.click("#ls-drafter-choice input")
    options = page.page.get_by_role("option").all_inner_texts()
    assert [option.replace("✓", "").strip().split(":")[0] for option in options] == [
        "auto",
        "off",
        "draft_model",
        "ngram",
    ]
    page.page.get_by_role("option", name="off: without drafting").click()
    ask(page, "plainly")
    assert newest(site)["drafter"] == "off"
    assert page.text("#ls-reason").startswith("Speculation: off, because")
    assert page.text("#ls-acceptance") == "–"


def test_the_drafted_tokens_of_a_reply_add_up_to_its_text(visit: Open, site: Site) -> None:
    page = visit()
    page.open("&c=new")
    page.page.get_by_label("Show drafted tokens").check()
    ask(page, "show me")
    row = newest(site)
    page.wait_for(f"{row['num_steps']} checks", "#ls-rounds-sum")
    assert page.page.inner_text("#ls-rounds-text") == REPLY
    titles = page.page.eval_on_selector_all("#ls-rounds-text .ls-round", "s => s.map(x => x.title)")
    guessed = sum(int(t.split(": ")[1].split(" ")[0]) for t in titles if "guessed" in t)
    assert guessed == row["num_accepted_tokens"]


def test_a_fault_is_shown_with_its_remedy_and_the_next_turn_works(visit: Open, site: Site) -> None:
    from localspec.errors import MemoryShortage

    page = visit()
    page.open("&c=new")
    script = site.backend.script
    script.fault = MemoryShortage("The cache needs 1 GiB more. Shorten the context.")
    script.fail_at_round = site.backend.num_rounds + 3
    page.send("this will fail")
    page.wait_for("Shorten the context.", "#ls-chat .ls-error")
    assert newest(site)["state"] == "error"
    ask(page, "and this works")


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_nothing_overflows(visit: Open, width: int, scheme: str) -> None:
    page = visit()
    page.page.set_viewport_size({"width": width, "height": 740})
    page.page.emulate_media(color_scheme=scheme)
    page.open()
    for tab in ("Stats", "Chat"):
        page.page.wait_for_timeout(300)
        page.page.get_by_role("tab", name=tab).click()
        widths = page.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1]
    assert page.page.evaluate("document.body.classList.contains('dark')") is (scheme == "dark")


def test_the_live_answer_is_plain_json(visit: Open, site: Site) -> None:
    page = visit()
    page.open()
    body = page.page.evaluate("async () => (await fetch('/live')).text()")
    assert set(json.loads(body)) >= {"phase", "label", "clock", "speed", "reason", "notices"}
