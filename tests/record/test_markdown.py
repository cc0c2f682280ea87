"""The report shows the branch in use and cannot be broken by what was said in it."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from localspec.record.contents import Scope, reading
from localspec.record.markdown import markdown_lines
from localspec.record.store import Store, TurnSettings
from tests.kit.samples import (
    LENIENT_SETTINGS,
    LENIENT_STATS,
    SETTINGS,
    STATS,
    begin,
    finish,
    open_store,
)


def report(store: Store) -> list[str]:
    with reading(store, Scope()) as contents:
        return list(markdown_lines(contents))


def test_headings_and_tables_in_a_message_stay_inside_its_quote(tmp_path: Path) -> None:
    evil = "# Title\r## Statistics\n| a | b |\r\n\n<script>\0\ud800"
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store), evil)
        lines = report(store)
    start = lines.index("### Reply, turn 1")
    assert lines[start + 2 : start + 7] == [
        "> # Title",
        "> ## Statistics",
        "> | a | b |",
        ">",
        "> <script>\ufffd\ufffd",
    ]
    assert [line for line in lines if line.startswith("## ")] == [
        "## Conversation 1: hi",
        "## Figures of conversation 1",
        "## Session 1: machine and versions",
    ]
    tables = [number for number, line in enumerate(lines) if line.startswith("| ")]
    last_message = max(n for n, line in enumerate(lines) if line.startswith("> "))
    assert min(tables) > last_message, "a person reads the conversation first"


def test_table_cells_hold_pipes_and_line_ends(tmp_path: Path) -> None:
    strange = replace(SETTINGS, system_prompt="one | two\nthree \\|", model=None)
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store, "a\n# b", strange))
        lines = report(store)
    assert "## Conversation 1: a # b" in lines
    (row,) = [line for line in lines if line.startswith("| 1 | 1 |")]
    assert "| one \\| two three \\\\\\| |" in row
    assert row.startswith("| 1 | 1 | \N{EN DASH} | demo-draft |")


def front_matter(lines: list[str]) -> dict[str, object]:
    """The YAML at the top, whose every value here is JSON too."""
    assert lines[0] == "---"
    body = lines[1 : lines.index("---", 1)]
    return {name: json.loads(value) for name, _, value in (line.partition(": ") for line in body)}


def test_one_conversation_begins_with_its_settings(tmp_path: Path) -> None:
    evil = 'a: "b"\n---\n# c\u2028\x85 \U0001f600'
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store, "hi", replace(SETTINGS, system_prompt=evil)))
        store.conversation_list.rename(1, "--- # title: [x]")
        found = front_matter(report(store))
        asked = store.add_message(1, 2, "user", "again")
        settings = replace(SETTINGS, temperature=0.0, seed=None)
        finish(store, store.begin_turn(1, 1, asked, settings))
        mixed = front_matter(report(store))
        finish(store, begin(store, "another"))
        assert report(store)[0] == "# localspec export"
    assert found["title"] == "--- # title: [x]" and found["system_prompt"] == evil
    assert (found["model"], found["draft"]) == ("demo-target", "demo-draft")
    assert (found["gamma"], found["gamma_fixed"]) == (3.5, None)
    assert (found["temperature"], found["seed"], found["max_tokens"]) == (0.7, 7, 64)
    assert (mixed["temperature"], mixed["seed"]) == ([0.7, 0.0], [7, None])


def test_settings_of_other_branches_stay_out_of_the_front(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store))
        finish(store, store.begin_turn(1, 1, 1, replace(SETTINGS, temperature=0.1)))
        assert front_matter(report(store))["temperature"] == 0.1
        store.message_tree.set_tip(1, 2)
        assert front_matter(report(store))["temperature"] == 0.7


def test_a_fork_names_the_model_and_settings_that_wrote_its_replies(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store))
        fork = store.message_tree.copy(1, "Fork of hi", until=2)
        with reading(store, Scope(conversation_id=fork)) as contents:
            found = front_matter(list(markdown_lines(contents)))
    assert (found["title"], found["model"], found["seed"]) == ("Fork of hi", "demo-target", 7)


def test_unknown_is_a_dash_and_zero_is_zero(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        begin(store, settings=TurnSettings(top_k=0, temperature=0.0))
        lines = report(store)
    settings = lines[lines.index("### Settings") + 4]
    statistics = lines[lines.index("### Statistics") + 4]
    assert settings.count("\N{EN DASH}") == 16
    assert settings.count(" 0 ") == 2
    assert set(statistics.strip("| ").split(" | ")) == {"1", "draft", "\N{EN DASH}"}


def test_how_a_reply_ended_is_said_in_the_words_of_the_page(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store), finish_reason="eos")
        finish(store, begin(store), finish_reason="length")
        lines = report(store)
    start = lines.index("### Statistics") + 2
    end = lines[start].split(" | ").index("how it ended")
    (first,) = [line for line in lines[start:] if line.startswith("| 1 |")]
    assert first.split(" | ")[end] == "done"
    ends = [line.split(" | ")[end] for line in lines if line.startswith("| 2 | complete |")]
    assert ends == ["done (max tokens)"]


def test_names_of_the_log_are_said_in_the_words_of_the_page(tmp_path: Path) -> None:
    asked = replace(SETTINGS, dtype="float32", drafter_requested="draft_tree", workload="rework")
    drafted = replace(STATS, drafted_by={"draft_tree": 7}, no_speedup="load_changed")
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store, "hi", asked), stats=drafted)
        finish(store, begin(store, "hi"), stats=replace(STATS, drafted_by={}))
        text = "\n".join(report(store))
        with reading(store, Scope(conversation_id=1)) as contents:
            (front,) = [line for line in markdown_lines(contents) if line.startswith("drafter:")]
    busy = "gain not measurable: the computer was busy"
    for words in ("fp32", "the small model's tree", "editing", busy):
        assert f"| {words} |" in text
    assert "| without drafting |" in text
    assert front == 'drafter: "the small model\'s tree"'
    for name in ("draft_tree", "float32", "rework", "load_changed", "| off |"):
        assert name not in text


def test_a_lenient_reply_says_so_where_it_stands(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        finish(store, begin(store, "asked", LENIENT_SETTINGS), stats=LENIENT_STATS)
        finish(store, begin(store, "asked exactly"))
        lines = report(store)
    assert "### Reply, turn 1 (lenient: 2 of 8 tokens would have been refused)" in lines
    assert "### Reply, turn 2" in lines
    assert any('"rule": "factor"' in line and "| code |" in line for line in lines)


def test_only_the_branch_in_use_is_told_and_the_others_counted(tmp_path: Path) -> None:
    with closing(open_store(tmp_path)) as store:
        turn = begin(store, "asked")
        finish(store, turn, "first answer")
        asked = store.branch(turn.message_id)[0].id
        finish(store, store.begin_turn(1, 1, asked, SETTINGS), "second answer", "cancelled")
        lines = report(store)
    assert "> second answer" in lines and "> first answer" not in lines
    assert "### Reply, turn 2, stopped" in lines
    assert any("other branches, not shown: 1." in line for line in lines)
