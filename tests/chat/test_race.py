"""A race runs both lanes on the same request, one after the other, and compares them."""

from __future__ import annotations

import re
import threading
from statistics import median
from typing import Any

import pytest

from localspec.chat.race import NUM_RUNS, Race, race_request
from localspec.core.backend import Request
from localspec.core.decoding import AUTO, OFF, SamplingParams
from localspec.core.errors import LocalspecError
from localspec.web.proof.race_html import race_html
from tests.kit.fakes import REPLY, FakeBackend, Script


def request(**changes: Any) -> Request:
    sampling = SamplingParams(seed=1, **changes)
    return race_request("Tell me.", sampling, AUTO, 64)


def run(race: Race, script: Script | None = None) -> FakeBackend:
    backend = FakeBackend(script or Script(round_s=0.001, prefill_s=0.0))
    race.run(backend, threading.Event())
    return backend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_plain_first", "order"),
    [(True, [OFF, AUTO, AUTO, OFF, AUTO, OFF]), (False, [AUTO, OFF, OFF, AUTO, OFF, AUTO])],
)
def test_both_answer_the_same_request_by_turns_and_each_first_in_turn(
    is_plain_first: bool, order: list[str]
) -> None:
    race = Race(request(), is_plain_first)
    asked = run(race).requests
    assert [one.drafter for one in asked[1:]] == order
    assert {(one.messages, one.sampling) for one in asked} == {
        (asked[0].messages, asked[0].sampling)
    }
    view = race.view
    assert view.phase == "done" and view.difference is None
    assert len(view.plain.runs) == len(view.speculative.runs) == NUM_RUNS


@pytest.mark.slow
def test_a_thrown_away_token_reads_the_prompt_for_all() -> None:
    warm_up = run(Race(request(), True)).requests[0]
    assert (warm_up.drafter, warm_up.max_tokens) == (OFF, 1)


@pytest.mark.slow
def test_clocks_tokens_and_gains_are_there_and_energy_is_unknown() -> None:
    race = Race(request(temperature=0.7), True)
    run(race, Script(round_s=0.003, prefill_s=0.0))
    plain, other = race.view.plain, race.view.speculative
    first, second = plain.runs[0].stats, other.runs[0].stats
    assert first.num_output_tokens == second.num_output_tokens == 64
    assert first.num_draft_tokens == 0 < second.num_draft_tokens
    assert plain.seconds == median(one.seconds for one in plain.runs)
    assert plain.seconds > (other.seconds or 0.0) > 0
    for gains in (race.view.gains, race.view.decode_gains):
        assert gains is not None and gains.lowest <= gains.highest and gains.middle > 2
    assert race.view.gains.middle == plain.seconds / other.seconds  # as a person divides them
    shown = race_html(race.view)
    assert "Identical: all texts are the same" in shown and "Energy" not in shown
    times = r"([\d.]+x (faster|slower)|as fast)"
    assert re.search(rf"The reply came {times} (than|as) without drafting", shown)


def test_greedy_texts_that_differ_are_explained() -> None:
    def reply(asked: Request) -> str:
        return REPLY if asked.drafter == OFF else REPLY.replace("small", "tiny")

    race = Race(request(), True)
    run(race, Script(reply=reply, round_s=0.0, prefill_s=0.0))
    assert race.view.difference is not None
    shown = race_html(race.view)
    assert "They differ from token" in shown and 'data-band="low"' in shown


def test_sampled_texts_of_one_seed_should_be_the_same_and_a_difference_is_shown() -> None:
    def reply(asked: Request) -> str:
        return REPLY if asked.drafter == OFF else REPLY.replace("small", "tiny")

    race = Race(request(temperature=0.7), True)
    run(race, Script(reply=reply, round_s=0.0, prefill_s=0.0))
    assert race.view.difference is not None
    shown = race_html(race.view)
    assert "They differ from token" in shown and "The seed is the same" in shown


def test_a_run_that_differs_from_the_others_of_its_lane_is_seen() -> None:
    """Two of a race's seven requests are plain and late enough to be the second run."""
    texts = iter([REPLY] * 4 + [REPLY.replace("small", "tiny")] + [REPLY] * 9)
    race = Race(request(), True)
    run(race, Script(reply=lambda asked: next(texts), round_s=0.0, prefill_s=0.0))
    assert race.view.difference is not None


def test_a_stopped_race_has_no_verdict() -> None:
    stopped = threading.Event()
    stopped.set()
    race = Race(request(), True)
    race.run(FakeBackend(Script(round_s=0.0, prefill_s=0.0)), stopped)
    assert race.view.gains is None and "Stopped." in race_html(race.view, is_over=True)


def test_a_run_that_was_stopped_is_no_run() -> None:
    cancel = threading.Event()

    def reply(asked: Request) -> str:
        if asked.drafter == AUTO:
            cancel.set()
        return REPLY

    race = Race(request(), True)
    race.run(FakeBackend(Script(reply=reply, round_s=0.0, prefill_s=0.0)), cancel)
    assert (len(race.view.plain.runs), len(race.view.speculative.runs)) == (1, 0)
    assert race.view.speculative.phase == "done" and race.view.phase == "running"


def test_a_fault_ends_the_race_with_its_sentence() -> None:
    race = Race(request(), True)
    fault = LocalspecError("The GPU is gone. Start again.")
    with pytest.raises(LocalspecError):
        run(race, Script(round_s=0.0, fail_at_round=3, fault=fault))
    shown = race_html(race.view, is_over=True, error=str(fault))
    assert "The GPU is gone" in shown
    assert "did not run" in shown and ">waiting<" not in shown and '="reading"' not in shown


def test_what_a_model_writes_is_shown_as_text() -> None:
    race = Race(request(), True)
    run(race, Script(reply="<img src=x onerror=alert(1)>", round_s=0.0, prefill_s=0.0))
    assert "<img" not in race_html(race.view) and "&lt;img" in race_html(race.view)
