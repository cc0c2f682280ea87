"""A worker's answer becomes a reply under our own definitions of prefill and decoding."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.bench.cases import Case
from localspec.core.decoding import SamplingParams
from tools.peers.replies import after_first_ms, output_of, reply_of, request_for

CASE = Case("a", "chat", (3, 9, 14), 77)
ENDS = frozenset({2, 0})


def answer(**changes: Any) -> dict[str, Any]:
    plain = {
        "tokens": [5, 6, 7, 2],
        "token_times_ms": [4.0, 8.0, 12.0, 16.0],
        "is_first_in_prefill": False,
    }
    return {**plain, **changes}


def test_end_of_text_is_decided_and_timed_but_no_output() -> None:
    run = reply_of(answer(), ENDS)
    assert (run.tokens, run.decided) == ((5, 6, 7), (5, 6, 7, 2))
    assert run.decode_ms == 16.0
    assert run.tokens_per_second == pytest.approx(1000 * 3 / 16)


def test_a_first_token_that_came_with_the_prefill_is_charged_at_the_mean_of_the_others() -> None:
    together = answer(token_times_ms=[0.0, 4.0, 8.0, 12.0], is_first_in_prefill=True)
    run = reply_of(together, ENDS)
    assert run.decode_ms == pytest.approx(16.0)


def test_tokens_that_came_together_first_count_as_the_first() -> None:
    # Three with the prefill, then two in 6 ms: 3 ms each, for all five.
    assert after_first_ms([0.0, 0.0, 0.0, 6.0, 6.0]) == pytest.approx(15.0)


@pytest.mark.parametrize("times_ms", [[], [0.0], [0.0, 0.0]])
def test_without_later_tokens_the_decode_time_is_unknown(times_ms: list[float]) -> None:
    assert after_first_ms(times_ms) is None


def test_what_a_worker_does_not_say_is_unknown() -> None:
    run = reply_of(answer(), ENDS)
    assert run.peak_memory_bytes is None


def test_nothing_but_an_end_is_an_empty_output() -> None:
    run = reply_of(answer(tokens=[0], token_times_ms=[4.0]), ENDS)
    assert run.tokens == () and run.tokens_per_second is None
    assert output_of((), ENDS) == ()


def test_a_request_carries_the_seed_of_the_case_and_every_end() -> None:
    request = request_for(CASE, SamplingParams(temperature=0.7), 12, ENDS)
    assert request == {
        "prompt": [3, 9, 14], "max_tokens": 12, "temperature": 0.7, "seed": 77, "end_ids": [0, 2],
    }  # fmt: skip
