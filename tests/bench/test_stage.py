"""What one run of our engine notes beside its tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localspec.bench.stage import Case, Run, Stage, run_engine
from localspec.core import SamplingParams
from tests.bench.tiny_stage import tiny_stage

CASE = Case("a", "chat", (3, 9, 14, 27, 5), 0)


@pytest.fixture
def stage() -> Stage:
    return tiny_stage()


def run(stage: Stage, drafter: str, length: int | None = None) -> Run:
    return run_engine(stage, stage.controller, drafter, length, CASE, SamplingParams(), 16)


def test_plain_tokens_arrive_one_by_one_within_the_decode_time(stage: Stage) -> None:
    found = run(stage, "off")
    assert found.num_rounds == len(found.token_times_ms) == len(found.tokens) == 16
    assert list(found.token_times_ms) == sorted(set(found.token_times_ms))
    assert found.decode_ms is not None and 0 < found.token_times_ms[-1] <= found.decode_ms


def test_tokens_of_one_round_arrive_together(stage: Stage) -> None:
    found = run(stage, "draft_model", 3)
    assert found.num_accepted_tokens > 0 and found.num_rounds is not None
    assert len(found.token_times_ms) == len(found.tokens)
    assert len(set(found.token_times_ms)) == found.num_rounds < len(found.tokens)


def test_the_first_token_comes_after_the_prompt_and_the_first_round(stage: Stage) -> None:
    found = run(stage, "draft_model", 3)
    assert found.num_prompt_tokens == 5
    assert found.prefill_ms is not None and found.prefill_ms > 0
    assert found.ttft_ms == pytest.approx(found.prefill_ms + found.token_times_ms[0])


def test_a_reply_that_ends_at_once_has_no_first_token(stage: Stage) -> None:
    first = run(stage, "off").decided[0]
    found = run(replace(stage, end_ids=frozenset({first})), "off")
    assert (found.tokens, found.ttft_ms, found.num_rounds) == ((), None, 1)


def test_energy_is_what_the_counter_gained_while_decoding(stage: Stage) -> None:
    readings = iter([100.0, 103.5])
    assert run(replace(stage, joules=lambda: next(readings)), "off").energy_joules == 3.5


def test_without_a_counter_energy_is_unknown(stage: Stage) -> None:
    found = run(stage, "off")
    assert found.energy_joules is None and found.host_ms is None
    assert found.peak_memory_bytes is not None and found.peak_memory_bytes > 10 * 2**20
