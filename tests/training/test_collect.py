"""The target's answers are its own, whatever shares the batch, and are asked for once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localspec.chat.template import ChatTemplate
from localspec.core.backend import Message
from localspec.core.errors import ConfigError, StoreError
from localspec.training.collect import AnswerLog, CollectPlan, collect
from localspec.training.prompt_files import TrainingPrompt, read_prompts, shipped_prompts
from localspec.training.target import Target
from tests.training.runs import Said

PLAN = CollectPlan(5.0, max_length=12)
GREEDY = CollectPlan(5.0, max_length=12, temperatures=(0.0,))


@pytest.fixture(scope="module")
def template(target_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(target_folder)


def plain_answer(target: Target, prompt: tuple[int, ...], ends: frozenset[int]) -> list[int]:
    """One token after another, nothing cached, nothing beside it."""
    tokens = list(prompt)
    with torch.no_grad():
        while len(tokens) < len(prompt) + PLAN.max_length:
            logits = target.module(input_ids=torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
            if tokens[-1] in ends:
                break
    return tokens[len(prompt) :]


@pytest.mark.slow
def test_greedy_answers_are_those_of_the_target_alone(
    loaded_target: Target, template: ChatTemplate, prompts: Path, tmp_path: Path, said: Said
) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    found = collect(loaded_target, template, read_prompts(prompts), GREEDY, log, said)
    assert len(found) == 12
    assert len({len(answer.prompt) for answer in found}) > 3, "fillings of several lengths"
    for answer in found:
        assert list(answer.answer) == plain_answer(loaded_target, answer.prompt, template.end_ids)


@pytest.mark.slow
def test_drawn_answers_differ_from_greedy_ones_and_all_are_kept(
    loaded_target: Target, template: ChatTemplate, prompts: Path, tmp_path: Path, said: Said
) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    found = collect(loaded_target, template, read_prompts(prompts), PLAN, log, said)
    by_heat = {heat: {a.answer for a in found if a.temperature == heat} for heat in (0.0, 0.7, 1.0)}
    assert sorted({answer.temperature or 0.0 for answer in found}) == [0.0, 0.7, 1.0]
    assert not by_heat[0.0] >= by_heat[1.0]
    assert AnswerLog(tmp_path / "answers.jsonl").answers == log.answers


def test_a_follow_up_is_asked_after_the_target_s_own_answer(
    loaded_target: Target, template: ChatTemplate, tmp_path: Path, said: Said
) -> None:
    asked = (Message("user", "one"),)
    log = AnswerLog(tmp_path / "answers.jsonl")
    conversation = TrainingPrompt("g", asked, ("and two",))
    first, second = collect(loaded_target, template, [conversation], GREEDY, log, said)
    reply = Message("assistant", template.decode(first.answer))
    assert list(second.prompt) == template.render((*asked, reply, Message("user", "and two")))


def test_a_logged_answer_is_learnt_from_as_it_was_given(
    loaded_target: Target, template: ChatTemplate, tmp_path: Path, said: Said
) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    conversation = TrainingPrompt("g", (Message("user", "hello"),), logged="My own words")
    found = collect(loaded_target, template, [conversation], GREEDY, log, said)
    (logged,) = [answer for answer in found if answer.temperature is None]
    assert template.decode(logged.answer) == "My own words"
    assert len(found) == 2


def test_time_that_is_used_up_stays_used_up(
    loaded_target: Target, template: ChatTemplate, prompts: Path, tmp_path: Path, said: Said
) -> None:
    few = CollectPlan(1e-9, max_length=12, batch_size=4, temperatures=(0.0,))
    log = AnswerLog(tmp_path / "answers.jsonl")
    found = collect(loaded_target, template, read_prompts(prompts), few, log, said)
    assert len(found) == 4, "the first batch is always answered"
    again = AnswerLog(tmp_path / "answers.jsonl")
    assert again.seconds_of(again.answers) > 0.0
    assert len(collect(loaded_target, template, read_prompts(prompts), few, again, said)) == 4


def test_time_spent_on_other_questions_does_not_count(
    loaded_target: Target, template: ChatTemplate, prompts: Path, tmp_path: Path, said: Said
) -> None:
    few = CollectPlan(1e-9, max_length=12, batch_size=4, temperatures=(0.0,))
    log = AnswerLog(tmp_path / "answers.jsonl")
    collect(loaded_target, template, read_prompts(prompts), few, log, said)
    other = TrainingPrompt("g", (Message("user", "something else"),))
    assert len(collect(loaded_target, template, [other], few, log, said)) == 1


def test_prompts_beyond_the_context_are_counted_and_nothing_left_is_an_error(
    loaded_target: Target, template: ChatTemplate, tmp_path: Path, said: Said
) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    long = TrainingPrompt("g", (Message("user", "word " * 400),))
    with pytest.raises(ConfigError, match="has answered nothing"):
        collect(loaded_target, template, [long], PLAN, log, said)
    assert any("1 prompt was left out" in line for line in said), "once, not at each temperature"
    with pytest.raises(ConfigError):
        collect(loaded_target, template, [long, long], PLAN, log, said)
    assert any("2 prompts were left out" in line for line in said)


def test_a_damaged_line_of_the_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"key": 1}\n')
    with pytest.raises(StoreError, match="Line 1"):
        AnswerLog(path)


@pytest.mark.parametrize(
    ("line", "opening", "follow_ups"),
    [
        ('{"prompt": "hi"}', ["hi"], ()),
        ('{"id": "7", "task": "qa", "turns": ["a", "b", "c"]}', ["a"], ("b", "c")),
        ('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, '
         '{"role": "assistant", "content": "old"}]}', ["s", "u"], ()),
    ],
)  # fmt: skip
def test_every_form_of_a_prompt_is_read(
    line: str, opening: list[str], follow_ups: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"\n{line}\n", "utf-8")
    (found,) = read_prompts(path)
    assert [message.content for message in found.opening] == opening
    assert found.follow_ups == follow_ups


@pytest.mark.parametrize(
    "line",
    ['{"prompt": ""}', '{"prompt": 3}', '{"turns": []}', "[]", "no json", '{"messages": []}',
     '{"messages": [{"role": "user", "content": ""}]}', '{"question": "hi"}',
     '{"messages": [{"role": "god", "content": "hi"}]}', '{"prompt": "\\ud800"}'],
)  # fmt: skip
def test_a_wrong_line_is_named_with_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n', "utf-8")
    with pytest.raises(ConfigError, match="Line 2"):
        read_prompts(path)


def test_separators_inside_a_message_end_no_line(tmp_path: Path) -> None:
    path, texts = tmp_path / "p.jsonl", ["a\u2028b", "c\u2029d", "e\x85f"]
    rows = "".join(f'{{"prompt": "{text}"}}\r\n' for text in texts)
    path.write_bytes(rows.encode())
    assert [one.opening[0].content for one in read_prompts(path)] == texts


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(path)


def test_made_up_requests_end_with_a_question_and_more_of_them_keep_the_first() -> None:
    found = shipped_prompts(30, seed=1)
    assert len(found) == 30 and all(one.opening[-1].role == "user" for one in found)
    assert shipped_prompts(10, seed=1) == found[:10] and shipped_prompts(0, seed=1) == []
    assert len(shipped_prompts(1_000_000, seed=1)) == 2000
    assert shipped_prompts(30, seed=2) == shipped_prompts(40, seed=2)[:30] != found
