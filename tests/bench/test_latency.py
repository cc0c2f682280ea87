"""Waits and costs, from runs made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.bench.latency import bandwidth_share, columns, table, with_extras
from localspec.bench.stage import Run

EXTRAS: dict[str, Any] = {
    "costs": {},
    "host": [{"arm": "off", "temperature": 0.0, "host_ms_per_round": 0.2, "num_rounds": 9}],
    "bandwidth_bytes_per_second": 10_000.0,
    "bytes_per_token": {"weight_bytes": 30.0, "kv_bytes_per_context_token": 2.0},
}


def run(**changes: Any) -> Run:
    known: dict[str, Any] = {
        "tokens": (1, 2, 3, 4), "decided": (1, 2, 3, 4), "decode_ms": 30.0, "prefill_ms": 50.0,
        "num_prompt_tokens": 100, "ttft_ms": 60.0, "token_times_ms": (10.0, 20.0, 20.0, 30.0),
        "num_rounds": 3, "peak_memory_bytes": 7, "energy_joules": 2.0,
    }  # fmt: skip
    return Run(**{**known, **changes})


def row(arm: str = "off", **changes: Any) -> dict[str, Any]:
    start = {"arm": arm, "temperature": 0.0, "task": "all", "num_prompts": 1,
             "tokens_per_second": 100.0}  # fmt: skip
    return {**start, **columns([run()]), **changes}


def test_waits_are_pooled_over_all_replies_of_an_arm() -> None:
    found = columns([run(), run(token_times_ms=(5.0, 105.0))])  # waits 10, 0, 10 and 100
    assert found["itl_p50_ms"] == 10.0
    assert found["itl_p99_ms"] == pytest.approx(97.3)


def test_the_first_token_is_the_median_and_prefill_a_ratio_of_sums() -> None:
    found = columns([run(), run(ttft_ms=80.0, prefill_ms=150.0), run(ttft_ms=61.0)])
    assert found["ttft_ms"] == 61.0
    assert found["prefill_tokens_per_second"] == pytest.approx(1000 * 300 / 250)


def test_memory_is_the_highest_and_energy_is_shared_by_all_tokens() -> None:
    found = columns([run(), run(peak_memory_bytes=9, energy_joules=6.0)])
    assert (found["peak_memory_bytes"], found["energy_joules_per_token"]) == (9, 1.0)


def test_the_spread_is_that_of_the_middle_half_of_the_prompts() -> None:
    found = columns([run(decode_ms=4000.0 / rate) for rate in (1, 2, 3, 4, 5)])
    assert (found["rate_low"], found["rate_high"]) == (pytest.approx(2), pytest.approx(4))
    assert columns([run()])["rate_low"] is None


def test_what_no_run_knows_is_unknown() -> None:
    assert set(columns([Run((1, 2), (1, 2), 10.0)]).values()) == {None}
    assert set(columns([]).values()) == {None}


def test_a_run_that_knows_its_host_time_gives_it_by_round() -> None:
    assert columns([run(host_ms=3.0), run(host_ms=6.0)])["host_ms_per_round"] == 1.5


def test_the_mean_context_counts_each_token_with_what_stood_before_it() -> None:
    # 100 + (0, 1, 2, 3) and 10 + (0, 1)
    runs = [run(), run(num_prompt_tokens=10, tokens=(1, 2))]
    assert columns(runs)["mean_context_length"] == pytest.approx((406 + 21) / 6)


def test_the_share_of_bandwidth_counts_weights_and_the_cache_in_use() -> None:
    assert bandwidth_share(row(mean_context_length=10.0), EXTRAS) == pytest.approx(0.5)
    assert bandwidth_share(row(), {**EXTRAS, "bytes_per_token": None}) is None
    assert bandwidth_share(row(), {**EXTRAS, "bandwidth_bytes_per_second": None}) is None


def test_extras_are_filled_into_the_rows_they_belong_to() -> None:
    result = {"rows": [row(), row(temperature=0.7), row("auto")], "ending": None}
    found = with_extras(result, EXTRAS)
    assert [each["host_ms_per_round"] for each in found["rows"]] == [0.2, None, None]
    assert [each["bandwidth_share"] is None for each in found["rows"]] == [False, False, True]
    assert found["costs"] == {} and found["ending"] is None
    assert result["rows"][0]["bandwidth_share"] is None, "the given result stays as it was"


def test_the_table_has_one_line_an_arm_and_leaves_out_what_nobody_knows() -> None:
    rows = [row(energy_joules_per_token=None), row("auto", energy_joules_per_token=None),
            row(task="chat")]  # fmt: skip
    text = table(rows, "all")
    assert [line.split()[0] for line in text[3:]] == ["off", "auto"]
    assert "wait P50 ms" in text[2] and "joules" not in text[2]
    assert "host" not in text[2]


def test_without_any_figure_there_is_no_table() -> None:
    assert table([{**row(), **columns([])}], "all") == []
    assert table([{**row(), "num_prompts": 0}], "all") == []
