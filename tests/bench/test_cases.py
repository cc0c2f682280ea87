"""Prompt files: our own, and what is wrong with others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from localspec.bench.cases import OWN_PROMPTS, Case, load_prompts, repeated
from localspec.core.errors import ConfigError

GOOD = '{"id": "a", "task": "chat", "turns": ["Hello", "second turn"]}\n'


def test_our_own_are_eight_of_each_of_six_tasks() -> None:
    prompts = load_prompts(OWN_PROMPTS)
    tasks = ("chat", "code", "json", "summarise", "rewrite", "story")
    assert Counter(prompt.task for prompt in prompts) == dict.fromkeys(tasks, 8)
    assert len({prompt.text for prompt in prompts}) == 48


def test_the_tasks_that_copy_carry_their_passage() -> None:
    for prompt in load_prompts(OWN_PROMPTS):
        if prompt.task in ("summarise", "rewrite"):
            passage = prompt.text.partition("\n\n")[2]
            assert 60 <= len(passage.split()) <= 200, prompt.id


def test_any_first_prompts_of_our_own_are_balanced() -> None:
    assert len({prompt.task for prompt in load_prompts(OWN_PROMPTS, limit=6)}) == 6


def test_separators_inside_a_message_end_no_line(tmp_path: Path) -> None:
    file, text = tmp_path / "prompts.jsonl", "a\u2028b\u2029c\x85d"
    file.write_bytes(GOOD.replace("Hello", text).replace("\n", "\r\n").encode())
    assert [prompt.text for prompt in load_prompts(file)] == [text]


def test_the_first_turn_is_used_and_empty_lines_are_not_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n" + GOOD + "\n")
    assert [prompt.text for prompt in load_prompts(file)] == ["Hello"]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", '{"id": "b", "task": "chat"}', '{"id": "b", "task": "chat", "turns": []}',
     '{"id": "b", "task": "chat", "turns": [" "]}', '{"id": 3, "task": "chat", "turns": ["x"]}'],
)  # fmt: skip
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(GOOD + line + "\n")
    with pytest.raises(ConfigError, match="Line 2"):
        load_prompts(file)


def test_two_prompts_of_one_id_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(GOOD + GOOD)
    with pytest.raises(ConfigError, match="'a' twice"):
        load_prompts(file)


def test_an_empty_or_missing_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no prompts"):
        load_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(tmp_path / "absent.jsonl")


def test_repeats_have_names_and_seeds_of_their_own() -> None:
    cases = repeated([Case("a", "chat", (3, 9), 5, "chat"), Case("b", "qa", (3, 9), 7)], 2)
    assert [(c.id, c.seed) for c in cases] == [("a", 5), ("b", 7), ("a#1", 6), ("b#1", 8)]
    assert [c.workload for c in cases] == ["chat", "", "chat", ""]
