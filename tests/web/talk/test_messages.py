"""Messages as Markdown with notes: what is a formula, what is a link of ours, what stays text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from localspec.chat.attachments import Attachment, with_attachments
from localspec.chat.service import ShownMessage
from localspec.chat.turn import TurnView
from localspec.core.turn_stats import TurnStats
from localspec.web.talk.messages import (
    MAX_SHOWN_CHARACTERS,
    chat_messages,
    file_size,
    growing,
    parted,
)
from localspec.web.talk.plain_markdown import MARK
from localspec.web.words import time_of_day

WRITTEN = "2026-01-02T03:04:05+00:00"
ROW: dict[str, Any] = {
    "tokens_per_second": 62.0,
    "speedup": 2.1,
    "drafted_by": '{"draft_model": 10}',
    "num_draft_tokens": 10,
    "acceptance_rate": 0.7,
    "mean_num_draft_tokens": 5.0,
    "drafter": "draft_model",
    "num_output_tokens": 12,
    "ttft_ms": 40.0,
    "workload": "chat",
    "exact": True,
    "num_lenient_tokens": 0,
    "draft_share": 0.5,
    "error": None,
    "finish_reason": "eos",
    "continues_message_id": None,
    "reply_ms": 233.6,
    "no_speedup": None,
}

ALWAYS = ("fork", "remove")


def person(text: str, message_id: int | None = 1, siblings: tuple[int, ...] = (1,)) -> ShownMessage:
    return ShownMessage("user", text, "complete", message_id, siblings=siblings)


def reply(state: str = "complete", text: str = "hello") -> ShownMessage:
    return ShownMessage("assistant", text, state, 2, siblings=(2,), created_at_utc=WRITTEN)


def notes(message: ShownMessage, row: dict[str, Any] | None = None, running: bool = False) -> str:
    shown = chat_messages([message], {} if row is None else {message.message_id: row}, running)
    parts = shown[-1]["content"]
    return str(parts[-1]["text"]) if len(parts) > 1 or not message.text else ""


def actions(said: str) -> list[str]:
    """The names of the actions of a row, in order."""
    return re.findall(r'href="#(\w+)"', said.partition("ls-acts")[2])


def test_a_reply_shows_its_figures_its_details_and_what_can_be_done() -> None:
    said = notes(reply(), ROW)
    clock = time_of_day(WRITTEN)
    assert said.startswith(
        '<p class="ls-footer"><span>12 tokens in 234 ms · writing at 62 tok/s · '
        "2.1x faster than without drafting · "
        f"{clock} · "
    )
    details = '<a class="ls-do ls-tokens ls-m-2" href="#tokens" title="details">details</a>'
    assert f"{details}</span>" in said
    assert actions(said) == ["copy", "again", "several", "edit", *ALWAYS]
    for state, reason in (("stopped", "cancelled"), ("interrupted", None), ("complete", "length")):
        cut = notes(reply(state), {**ROW, "finish_reason": reason})
        assert actions(cut) == ["copy", "again", "several", "edit", "continue", *ALWAYS]
    between = actions(notes(reply("stopped"), ROW, running=True))
    assert between == ["copy", "again", "several", "edit", *ALWAYS], "it is not the last"
    assert actions(notes(reply("stopped", text=""), ROW)) == ["again", "several", *ALWAYS]


def test_every_reply_names_its_model() -> None:
    assert " · other-1b</span>" in notes(replace(reply(), model="someone/other-1b"))
    assert " · </span>" not in notes(reply()), "of an older log none is known"


def test_arrows_lead_to_the_versions_before_and_after() -> None:
    said = notes(person("b", 5, (3, 5, 9)))
    assert "ls-show ls-m-3" in said and "ls-show ls-m-9" in said and ">2/3<" in said
    first = notes(person("a", 3, (3, 5)))
    assert "ls-show ls-m-5" in first and "ls-m-3" not in first.partition("ls-acts")[0]
    assert "ls-show" not in notes(person("only"))


def test_a_message_has_its_row_also_while_a_reply_is_written() -> None:
    """A row that came and went would move the conversation."""
    assert actions(notes(person("x"))) == ["copy", "again", "several", "edit", *ALWAYS]
    assert actions(notes(person("x"), running=True)) == ["copy", "edit", *ALWAYS]
    assert notes(person("x", None, ())) == "", "not stored yet"


def test_an_error_is_shown_as_text() -> None:
    message = ShownMessage("assistant", "", "error", 2, "<img src=x> failed. Try again.")
    assert "&lt;img src=x&gt; failed." in notes(message)


def test_attached_files_are_chips_and_come_back_whole() -> None:
    files = [Attachment("a.py", "x = '```'\n"), Attachment("<b>.md", "# ü")]
    text = with_attachments("look at this", files)
    assert parted(text) == ("look at this", [("a.py", "x = '```'"), ("<b>.md", "# ü")])
    shown = chat_messages([person(text)], {}, False)[0]["content"]
    assert shown[0]["text"] == "look at this"
    assert "a.py, 9 bytes" in shown[1]["text"] and "&lt;b&gt;.md" in shown[1]["text"]


def test_half_a_character_never_reaches_the_page() -> None:
    """No answer of Gradio's can carry it, so one such message kept the whole chat shut."""
    file = with_attachments("a", [Attachment("x.txt", "y")]).replace("x.txt", "x\ud83d.txt")
    said = replace(person("cut \ud83d"), error=None), person(file), reply("error", "b\udc00")
    shown = chat_messages([replace(one, error="c\ud83d") for one in said], {}, False)
    assert "cut \ufffd" in json.dumps(shown, ensure_ascii=False)
    json.dumps(shown, ensure_ascii=False).encode("utf-8")


