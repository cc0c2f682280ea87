"""What is learnt of acceptance: censoring, discounting, shrinking, and its state."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from localspec.controller.acceptance import (
    CONFIDENCE_BINS,
    MAX_POSITIONS,
    PRIOR,
    PRIOR_ROUNDS,
    SHIPPED_ROUNDS,
    Acceptance,
    Situation,
    confidence_bin,
    temperature_bucket,
)

COLD = Situation(0)


def observe(acceptance: Acceptance, drafted: int, accepted: int, **where: Any) -> None:
    place = {"drafter": "d", "signal": "s", "situation": COLD, **where}
    acceptance.tick(place["situation"].kind)
    acceptance.observe(place["drafter"], place["signal"], place["situation"], drafted, accepted)


def learn(acceptance: Acceptance, rate: float, rounds: int, drafted: int = 4, **where: Any) -> None:
    rng = random.Random(rounds)
    for _ in range(rounds):
        accepted = 0
        while accepted < drafted and rng.random() < rate:
            accepted += 1
        observe(acceptance, drafted, accepted, **where)


@pytest.mark.parametrize(
    ("temperature", "bucket"), [(0.0, 0), (0.01, 1), (0.3, 1), (0.7, 3), (1.0, 4), (1.5, 5), (5, 5)]
)
def test_temperature_buckets(temperature: float, bucket: int) -> None:
    assert temperature_bucket(temperature) == bucket


def test_confidence_bins_cover_all_and_are_finer_towards_one() -> None:
    bins = [confidence_bin(i / 1000) for i in range(1001)]
    assert bins == sorted(bins) and bins[0] == 0 and bins[-1] == CONFIDENCE_BINS - 1
    assert bins.count(0) > bins.count(CONFIDENCE_BINS - 1)


def test_unknown_drafters_start_from_the_prior() -> None:
    assert Acceptance().rates("d", "s", COLD) == pytest.approx([PRIOR] * MAX_POSITIONS)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rates_are_learnt_at_every_position(rate: float) -> None:
    acceptance = Acceptance()
    learn(acceptance, rate, 600)
    assert acceptance.rates("d", "s", COLD)[0] == pytest.approx(rate, abs=0.15)


def test_full_acceptance_is_censored() -> None:
    """Positions beyond a fully accepted draft were not tried, so they are not failures."""
    acceptance = Acceptance()
    for _ in range(100):
        observe(acceptance, 2, 2)
    rates = acceptance.rates("d", "s", COLD)
    assert min(rates) > 0.9
    for _ in range(100):
        observe(acceptance, 4, 2, drafter="e")
    rates = acceptance.rates("e", "s", COLD)
    assert rates[0] > 0.9 and rates[1] > 0.9 and rates[2] < 0.1


def test_positions_after_a_rejection_were_not_tried() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        observe(acceptance, 4, 0)
    record = acceptance.snapshot()["records"][0]
    assert record["tried"][0] > 0 and record["tried"][1:] == [0.0] * (MAX_POSITIONS - 1)


def test_a_change_is_followed() -> None:
    acceptance = Acceptance()
    learn(acceptance, 0.9, 500)
    learn(acceptance, 0.1, 120)
    assert acceptance.rates("d", "s", COLD)[0] < 0.3


def test_old_counts_fade_while_others_draft() -> None:
    """A drafter that was put aside is judged by a few new looks, not by all of its past."""
    rates = {}
    for absence in (0, 100):
        acceptance = Acceptance()
        learn(acceptance, 0.05, 300)
        for _ in range(4):
            acceptance.begin_turn()
            for _ in range(absence):
                acceptance.tick()
            observe(acceptance, 4, 4)
        rates[absence] = acceptance.rates("d", "s", COLD)[0]
    assert rates[0] < 0.25 and rates[100] > 0.5


def test_signals_drafters_and_temperatures_are_learnt_apart() -> None:
    acceptance = Acceptance()
    learn(acceptance, 0.95, 200)
    learn(acceptance, 0.05, 200, signal="t")
    learn(acceptance, 0.5, 200, drafter="e")
    assert acceptance.rates("d", "s", COLD)[0] > 0.85
    assert acceptance.rates("d", "t", COLD)[0] < 0.2
    assert 0.3 < acceptance.rates("e", "s", COLD)[0] < 0.7


def test_a_new_temperature_starts_from_its_neighbour() -> None:
    acceptance = Acceptance()
    learn(acceptance, 0.95, 200, situation=Situation(2))
    assert acceptance.rates("d", "s", Situation(3))[0] > 0.85
    assert acceptance.rates("d", "s", Situation(5))[0] == pytest.approx(PRIOR)


def test_confidence_is_taken_at_its_word_until_seen_otherwise() -> None:
    acceptance = Acceptance()
    assert acceptance.chance("d", 0, 0.8) == pytest.approx(0.8)
    for _ in range(300):
        acceptance.observe_confidences("d", 0, (0.8, 0.8), (False, None))
    assert acceptance.chance("d", 0, 0.8) < 0.05
    assert acceptance.knows_confidence("d", 0) and not acceptance.knows_confidence("d", 1)


def test_confidences_after_a_rejection_are_not_counted() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe_confidences("d", 0, (0.9, 0.2), (False, None))
    assert acceptance.chance("d", 0, 0.2) == pytest.approx(0.2)


def test_restored_state_has_the_same_rates_and_counts_for_little() -> None:
    acceptance = Acceptance()
    learn(acceptance, 0.8, 400)
    for _ in range(400):
        acceptance.observe_confidences("d", 0, (0.9,), (True,))
    again = Acceptance.restored(json.loads(json.dumps(acceptance.snapshot())))
    assert again.rates("d", "s", COLD)[0] == pytest.approx(
        acceptance.rates("d", "s", COLD)[0], abs=0.05
    )
    assert again.estimate("d", "s", COLD).evidence <= PRIOR_ROUNDS
    learn(again, 0.1, 60)
    learn(acceptance, 0.1, 60)
    assert again.rates("d", "s", COLD)[0] <= acceptance.rates("d", "s", COLD)[0] + 0.02


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tried", [1.0] * 3),
        ("tried", [math.nan] * MAX_POSITIONS),
        ("tried", [-1.0] * MAX_POSITIONS),
        ("accepted", [1e9] * MAX_POSITIONS),
        ("accepted", ["x"] * MAX_POSITIONS),
        ("num_rounds", "many"),
        ("num_rounds", math.nan),
        ("bucket", None),
        ("tokens", math.inf),
        ("steps", math.nan),
        ("drafted", -5.0),
    ],
    ids=str,
)
def test_impossible_records_are_refused(field: str, value: Any) -> None:
    acceptance = Acceptance()
    learn(acceptance, 0.5, 20)
    state = acceptance.snapshot()
    state["records"][0][field] = value
    with pytest.raises((KeyError, ValueError, TypeError)):
        Acceptance.restored(state)


# kinds of text and turns


def test_a_kind_never_met_starts_from_all_kinds_and_then_goes_its_own_way() -> None:
    acceptance, code, story = Acceptance(), Situation(0, "code"), Situation(0, "story")
    learn(acceptance, 0.9, 200, situation=code)
    acceptance.begin_turn()
    assert acceptance.rates("d", "s", story)[0] > 0.75
    learn(acceptance, 0.1, 200, situation=story)
    acceptance.begin_turn()
    assert acceptance.rates("d", "s", story)[0] < 0.2
    assert acceptance.rates("d", "s", code)[0] > 0.8


def evidence(acceptance: Acceptance, situation: Situation) -> float:
    return acceptance.estimate("d", "s", situation).evidence


def test_what_fades_while_others_draft_fades_by_the_rounds_of_its_own_kind() -> None:
    acceptance, code, story = Acceptance(), Situation(0, "code"), Situation(0, "story")
    learn(acceptance, 0.9, 100, situation=code)
    known = evidence(acceptance, code)
    for _ in range(500):
        acceptance.tick("story")
    assert evidence(acceptance, code) > 0.85 * known
    assert evidence(acceptance, story) < 0.1 * known, "of all kinds, long ago"
    for _ in range(500):
        acceptance.tick("code")
    assert evidence(acceptance, code) < 0.1 * known


def test_without_a_discount_the_first_rounds_count_as_much_as_the_last() -> None:
    """So what is measured over a file of prompts is no measure of its last prompts."""
    acceptance = Acceptance(discount=1.0)
    learn(acceptance, 0.9, 500)
    acceptance.tick(num_rounds=500)
    learn(acceptance, 0.1, 500)
    acceptance.begin_turn()
    assert acceptance.rates("d", "s", COLD)[0] == pytest.approx(0.5, abs=0.05)


def test_a_turn_unlike_its_kind_is_followed_and_forgotten_at_its_end() -> None:
    acceptance = Acceptance()
    learn(acceptance, 0.9, 300)
    acceptance.begin_turn()
    before = acceptance.rates("d", "s", COLD)[0]
    learn(acceptance, 0.0, 30)
    during = acceptance.rates("d", "s", COLD)[0]
    acceptance.begin_turn()
    after = acceptance.rates("d", "s", COLD)[0]
    assert before > 0.8 and during < 0.35 and after > during + 0.2


def test_a_kinds_records_outlive_a_restart_and_a_turns_do_not() -> None:
    acceptance, code = Acceptance(), Situation(3, "code")
    learn(acceptance, 0.9, 100, situation=code)
    rows = acceptance.snapshot()["records"]
    assert sorted(row["kind"] for row in rows) == ["", "code"]
    again = Acceptance.restored(json.loads(json.dumps(acceptance.snapshot())))
    acceptance.begin_turn()
    assert again.rates("d", "s", code) == pytest.approx(acceptance.rates("d", "s", code), abs=0.05)
    assert again.is_known(3) and not again.is_known(0)


def shipped(rate: float, rounds: int = 200, **where: Any) -> Acceptance:
    """What another machine learnt, as it comes out of a file."""
    found = Acceptance()
    learn(found, rate, rounds, **where)
    return Acceptance.restored(json.loads(json.dumps(found.snapshot())))


def test_what_was_shipped_is_where_a_first_chat_starts() -> None:
    acceptance = Acceptance()
    acceptance.expect(shipped(0.9))
    assert acceptance.rates("d", "s", COLD)[0] > 0.75, "nearer to 0.9 than to the prior, 0.5"
    assert acceptance.is_known(0)
    known = acceptance.estimate("d", "s", COLD)
    assert known.evidence == pytest.approx(SHIPPED_ROUNDS), "other texts are accepted otherwise"


def test_what_was_learnt_here_stands_before_what_was_shipped() -> None:
    acceptance = Acceptance()
    learn(acceptance, 0.1, 20)
    before = acceptance.rates("d", "s", COLD)
    acceptance.expect(shipped(0.9))
    assert acceptance.rates("d", "s", COLD) == before


def test_own_rounds_outweigh_what_was_shipped() -> None:
    acceptance = Acceptance()
    acceptance.expect(shipped(0.95))
    learn(acceptance, 0.2, 60)
    assert acceptance.rates("d", "s", COLD)[0] < 0.5


def test_counts_of_the_version_before_are_read() -> None:
    """They hold what their rounds took, and how many rounds each kind of text had."""
    acceptance = Acceptance()
    learn(acceptance, 0.8, 40)
    state = acceptance.snapshot()
    older = {**state, "records": [{**row, "ms": 9.0} for row in state["records"]], "rounds": {}}
    assert Acceptance.restored(older).rates("d", "s", COLD) == pytest.approx(
        Acceptance.restored(state).rates("d", "s", COLD)
    )


def test_rounds_without_a_draft_do_not_change_the_steps_per_token() -> None:
    """Else a drafter that is often silent looks too dear where it drafts."""
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.observe("d", "s", COLD, 4, 2, num_nodes=8, num_steps=2)
        acceptance.observe("d", "s", COLD, 0, 0, num_nodes=0, num_steps=1)
    for known in (acceptance, Acceptance.restored(acceptance.snapshot())):
        counts, _ = known.estimate("d", "s", COLD).levels[0]
        assert counts.steps / counts.drafted == pytest.approx(0.25)
        assert counts.silent_steps / counts.num_rounds == pytest.approx(0.5, abs=0.02)
