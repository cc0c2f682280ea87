"""Rows and cells, from replies made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.bench.arms import parse_arms
from localspec.bench.cases import Case
from localspec.bench.exactness import FirstDifference
from localspec.bench.results import (
    PromptResult,
    Results,
    as_json,
    cells,
    cost_columns,
    drafting_columns,
    paired_ratios,
    rows,
)
from localspec.bench.runs import MeasuredReply

ROW_KEYS = [
    "arm", "precision", "temperature", "task", "num_prompts", "num_tokens", "tokens_per_second",
    "ratio_to_off", "ratio_low", "ratio_high", "acceptance_rate", "mean_accepted_length",
    "repetition", "identical_to_off", "peak_memory_bytes", "energy_joules_per_token",
    "acceptance_by_position", "num_draft_tokens_per_round", "draft_ms_per_round",
    "verify_ms_per_round",
]  # fmt: skip
FRESH = tuple(range(10))


def reply(
    decode_ms: float | None, tokens: tuple[int, ...] = FRESH, accepted: int = 0
) -> MeasuredReply:
    drafts = 4 if accepted else 0
    return MeasuredReply(tokens, tokens, decode_ms, drafts, 4 * drafts, accepted)


def measured(
    name: str, task: str, off_ms: float, auto_ms: float | None, tokens: tuple[int, ...] = FRESH,
    temperature: float = 0.0, differences: tuple[FirstDifference, ...] = (), **others: float,
) -> PromptResult:  # fmt: skip
    replies = {"off": reply(off_ms, tokens), "auto": reply(auto_ms, tokens, accepted=6)}
    replies |= {arm: reply(ms, tokens) for arm, ms in others.items()}
    return PromptResult(Case(name, task, (1, 2), 0), temperature, replies, differences)


def results(*each: PromptResult, temperatures: tuple[float, ...] = (0.0,)) -> Results:
    arms = parse_arms(tuple(each[0].replies))
    return Results(arms, temperatures, "float32", {}, measured=list(each))


def row_of(made: Results, arm: str, task: str, temperature: float = 0.0) -> dict[str, Any]:
    (found,) = [
        row for row in rows(made)
        if (row["arm"], row["task"], row["temperature"]) == (arm, task, temperature)
    ]  # fmt: skip
    return found


# -- rows ----------------------------------------------------------------------------------------


def test_a_row_has_exactly_the_agreed_keys_in_their_order() -> None:
    made = results(measured("a", "chat", 100.0, 50.0))
    assert [list(row) for row in rows(made)] == [ROW_KEYS] * 6  # 2 arms: all, not repeating, chat


def test_rates_are_ratios_of_sums() -> None:
    made = results(measured("a", "chat", 100.0, 50.0), measured("b", "code", 300.0, 100.0))
    row = row_of(made, "auto", "all")
    assert row["tokens_per_second"] == pytest.approx(1000.0 * 20 / 150.0)
    assert row["acceptance_rate"] == pytest.approx(12 / 32)
    assert row["mean_accepted_length"] == pytest.approx(1 + 12 / 8)
    assert (row["num_prompts"], row["num_tokens"]) == (2, 20)


def test_the_ratio_is_the_median_of_ratios_paired_by_prompt() -> None:
    made = results(
        measured("a", "chat", 100.0, 100.0),
        measured("b", "chat", 1000.0, 500.0),
        measured("c", "chat", 10.0, 1.0),
    )
    row = row_of(made, "auto", "chat")
    assert row["ratio_to_off"] == pytest.approx(2.0)
    assert row["ratio_low"] == pytest.approx(1.0) and row["ratio_high"] == pytest.approx(10.0)


def test_off_against_itself_is_one() -> None:
    row = row_of(results(measured("a", "chat", 100.0, 50.0)), "off", "all")
    assert (row["ratio_to_off"], row["acceptance_rate"]) == (1.0, None)
    assert row["mean_accepted_length"] is None


def test_fewer_than_eight_tokens_give_no_ratio() -> None:
    short = measured("a", "chat", 9.0, 3.0, FRESH[:7])
    long = measured("b", "chat", 8.0, 4.0, FRESH[:8])
    assert list(paired_ratios("auto", [short, long])) == [2.0]


def test_an_unknown_time_is_no_ratio_and_no_rate() -> None:
    row = row_of(results(measured("a", "chat", 100.0, None)), "auto", "all")
    assert row["tokens_per_second"] is None and row["ratio_to_off"] is None


def test_prompts_whose_plain_output_repeats_are_left_out_of_their_row() -> None:
    repeating = measured("b", "chat", 100.0, 10.0, (5,) * 10)
    made = results(measured("a", "chat", 100.0, 50.0), repeating)
    assert row_of(made, "auto", "all")["num_prompts"] == 2
    calm = row_of(made, "auto", "all_not_repeating")
    assert (calm["num_prompts"], calm["ratio_to_off"], calm["repetition"]) == (1, 2.0, 0.0)


def test_only_differences_beyond_a_near_tie_are_counted_and_both_are_listed() -> None:
    near = FirstDifference("a", "auto", 3, 1e-6, 1e-6)
    real = FirstDifference("b", "auto", 5, 0.5, 0.5)
    made = results(
        measured("a", "chat", 9.0, 9.0, differences=(near,)),
        measured("b", "chat", 9.0, 9.0, differences=(real,)),
    )
    assert row_of(made, "auto", "all")["identical_to_off"] == 1
    assert row_of(made, "off", "all")["identical_to_off"] == 0
    found = as_json(made, {}, None)
    assert [each["prompt"] for each in found["near_ties"]] == ["a"]
    assert found["differences"] == [
        {"prompt": "b", "arm": "auto", "position": 5, "gap": 0.5, "top_two_gap": 0.5}
    ]


def test_sampled_replies_are_compared_with_plain_decoding_too() -> None:
    real = FirstDifference("a", "auto", 5, 0.5, 0.5)
    sampled = measured("a", "chat", 9.0, 9.0, temperature=0.7, differences=(real,))
    made = results(sampled, temperatures=(0.7,))
    assert row_of(made, "auto", "all", 0.7)["identical_to_off"] == 1


def test_a_refused_arm_has_one_row_with_its_reason() -> None:
    made = results(measured("a", "chat", 100.0, 50.0))
    made.refused["auto"] = "no drafter."
    refused = [row for row in rows(made) if row["arm"] == "auto"]
    assert [list(row) for row in refused] == [[*ROW_KEYS, "reason"]]
    assert refused[0]["tokens_per_second"] is None and refused[0]["identical_to_off"] is None


# -- costs and drafting --------------------------------------------------------------------------


def known(**changes: Any) -> MeasuredReply:
    values: dict[str, Any] = {"decode_ms": 30.0, "peak_memory_bytes": 7, "energy_joules": 2.0}
    return MeasuredReply((1, 2, 3, 4), (1, 2, 3, 4), **{**values, **changes})


def test_memory_is_the_highest_and_energy_is_shared_by_all_tokens() -> None:
    found = cost_columns([known(), known(peak_memory_bytes=9, energy_joules=6.0)])
    assert (found["peak_memory_bytes"], found["energy_joules_per_token"]) == (9, 1.0)


def test_what_no_reply_knows_is_unknown() -> None:
    assert set(cost_columns([MeasuredReply((1, 2), (1, 2), 10.0)]).values()) == {None}
    assert set(cost_columns([]).values()) == {None}


def drafting(lengths: tuple[int, ...], drafted: int = 4) -> MeasuredReply:
    return MeasuredReply(
        FRESH, FRESH, 100.0, len(lengths), drafted * len(lengths), sum(lengths),
        accepted_lengths=lengths, draft_ms=1.0 * len(lengths), drafted_verify_ms=5.0 * len(lengths),
    )  # fmt: skip


def test_acceptance_by_position_counts_rounds_that_got_so_far() -> None:
    made = drafting_columns([drafting((0, 1, 4)), drafting((2,))])
    assert made["acceptance_by_position"] == [0.75, 0.5, 0.25, 0.25]
    assert made["num_draft_tokens_per_round"] == 4.0
    assert (made["draft_ms_per_round"], made["verify_ms_per_round"]) == (1.0, 5.0)


def test_an_arm_that_never_drafted_knows_nothing() -> None:
    assert set(drafting_columns([drafting(())]).values()) == {None}


# -- cells ---------------------------------------------------------------------------------------


def cell_of(made: Results, task: str = "all") -> dict[str, Any]:
    (found,) = [cell for cell in cells(made) if cell["task"] == task]
    return found


def test_the_choice_is_held_against_plain_decoding_and_the_best_single_way() -> None:
    cell = cell_of(results(measured("a", "chat", 144.0, 100.0, ngram=96.0, lookahead=120.0)))
    assert cell["auto_ratio"] == pytest.approx(1.44)
    assert (cell["best"], cell["best_ratio"]) == ("ngram", pytest.approx(1.5))
    assert cell["auto_to_best"] == pytest.approx(0.96)
    slow = cell_of(results(measured("a", "chat", 90.0, 100.0, ngram=180.0)))
    assert (slow["best"], slow["auto_to_best"]) == ("off", pytest.approx(0.9))


def test_a_cell_says_how_sure_the_comparison_is_and_how_it_stands_to_what_was_foreseeable() -> None:
    """lookahead is the best of all by one lucky prompt; by the other half of the prompts ngram."""
    lucky = (100.0, 100.0, 20.0, 90.0)
    made = results(*(
        measured(str(place), "chat", 100.0, 80.0, ngram=80.0, lookahead=ms)
        for place, ms in enumerate(lucky)
    ))  # fmt: skip
    cell = cell_of(made)
    assert cell["best"] == "lookahead" and cell["auto_to_best"] == pytest.approx(310 / 320)
    assert cell["auto_to_best_low"] < 1.0 < cell["auto_to_best_high"]
    assert (cell["auto_ratio_low"], cell["auto_ratio_high"]) == pytest.approx((1.25, 1.25))
    # Each half against the other's best: lookahead (190 ms) on the odd ones, ngram on the even.
    assert cell["auto_to_foreseen"] == pytest.approx((190.0 + 160.0) / 320.0)


def test_every_temperature_and_task_has_a_cell_and_none_without_auto() -> None:
    both = [measured("a", task, 9.0, 9.0, temperature=t) for t in (0.0, 1.0) for task in ("c", "d")]
    found = cells(results(*both, temperatures=(0.0, 1.0)))
    tasks = ("all", "all_not_repeating", "c", "d")
    assert [(c["temperature"], c["task"]) for c in found] == [
        (t, task) for t in (0.0, 1.0) for task in tasks
    ]
    refused = results(*both)
    refused.refused["auto"] = "it failed."
    assert cells(refused) == []


@pytest.mark.parametrize("num_prompts", [1, 2, 3])
def test_a_cell_of_few_prompts_without_a_token_is_made_all_the_same(num_prompts: int) -> None:
    """A reply that ends at once has no rate; so does one whose time nobody knows."""
    whole = [measured(str(n), "chat", 100.0, 50.0, ngram=80.0) for n in range(num_prompts - 1)]
    ended = measured("ended", "chat", 1.0, 1.0, (), ngram=1.0)
    found = cells(results(*whole, ended))
    assert len(found) == (3 if whole else 0)
    assert num_prompts == 3 or all(cell["auto_to_foreseen"] is None for cell in found)
    unknown = measured("unknown", "chat", 100.0, None, ngram=80.0)
    assert cells(results(unknown)) == []
