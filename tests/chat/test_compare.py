"""The order in which arms take turns, and what a comparison yields of their answers."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from localspec.chat.compare import Sample, answers, as_listed, compare, rotated
from localspec.core.backend import Message, Request
from localspec.core.decoding import OFF
from tests.kit.fakes import FakeBackend, Script

GO = threading.Event()
asked: list[tuple[str, str]] = []


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    asked.clear()


def ask(prompt: str, arm: str) -> Generator[str, None, None]:
    """Two steps of an answer; the arm "silent" has none."""
    asked.append((prompt, arm))
    if arm != "silent":
        yield f"{arm} on"
        yield f"{arm} on {prompt}"


def turns(num_prompts: int, arms: str, runs: int) -> list[str]:
    """The arms of every turn, in order."""
    asked.clear()
    prompts = [str(number) for number in range(num_prompts)]
    for _ in compare(ask, prompts, list(arms), runs, GO):
        pass
    order = "".join(arm for _, arm in asked)
    return [order[start : start + len(arms)] for start in range(0, len(order), len(arms))]


def test_each_arm_goes_first_in_turn_over_prompts_and_runs_alike() -> None:
    assert turns(4, "ab", 1) == turns(1, "ab", 4) == turns(2, "ab", 2) == ["ab", "ba", "ba", "ab"]


@pytest.mark.parametrize("size", [2, 3, 5, 6])
def test_every_arm_stands_once_at_every_place_of_a_cycle(size: int) -> None:
    arms = range(size)
    for cycle in range(4):
        orders = [rotated(arms, cycle * size + step) for step in range(size)]
        for place in range(size):
            assert {order[place] for order in orders} == set(arms)


def test_tasks_that_take_turns_meet_several_orders() -> None:
    assert len({rotated(range(6), index)[0] for index in range(0, 72, 6)}) == 6


def test_an_answer_is_yielded_as_it_grows_and_once_whole() -> None:
    samples = list(compare(ask, ["p"], ["a", "silent"], 2, GO, as_listed))
    assert samples == [
        Sample("p", "a", run, answer, is_over)
        for run in (0, 1)
        for answer, is_over in (("a on", False), ("a on p", False), ("a on p", True))
    ]


def test_answers_that_warm_up_are_dropped() -> None:
    samples = compare(ask, ["p"], ["a"], 1, GO, warm_ups=[("short", "b")])
    assert {sample.arm for sample in samples} == {"a"}
    assert asked == [("short", "b"), ("p", "a")]


def test_no_answer_begins_after_a_cancel() -> None:
    cancel = threading.Event()
    for sample in compare(ask, ["p"], ["a", "b"], 3, cancel):
        cancel.set()
        assert sample.arm == "a"
    assert asked == [("p", "a")]
    assert list(compare(ask, ["p"], ["a"], 1, cancel, warm_ups=[("p", "a")])) == []
    assert asked == [("p", "a")]


def test_leaving_a_comparison_ends_the_reply_under_way() -> None:
    ended = list[str]()

    def endless(prompt: str, arm: str) -> Generator[int, None, None]:
        try:
            while True:
                yield len(ended)
        finally:
            ended.append(arm)

    samples = compare(endless, ["p"], ["a"], 1, GO)
    next(samples)
    samples.close()
    assert ended == ["a"]


def test_an_answer_of_a_backend_holds_its_text_tokens_and_times() -> None:
    request = Request((Message("user", "hi"),), max_tokens=6, drafter=OFF)
    steps = list(answers(FakeBackend(Script(round_s=0.0, prefill_s=0.0)), request, GO))
    last = steps[-1]
    assert (steps[0].text, steps[0].tokens, steps[0].phase) == ("", (), "prefill")
    assert [len(step.tokens) for step in steps] == [0, 0, 1, 2, 3, 4, 5, 6, 6]
    assert (last.phase, last.finish_reason) == ("done", "length")
    assert last.stats.num_output_tokens == 6 and last.text
    assert len(last.arrived_s) == 6 and list(last.arrived_s) == sorted(last.arrived_s)
    assert 0.0 <= last.arrived_s[-1] <= last.seconds
