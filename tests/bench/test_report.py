"""Rows and table, from runs made by hand."""

from __future__ import annotations

import json

import pytest

from localspec.bench.arms import parse_arms
from localspec.bench.exactness import Difference
from localspec.bench.report import Found, Measured, differences_json, paired_ratios, render, rows
from localspec.bench.stage import Case, Run

ROW_KEYS = [
    "arm", "precision", "temperature", "task", "num_prompts", "num_tokens", "tokens_per_second",
    "ratio_to_off", "ratio_low", "ratio_high", "acceptance_rate", "mean_accepted_length",
    "repetition", "identical_to_off", "rate_low", "rate_high", "ttft_ms",
    "prefill_tokens_per_second", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms", "host_ms_per_round",
    "peak_memory_bytes", "energy_joules_per_token", "mean_context_length", "bandwidth_share",
    "acceptance_by_position", "num_draft_tokens_per_round", "draft_ms_per_round",
    "verify_ms_per_round",
]  # fmt: skip
FRESH = tuple(range(10))


def run(decode_ms: float | None, tokens: tuple[int, ...] = FRESH, accepted: int = 0) -> Run:
    drafts = 4 if accepted else 0
    return Run(tokens, tokens, decode_ms, drafts, 4 * drafts, accepted)


def measured(
    name: str, task: str, off_ms: float, auto_ms: float | None, tokens: tuple[int, ...] = FRESH,
    temperature: float = 0.0, differences: tuple[Difference, ...] = (),
) -> Measured:  # fmt: skip
    runs = {"off": run(off_ms, tokens), "auto": run(auto_ms, tokens, accepted=6)}
    return Measured(Case(name, task, (1, 2), 0), temperature, runs, differences)


def found(*each: Measured, temperatures: tuple[float, ...] = (0.0,)) -> Found:
    return Found(parse_arms(("auto",)), temperatures, "float32", {}, measured=list(each))


def row_of(made: Found, arm: str, task: str, temperature: float = 0.0) -> dict[str, object]:
    chosen = [
        row for row in rows(made)
        if (row["arm"], row["task"], row["temperature"]) == (arm, task, temperature)
    ]  # fmt: skip
    assert len(chosen) == 1
    return chosen[0]


def test_a_row_has_exactly_the_agreed_keys_in_their_order() -> None:
    made = found(measured("a", "chat", 100.0, 50.0))
    assert [list(row) for row in rows(made)] == [ROW_KEYS] * 6  # 2 arms: all, not repeating, chat


def test_rates_are_ratios_of_sums() -> None:
    made = found(measured("a", "chat", 100.0, 50.0), measured("b", "code", 300.0, 100.0))
    row = row_of(made, "auto", "all")
    assert row["tokens_per_second"] == pytest.approx(1000.0 * 20 / 150.0)
    assert row["acceptance_rate"] == pytest.approx(12 / 32)
    assert row["mean_accepted_length"] == pytest.approx(1 + 12 / 8)
    assert (row["num_prompts"], row["num_tokens"]) == (2, 20)


def test_the_ratio_is_the_median_of_ratios_paired_by_prompt() -> None:
    made = found(
        measured("a", "chat", 100.0, 100.0),
        measured("b", "chat", 1000.0, 500.0),
        measured("c", "chat", 10.0, 1.0),
    )
    row = row_of(made, "auto", "chat")
    assert row["ratio_to_off"] == pytest.approx(2.0)
    assert row["ratio_low"] == pytest.approx(1.0) and row["ratio_high"] == pytest.approx(10.0)


def test_off_against_itself_is_one() -> None:
    row = row_of(found(measured("a", "chat", 100.0, 50.0)), "off", "all")
    assert (row["ratio_to_off"], row["acceptance_rate"]) == (1.0, None)
    assert row["mean_accepted_length"] is None


def test_fewer_than_eight_tokens_give_no_ratio() -> None:
    short = measured("a", "chat", 9.0, 3.0, FRESH[:7])
    long = measured("b", "chat", 8.0, 4.0, FRESH[:8])
    assert list(paired_ratios("auto", [short, long])) == [2.0]


def test_an_unknown_time_is_no_ratio_and_no_rate() -> None:
    row = row_of(found(measured("a", "chat", 100.0, None)), "auto", "all")
    assert row["tokens_per_second"] is None and row["ratio_to_off"] is None


def test_prompts_whose_plain_output_repeats_are_left_out_of_their_row() -> None:
    made = found(measured("a", "chat", 100.0, 50.0), measured("b", "chat", 100.0, 10.0, (5,) * 10))
    assert row_of(made, "auto", "all")["num_prompts"] == 2
    calm = row_of(made, "auto", "all_not_repeating")
    assert (calm["num_prompts"], calm["ratio_to_off"], calm["repetition"]) == (1, 2.0, 0.0)


def test_only_differences_beyond_a_near_tie_are_counted_and_both_are_listed() -> None:
    near = Difference("a", "auto", 3, 1e-6, 1e-6)
    real = Difference("b", "auto", 5, 0.5, 0.5)
    made = found(
        measured("a", "chat", 9.0, 9.0, differences=(near,)),
        measured("b", "chat", 9.0, 9.0, differences=(real,)),
    )
    assert row_of(made, "auto", "all")["identical_to_off"] == 1
    assert row_of(made, "off", "all")["identical_to_off"] == 0
    assert [each["prompt"] for each in differences_json(made, near_ties=True)] == ["a"]
    assert [each["prompt"] for each in differences_json(made, near_ties=False)] == ["b"]


def test_sampled_outputs_are_not_compared() -> None:
    made = found(measured("a", "chat", 9.0, 9.0, temperature=0.7), temperatures=(0.7,))
    assert row_of(made, "auto", "all", 0.7)["identical_to_off"] is None


def test_a_refused_arm_has_one_row_with_its_reason() -> None:
    made = found(measured("a", "chat", 100.0, 50.0))
    made.refused["auto"] = "no drafter."
    refused = [row for row in rows(made) if row["arm"] == "auto"]
    assert [list(row) for row in refused] == [[*ROW_KEYS, "reason"]]
    assert refused[0]["tokens_per_second"] is None and refused[0]["identical_to_off"] is None


def test_the_table_shows_dashes_for_the_unknown_and_tells_what_is_left_out() -> None:
    made = found(measured("a", "chat", 100.0, 50.0))
    made.refused["auto"] = "no drafter."
    machine = {"target": "t", "draft": None, "dtype": "float32", "device": "cpu", "torch": "2",
               "num_threads": 2, "controller": "cold", "max_tokens": 8}  # fmt: skip
    result = {
        "machine": machine,
        "rows": rows(made),
        "cells": [],
        "near_ties": [{"prompt": "a", "arm": "auto", "position": 3, "gap": 1e-6}],
        "differences": [{"prompt": "b", "arm": "auto", "position": 1, "gap": None}],
        "skipped": [{"prompt": "z", "task": "chat", "reason": "too long."}],
        "ending": "stopped by hand.",
    }
    text = render(result)
    assert "auto did not run: no drafter." in text and "Skipped z: too long." in text
    assert "Near-tie: auto on a at token 3" in text and "the output stops there" in text
    assert "Incomplete: stopped by hand." in text
    line = next(line for line in text.splitlines() if line.startswith("auto "))
    assert line.split() == ["auto", "0", "all", "0", "-", "-", "-", "-", "-", "-", "-"]
    json.dumps(result, allow_nan=False)
