"""What a log decides stays as it was; what it does not is drawn from nearby."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localspec.controller.costs import Costs
from localspec.core.errors import StoreError
from tools.replay.logged import LoggedStep, LoggedTurn, worlds_of
from tools.replay.play import play_fixed


def step(drafter: str, drafted: int, accepted: int, output: int | None = None, **facts: Any) -> Any:
    kept = accepted + 1 if output is None else output
    made = {"draft_ms": 1.0 * drafted, "verify_ms": 10.0 + drafted, "context_length": 100,
            "signal": None if drafter == "off" else "model", **facts}  # fmt: skip
    return LoggedStep(drafter, drafted, accepted, kept, **made)


def turn(*steps: LoggedStep, model: str = "big", number: int = 1) -> LoggedTurn:
    return LoggedTurn(number, model, "small", "cpu", "fp32", 0.0, steps)


PLAIN = (step("off", 0, 0),) * 4
DRAFTS = (step("draft_model", 4, 4), step("draft_model", 4, 1), step("draft_model", 4, 0))


def test_logged_guesses_stay_as_they_were() -> None:
    (world,), _ = worlds_of([turn(*PLAIN, *DRAFTS)], {}, 0)
    right = world.tracks["draft_model"].is_right
    assert world.num_tokens == len(right) == 4 + 5 + 2 + 1
    assert right[4:8] == (True,) * 4  # the fifth token was the target's own: not known
    assert right[9:12] == (True, False, False)


def test_turns_keep_their_kind_of_text() -> None:
    turns = [replace(turn(*PLAIN, *DRAFTS), workload=kind) for kind in ("code", "")]
    (world,), _ = worlds_of(turns, {}, 0)
    assert [each.workload for each in world.turns] == ["code", ""]


def share_of(turns: list[LoggedTurn], start: int, end: int) -> float:
    """How often the guesses there are right, over ten seeds."""
    drawn = [worlds_of(turns, {}, seed)[0][0].tracks["draft_model"].is_right for seed in range(10)]
    return sum(sum(right[start:end]) for right in drawn) / (10 * (end - start))


def test_a_round_cut_short_decides_nothing_after_it() -> None:
    """Had it, this drafter would have been wrong once for every two right guesses."""
    cut = turn(*PLAIN, step("draft_model", 1, 1), step("draft_model", 4, 2, output=2))
    silent = turn(*PLAIN * 20, number=2)
    turns = [*[cut] * 40, silent]
    end = sum(each.num_output_tokens for found in turns for each in found.steps)
    assert share_of(turns, end - 80, end) > 0.95


def test_unknown_guesses_follow_those_nearby() -> None:
    """First the drafter was always right, later never; between the two it was not used."""
    good, bad = (step("draft_model", 9, 9),) * 12, (step("draft_model", 9, 0),) * 120
    turns = [turn(*good, *PLAIN * 20, *bad)]
    assert share_of(turns, 120, 140) > 0.75 and share_of(turns, 180, 200) < 0.25
    first, second = (worlds_of(turns, {}, seed)[0][0].tracks for seed in (0, 1))
    assert first["draft_model"].is_right != second["draft_model"].is_right


def test_a_lookup_speaks_only_near_where_it_was_logged() -> None:
    found = (step("ngram", 2, 2, signal="5-8"), step("ngram", 2, 2, signal="2"))
    (world,), _ = worlds_of([turn(*PLAIN * 10, *found, *PLAIN * 10, *DRAFTS)], {}, 0)
    signals = world.tracks["ngram"].signals
    assert signals[40] == "5-8" and signals[44] == "2"
    assert signals[10] is None and signals[60] is None
    assert world.tracks["ngram"].confidences is None
    assert set(world.tracks["draft_model"].signals) == {"model"}


def test_costs_are_those_of_the_rounds() -> None:
    (world,), _ = worlds_of([turn(*PLAIN, *DRAFTS)], {}, 0)
    costs = Costs.restored(world.costs)
    assert costs.plain_ms(100) == 10.0 and costs.verify_ms(5, 100) == 14.0
    assert costs.verify_ms(16, 100) == pytest.approx(25.0)  # the slope goes on
    assert costs.draft_ms("draft_model", 3, 100) == 3.0
    assert world.facts["costs_from"] == "medians of the logged rounds"
    assert play_fixed(world, "off", 0).ms == pytest.approx(10.0 * world.num_tokens)


def test_a_stored_calibration_is_preferred_where_it_is_the_only_one() -> None:
    stored = Costs()
    for width in (1, 16):
        stored.set_verify(width, 128, 7.0)
    state = {"costs": stored.snapshot()}
    turns = [turn(*PLAIN, *DRAFTS)]
    (world,), _ = worlds_of(turns, {"big | small | fp32 | cpu": state}, 0)
    assert world.facts["costs_from"] == "stored calibration"
    assert Costs.restored(world.costs).plain_ms(0) == 7.0
    two = {"big | small | fp32 | cpu": state, "big | small | bf16 | cpu": state}
    (world,), _ = worlds_of(turns, two, 0)
    assert world.facts["costs_from"] == "medians of the logged rounds"
    damaged = {"big | small | fp32 | cpu": {"costs": "?"}}
    (world,), _ = worlds_of(turns, damaged, 0)
    assert world.facts["costs_from"] == "medians of the logged rounds"


def test_combinations_are_kept_apart() -> None:
    turns = [turn(*PLAIN, *DRAFTS), turn(*PLAIN, *DRAFTS, model="other", number=2),
             turn(*PLAIN, *DRAFTS, number=3)]  # fmt: skip
    worlds, left_out = worlds_of(turns, {}, 0)
    assert [len(world.turns) for world in worlds] == [2, 1] and left_out == []


def test_a_log_that_does_not_say_what_rounds_cost_is_left_out_with_the_reason() -> None:
    worlds, left_out = worlds_of([turn(*DRAFTS)], {}, 0)
    assert worlds == [] and "do not say what plain decoding" in left_out[0]
    with pytest.raises(StoreError, match="no rounds yet"):
        worlds_of([], {}, 0)