def test_a_file_has_one_size_everywhere() -> None:
    sizes = {1: "1 byte", 999: "999 bytes", 1000: "1 kB", 999_000: "999 kB", 1_200_000: "1.2 MB"}
    assert {size: file_size(size) for size in sizes} == sizes


def test_a_very_long_message_is_shown_by_its_beginning_and_says_so() -> None:
    text = "word " * 60_000
    shown = chat_messages([person(text)], {}, False)[0]["content"]
    assert len(shown[0]["text"]) < 3000 < MAX_SHOWN_CHARACTERS
    assert "the first 2,000 of 300,000 characters; all were sent" in shown[1]["text"]
    assert "ls-all ls-m-1" in shown[1]["text"]


def test_an_interrupted_reply_says_what_ended_it() -> None:
    row = {**ROW, "error": "The engine <ended>. What was written is kept.", "finish_reason": None}
    assert "The engine &lt;ended>." in notes(reply("interrupted"), row).replace("&gt;", ">")
    assert "ls-error" not in notes(reply("interrupted"), ROW)
    assert "ls-error" not in notes(reply("stopped"), row)


def test_what_was_thought_is_folded_above_its_reply() -> None:
    thinking = replace(reply(), thinking="Is <b>it</b> 3?")
    row = {**ROW, "num_thinking_tokens": 340, "thinking_ms": 12_400.0}
    thought, answer = chat_messages([thinking], {2: row}, False)
    fold = thought["metadata"]
    assert fold["title"].strip(MARK) == "Thought for 12.4 s · 340 tokens"
    assert fold["status"] == "done", "which Gradio shows folded"
    assert thought["content"][0]["text"].replace(MARK, "") == "Is <b>it</b> 3?"
    assert answer["content"][0]["text"] == "hello"
    assert "Copy without the thinking" in str(answer["content"][1]["text"])
    (imported, _) = chat_messages([thinking], {}, False)
    assert imported["metadata"]["title"].strip(MARK) == "Thought"


def test_a_reply_that_ended_within_its_thought_says_so_and_how_to_go_on() -> None:
    thought = replace(reply(text=""), thinking="Is it 3?")
    row = {**ROW, "num_thinking_tokens": 34, "thinking_ms": 12_400.0}
    cut, stopped = {**row, "finish_reason": "length"}, replace(thought, state="stopped")
    for said in (notes(thought, cut), notes(stopped, row)):
        assert "still thinking, so there is no answer. “Continue” lets it think on" in said
        assert actions(said) == ["again", "several", "continue", *ALWAYS]
    said = notes(thought, cut, running=True)
    assert "so there is no answer." in said and "“Continue”" not in said
    assert "no answer" not in notes(replace(thought, text="3"), cut)


def test_a_thought_that_is_being_written_says_so() -> None:
    view = TurnView("decode", 0.0, "chat", thinking="Hm")
    (thought,) = growing(view)
    assert thought["metadata"]["title"].strip(MARK) == "Thinking…"
    stats = TurnStats(9, num_thinking_tokens=1, thinking_ms=640.0)
    thought, answer = growing(replace(view, text="Yes", stats=stats))
    assert thought["metadata"]["title"].strip(MARK) == "Thought for 640 ms · 1 token"
    assert answer["content"][0]["text"] == "Yes"
