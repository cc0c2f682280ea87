"""A race runs both lanes on the same request, one after the other, and compares them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from localspec.backend import Request
from localspec.chat.race import Race, race_request
from localspec.core import AUTO, OFF, SamplingParams
from localspec.errors import LocalspecError
from localspec.web.proof.race_html import race_html
from tests.fakes import REPLY, FakeBackend, Script


def request(**changes: Any) -> Request:
    sampling = SamplingParams(seed=1, **changes)
    return race_request("Tell me.", sampling, AUTO, 64)


def run(race: Race, script: Script | None = None) -> FakeBackend:
    backend = FakeBackend(script or Script(round_s=0.001, prefill_s=0.0))
    race.run(backend, threading.Event())
    return backend


@pytest.mark.parametrize("is_plain_first", [True, False])
def test_both_answer_the_same_request_in_the_order_asked_for(is_plain_first: bool) -> None:
    race = Race(request(), is_plain_first)
    asked = run(race).requests
    assert [one.drafter for one in asked[1:]] == ([OFF, AUTO] if is_plain_first else [AUTO, OFF])
    assert {(one.messages, one.sampling) for one in asked} == {
        (asked[0].messages, asked[0].sampling)
    }
    view = race.view
    assert (view.plain.place, view.speculative.place) == ((1, 2) if is_plain_first else (2, 1))
    assert view.phase == "done" and view.is_same and view.difference is None


def test_a_thrown_away_token_reads_the_prompt_for_both() -> None:
    warm_up = run(Race(request(), True)).requests[0]
    assert (warm_up.drafter, warm_up.max_tokens) == (OFF, 1)


def test_both_clocks_tokens_and_costs_are_there_and_energy_is_unknown() -> None:
    race = Race(request(), True)
    run(race, Script(round_s=0.003, prefill_s=0.0))
    plain, other = race.view.plain, race.view.speculative
    assert plain.stats is not None and other.stats is not None
    assert plain.stats.num_output_tokens == other.stats.num_output_tokens == 64
    assert plain.stats.num_draft_tokens == 0 < other.stats.num_draft_tokens
    assert plain.seconds is not None and other.seconds is not None
    assert plain.seconds > other.seconds > 0
    assert race.view.gain is not None and race.view.gain > 2
    shown = race_html(race.view)
    assert "identical, token by token" in shown and "<dt>Energy</dt><dd>–</dd>" in shown


def test_greedy_texts_that_differ_are_explained() -> None:
    def reply(asked: Request) -> str:
        return REPLY if asked.drafter == OFF else REPLY.replace("small", "tiny")

    race = Race(request(), True)
    run(race, Script(reply=reply, round_s=0.0, prefill_s=0.0))
    assert race.view.is_same is False and race.view.difference is not None
    shown = race_html(race.view)
    assert "They differ from token" in shown and 'data-band="low"' in shown


def test_sampled_texts_may_differ_and_that_is_said() -> None:
    def reply(asked: Request) -> str:
        return REPLY if asked.drafter == OFF else REPLY[10:]

    race = Race(request(temperature=0.7), True)
    run(race, Script(reply=reply, round_s=0.0, prefill_s=0.0))
    assert race.view.difference is None
    assert "as two draws may" in race_html(race.view) and 'data-band="low"' not in race_html(
        race.view
    )


def test_a_stopped_race_has_no_verdict() -> None:
    stopped = threading.Event()
    stopped.set()
    race = Race(request(), True)
    race.run(FakeBackend(Script(round_s=0.0, prefill_s=0.0)), stopped)
    assert race.view.phase == "cancelled" and race.view.is_same is None and race.view.gain is None


def test_a_fault_ends_the_race_with_its_sentence() -> None:
    race = Race(request(), True)
    fault = LocalspecError("The GPU is gone. Start again.")
    with pytest.raises(LocalspecError):
        run(race, Script(round_s=0.0, fail_at_round=3, fault=fault))
    shown = race_html(race.view)
    assert race.view.phase == "failed" and "The GPU is gone" in shown
    assert "did not run" in shown and ">waiting<" not in shown and '="reading"' not in shown


def test_what_a_model_writes_is_shown_as_text() -> None:
    race = Race(request(), True)
    run(race, Script(reply="<img src=x onerror=alert(1)>", round_s=0.0, prefill_s=0.0))
    assert "<img" not in race_html(race.view) and "&lt;img" in race_html(race.view)
