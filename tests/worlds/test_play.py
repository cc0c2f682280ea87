"""Rounds of a made-up text, and the real controller against the best fixed arm in hindsight."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from statistics import harmonic_mean, mean
from typing import Any

import pytest

from localspec.controller.acceptance import Situation
from localspec.controller.controller import Controller
from localspec.controller.costs import Costs
from localspec.controller.policy import policy_of
from localspec.core.decoding import OFF, SamplingParams, Sequence, Step
from tests.worlds.fixed_arms import FixedArms
from tests.worlds.made_up import (
    FLAT,
    MODEL,
    RATES,
    adversarial,
    alternating,
    contest_worlds,
    first_starts,
    is_long,
    many_ways,
    misjudged,
    stationary,
    summaries,
    turning,
    two_tasks,
)
from tests.worlds.play import (
    FixedArm,
    Game,
    controller_of,
    play_adaptive,
    play_fixed,
    readers_of,
    review,
)
from tests.worlds.world import Stretch, Track, World

COSTS = {
    "verify_ms": {"1": {"128": 10.0}, "2": {"128": 12.0}, "16": {"128": 12.0}},
    "draft_step_ms": {MODEL: {"128": 1.0}},
}
BOTH_PRICES = ["flat", pytest.param("steep", marks=pytest.mark.slow)]
RIGHT_THRICE = (True, True, True, False) * 3  # 12 tokens


def world(is_right: tuple[bool, ...] = RIGHT_THRICE, **facts: Any) -> World:
    track = Track(("model",) * len(is_right), is_right, facts.pop("confidences", None))
    return World("by hand", {MODEL: track}, (Stretch(0, len(is_right), 5),), COSTS, **facts)


def play_steps(found: World) -> list[Step]:
    game = Game(found, readers_of(found), Random(0), jitter=0.0)
    for turn in found.turns:
        game.turn(turn, FixedArm(MODEL, 4))
    return game.steps


def ratio_to_best(found: World) -> float:
    """To the best fixed arm."""
    return play_adaptive(found, "auto", 0).tokens_per_second / FixedArms(found).rate_by_kind()


@cache
def contest() -> tuple[World, ...]:
    return contest_worlds(0)


@pytest.mark.parametrize("made", [alternating("flat", 0), summaries(0), first_starts(0)[0]])
def test_a_fixed_arm_takes_what_its_game_takes(made: World) -> None:
    """With silences, with prompts to read, and with replies that end before they must."""
    found = replace(made, turns=made.turns[:4])
    arms = FixedArms(found)
    for name, length in ((OFF, 0), (found.priced[0], 4), (found.priced[-1], 15)):
        assert arms.rate(name, length) == pytest.approx(
            play_fixed(found, name, length).tokens_per_second
        )


def test_plain_decoding_costs_a_plain_round_a_token() -> None:
    played = play_fixed(world(), OFF, 0)
    assert (played.num_tokens, played.num_rounds, played.ms) == (12, 12, 120.0)
    assert played.host_us is None


def test_a_draft_is_accepted_up_to_its_first_wrong_token() -> None:
    """Each round three are right and the fourth wrong; the last one is cut to what remains."""
    played = play_fixed(world(), MODEL, 4)
    assert (played.num_rounds, played.num_tokens) == (3, 12)
    assert (played.num_draft_tokens, played.num_accepted_tokens) == (4 + 4 + 3, 9)
    assert played.ms == pytest.approx(3 * 12.0 + 11 * 1.0)


def test_the_bonus_token_of_a_whole_draft_counts() -> None:
    played = play_fixed(world((True,) * 12), MODEL, 2)
    assert (played.num_rounds, played.num_accepted_tokens) == (4, 8)


def test_no_draft_is_made_for_the_last_token() -> None:
    played = play_fixed(world((True,) * 4), MODEL, 2)
    assert (played.num_rounds, played.num_draft_tokens) == (2, 2)  # 3 tokens, then 1 plain


def test_where_there_is_nothing_to_propose_the_round_is_plain() -> None:
    silent = Track((None,) * 12, (True,) * 12)
    played = play_fixed(replace(world(), tracks={MODEL: silent}), MODEL, 4)
    assert (played.num_draft_tokens, played.ms) == (0, 120.0)


def test_a_draft_ends_after_the_token_that_ended_it() -> None:
    found = world((True,) * 12, confidences=(0.9, 0.1) * 6)
    reader = readers_of(found)[MODEL]
    reader.begin(found.turns[0])
    sequence = Sequence((1,) * 5, SamplingParams(), 12, frozenset(), None)  # type: ignore[arg-type]
    plan = replace(FixedArm(MODEL, 8).plan(sequence), keep_drafting=lambda i, c: c > 0.5)
    proposal = reader.propose(sequence, plan)
    assert proposal.confidences == (0.9, 0.1) and proposal.tokens == (1, 1)


def test_a_reader_speaks_of_its_own_turn() -> None:
    found = replace(world(), turns=(Stretch(0, 4, 5), Stretch(4, 8, 50)))
    reader = readers_of(found)[MODEL]
    reader.begin(found.turns[1])
    sequence = Sequence((1,) * 50, SamplingParams(), 8, frozenset(), None)  # type: ignore[arg-type]
    assert reader.propose(sequence, FixedArm(MODEL, 15).plan(sequence)).tokens == (1, 1, 1, 0) * 2


def test_a_controller_starts_from_what_is_believed() -> None:
    found = misjudged("flat", 0.7, 0)
    costs: Costs = controller_of(found, readers_of(found)).costs
    assert costs.verify_ms(16, 128) == pytest.approx(0.7 * FLAT["verify_ms"]["16"]["128"])
    assert costs.plain_ms(128) == FLAT["verify_ms"]["1"]["128"]


@pytest.mark.slow
def test_the_same_seed_plays_the_same_game() -> None:
    found = stationary("flat", 0.8, 3)
    found = replace(found, turns=found.turns[: len(found.turns) // 4])
    first, again = (play_adaptive(found, "auto", 3, charges_host=True) for _ in range(2))
    assert first == again and first.host_us is not None


def test_planning_is_charged_where_that_is_asked_for() -> None:
    found = replace(stationary("flat", 0.8, 0), turns=stationary("flat", 0.8, 0).turns[:2])
    free, charged = (play_adaptive(found, "off", 0, each) for each in (False, True))
    assert free.host_us is None and charged.host_us is not None and charged.host_us > 0.0
    host_ms = charged.host_us * charged.num_rounds / 1000.0
    assert charged.ms == pytest.approx(free.ms + host_ms)


def test_worlds_are_what_they_are_called() -> None:
    sure, silent = stationary("flat", 0.8, 0), stationary("flat", 0.8, 0, is_sure=False)
    track = sure.tracks[MODEL]
    assert sum(track.is_right) / len(track.is_right) == pytest.approx(0.8, abs=0.02)
    assert silent.tracks[MODEL].confidences is None and track.confidences is not None
    confident = [r for r, c in zip(track.is_right, track.confidences, strict=True) if c > 0.9]
    assert sum(confident) / len(confident) > 0.95


def test_code_and_prose_alternate() -> None:
    track = alternating("flat", 0).tracks[MODEL].is_right
    code = [right for i, right in enumerate(track) if i // 40 % 2 == 0]
    prose = [right for i, right in enumerate(track) if i // 40 % 2 == 1]
    assert sum(code) / len(code) > 0.9 and sum(prose) / len(prose) < 0.5


# The controller, judged. 12,000 tokens a world, cold, everything it spends on learning included.


@pytest.mark.slow
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("price", BOTH_PRICES)
def test_auto_reaches_the_best_fixed_arm_where_nothing_changes(price: str, rate: float) -> None:
    is_sure = price == "flat"  # silent where rounds are dear
    found = stationary(price, rate, 0, is_sure)
    assert ratio_to_best(found) >= (0.98 if is_sure else 0.975)


@pytest.mark.slow
@pytest.mark.parametrize("price", BOTH_PRICES)
def test_auto_loses_next_to_nothing_to_drafters_that_are_always_wrong(price: str) -> None:
    found = adversarial(price, 0)
    off = play_fixed(found, OFF, 0).tokens_per_second
    assert play_adaptive(found, "auto", 0).tokens_per_second >= 0.97 * off


@pytest.mark.slow
@pytest.mark.parametrize("price", BOTH_PRICES)
def test_auto_beats_every_fixed_arm_where_code_and_prose_alternate(price: str) -> None:
    assert ratio_to_best(alternating(price, 0)) >= 1.05


@pytest.mark.slow
@pytest.mark.parametrize("price", BOTH_PRICES)
def test_auto_follows_a_drafter_that_turns_bad_and_good_again(price: str) -> None:
    # Over ten worlds the mean is 0.97 and the spread 0.03, so one world is asked for less.
    assert ratio_to_best(turning(price, 0)) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "least"),
    [("3 ways, flat", 0.9), ("all lose", 0.93), ("misjudged", 0.75), ("slower", 0.8)],
)
def test_auto_comes_near_the_best_way_of_each_kind_of_text(feature: str, least: float) -> None:
    """Short turns of three kinds; all that is spent on learning is included."""
    found = next(each for each in contest() if feature in each.name)
    assert (
        play_adaptive(found, "auto", 0).tokens_per_second >= least * FixedArms(found).rate_by_kind()
    )


@pytest.mark.slow
@pytest.mark.parametrize("index", range(3))
def test_a_first_start_is_not_slower_than_plain_decoding(index: int) -> None:
    """Shipped acceptance is 0.3 too high. In the second world every way of drafting loses."""
    reached = []
    for seed in range(4):
        found = first_starts(seed)[index]
        plain = play_fixed(found, OFF, 0).tokens_per_second
        reached.append(play_adaptive(found, "auto", seed).tokens_per_second / plain)
    assert mean(reached) >= 0.975 and min(reached) >= 0.96, reached


@pytest.mark.slow
@pytest.mark.parametrize("price", ["one thread", "flat", "two threads"])
def test_reading_a_long_prompt_for_a_short_reply_loses_next_to_nothing(price: str) -> None:
    """Reading takes 7 to 13 plain rounds, which a reply of 16 tokens cannot earn."""
    for seed in range(3):
        found = summaries(seed, price)
        plain = play_fixed(found, OFF, 0).tokens_per_second
        assert play_adaptive(found, "auto", seed).tokens_per_second >= 0.97 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("long_rate", "least"), [(0.15, 0.92), (0.45, 0.95)])
def test_what_one_task_taught_loses_little_on_another(long_rate: float, least: float) -> None:
    """Short prompts gain; long ones, of the same kind of text, would lose by every drafter."""
    short, long = list[float](), list[float]()
    for seed in range(4):
        found = two_tasks(seed, long_rate=long_rate)
        gains = gains_by_turn(found, seed)
        long.append(harmonic_mean(gains[2::3]))
        short.append(harmonic_mean([gain for n, gain in enumerate(gains) if not is_long(n)]))
    assert mean(long) >= least and mean(short) >= 1.3, (long, short)


def gains_by_turn(found: World, seed: int) -> list[float]:
    """Of `auto` over plain decoding."""
    readers = readers_of(found)
    controller = controller_of(found, readers)
    games = {name: Game(found, readers, Random(seed)) for name in ("auto", OFF)}
    taken = {name: [0.0] for name in games}
    for turn in found.turns:
        for name, game in games.items():
            game.turn(turn, policy_of(controller, game.sampling, name, None) if name == "auto"
                      else FixedArm(OFF, 0))  # fmt: skip
            taken[name].append(game.result().ms)
    return [
        (plain_end - plain_start) / (auto_end - auto_start)
        for (plain_start, plain_end), (auto_start, auto_end) in zip(
            pairwise(taken[OFF]), pairwise(taken["auto"]), strict=True
        )
    ]


def test_a_drafter_reads_what_it_missed_before_it_drafts() -> None:
    found = replace(world(), catch_up=0.1)
    first, *_ = play_steps(found)
    assert first.draft_ms == pytest.approx(4 * 1.0 + 0.1 * 5 * 1.0)


def test_acceptance_may_fall_by_the_place_in_a_draft_and_a_machine_slow_down() -> None:
    track = Track(("s",) * 8, (), None, (2, 1, 0, 3, 3, 3, 3, 3))
    assert [track.num_right(place, 2) for place in range(4)] == [2, 1, 0, 2]
    found = replace(world(), tracks={MODEL: track}, turns=(Stretch(0, 8, 5),), slow=(0, 3, 2.0))
    assert play_fixed(found, OFF, 0).ms == 3 * 20.0 + 5 * 10.0


@pytest.mark.slow
def test_a_controller_that_always_drafts_is_seen_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick can tell: with expectations of 16 tokens a ms, auto drafts to its loss."""
    found = adversarial("steep", 0)
    found = replace(found, turns=found.turns[: len(found.turns) // 4])
    option = Controller.option

    def hopeful(self: Controller, *arguments: Any) -> Any:
        believed: Any = option(self, *arguments)
        return replace(believed, rate=16.0, scale=16.0 / believed.rate)

    monkeypatch.setattr(Controller, "option", hopeful)
    off = play_fixed(found, OFF, 0).tokens_per_second
    assert play_adaptive(found, "auto", 0).tokens_per_second < 0.9 * off


def test_a_review_teaches_the_acceptance_of_a_drafter_that_never_drafted() -> None:
    found = stationary("flat", 0.8, 0)
    readers = readers_of(found)
    controller = controller_of(found, readers)
    game = Game(found, readers, Random(0))
    turn = found.turns[0]
    written = game.turn(turn, policy_of(controller, game.sampling, OFF, None))
    costs = controller.costs.snapshot()
    review(controller, readers, written, turn.workload, game.steps)
    (rate, *_) = controller.acceptance.rates(MODEL, "model", Situation(0))
    assert rate == pytest.approx(0.8, abs=0.15)
    assert controller.costs.snapshot() == costs


@pytest.mark.slow
def test_reviews_find_the_best_of_many_drafters_sooner_and_keep_trying_bad_ones() -> None:
    many, turns = many_ways(0, 11, "flat", 20.0, 24), turning("steep", 0)
    without, found = (
        [
            play_adaptive(each, "auto", 0, reviews=reviews).tokens_per_second
            for each in (many, turns)
        ]
        for reviews in (False, True)
    )
    assert found[0] > 1.03 * without[0]
    assert found[1] > 0.98 * without[1], "it believes for ever that the drafter is bad"
