"""The decisions of a turn on simulated rounds: how much is lost, how soon it is regained."""

from __future__ import annotations

import itertools
from statistics import mean, median
from time import thread_time
from typing import Any

import pytest
import torch

from localspec.controller.acceptance import Situation
from localspec.controller.controller import ALLOWANCE, EXPLORED
from localspec.controller.costs import WIDTHS, Costs
from localspec.controller.policy import policy_of
from localspec.core.decoding import (
    AUTO,
    OFF,
    DraftPlan,
    Outcome,
    Proposal,
    SamplingParams,
    Sequence,
    Step,
    Verdict,
    chain,
)
from tests.kit.simulation import PLAIN_MS, Simulated, World, best_fixed_rate, verify_ms
from tests.kit.tally import Tally

COLD = SamplingParams()


# -- how good the choice is -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step_ms", "rate"),
    [(0.01, 0.3), (1.0, 0.9), (4.0, 0.6)],
)
def test_auto_reaches_the_best_fixed_choice(step_ms: float, rate: float) -> None:
    """Stationary acceptance, costs within 10 %: at least 0.97 of the best, the learning included.

    N = 8 runs of 1000 rounds; the mean has a standard error below 0.008 by chance alone.
    """
    drafters, reached = {"d": Simulated(step_ms, rate)}, []
    for seed in range(8):
        world = World(drafters, seed, noise=0.1)
        world.run(1000, COLD)
        reached.append(world.rate() / best_fixed_rate(drafters))
    assert mean(reached) >= 0.97, reached


def test_auto_reaches_the_best_of_three() -> None:
    drafters = {"a": Simulated(0.01, 0.35), "b": Simulated(1.5, 0.85), "c": Simulated(4.0, 0.95)}
    world = World(drafters, noise=0.1)
    world.run(4000, COLD)
    assert world.rate() >= 0.97 * best_fixed_rate(drafters)


@pytest.mark.parametrize("step_ms", [0.5, 2.0, 5.0])
def test_auto_is_never_much_worse_than_off(step_ms: float) -> None:
    """Acceptance 0.2: at least 0.97 of plain decoding, the learning included."""
    world = World({"d": Simulated(step_ms, 0.2)})
    world.run(2000, COLD)
    assert world.rate() >= 0.97 / PLAIN_MS


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "confidence"), [(0.9, 0.6), (0.5, 0.99), (0.2, 0.95)])
def test_a_confidence_that_is_wrong_is_corrected(rate: float, confidence: float) -> None:
    """The drafter says how sure it is, and is wrong about it. The rule by confidence adds its
    own choice of length, so 0.95 of the best fixed one is asked for once it has learnt, less
    0.01 for chance: the mean of four worlds has a standard error of 0.008 to 0.013."""
    reached = []
    for seed in range(4):
        drafter = Simulated(1.0, rate)
        drafter.confidence = confidence
        world = World({"d": drafter}, seed)
        world.run(2000, COLD)
        reached.append(world.rate(since=500) / best_fixed_rate({"d": drafter}))
    assert mean(reached) >= 0.94, reached


# -- probing ----------------------------------------------------------------------------------


def probes(world: World, drafter: str) -> list[int]:
    """Rounds at which `drafter` was looked at although it had lost."""
    return [i for i, s in enumerate(world.steps) if s.is_probe and s.drafter == drafter]


def test_each_kind_of_text_has_the_drafter_that_wins_there() -> None:
    """One drafter is good at code only, the other at stories only; the turns alternate."""
    code, story = Simulated(1.0, 0.9), Simulated(1.0, 0.1)
    world = World({"coder": code, "teller": story})
    for _ in range(8):
        for kind in ("code", "story"):
            world.kind = kind
            code.rate, story.rate = (0.9, 0.1) if kind == "code" else (0.1, 0.9)
            world.run(60, COLD)
            if _ >= 4:
                name = "coder" if kind == "code" else "teller"
                assert world.share(name, last=60) > 0.75, (kind, _)


@pytest.mark.slow
@pytest.mark.parametrize("step_ms", [0.5, 2.0, 6.0])
def test_looking_costs_at_most_a_hundredth_of_the_time(step_ms: float) -> None:
    world = World({"d": Simulated(step_ms, 0.1)})
    world.run(300, COLD)
    start = len(world.steps)
    world.run(4000, COLD)
    looks = [s for s in world.steps[start:] if s.is_probe]
    lost = sum(s.round_ms - s.num_output_tokens * PLAIN_MS for s in looks)
    total = sum(s.round_ms for s in world.steps[start:])
    assert looks, "what lost is looked at again"
    assert lost <= 1.5 * EXPLORED * total  # the budget is on average, the last look on top


@pytest.mark.slow
def test_a_drafter_that_becomes_good_is_found_again() -> None:
    drafter = Simulated(1.0, 0.05)
    world = World({"d": drafter})
    world.run(1000, COLD)
    assert world.share("d", last=200) < 0.1
    drafter.rate = 0.9
    world.run(4000, COLD)
    assert world.share("d", last=200) > 0.8


@pytest.mark.slow
def test_a_loser_to_another_drafter_is_found_again_when_it_becomes_better() -> None:
    loser = Simulated(1.0, 0.1)
    world = World({"winner": Simulated(1.0, 0.7), "loser": loser})
    world.run(1000, COLD)
    assert world.share("winner", last=200) > 0.8
    loser.rate = 0.97
    world.run(6000, COLD)
    assert world.share("loser", last=200) > 0.8


@pytest.mark.slow
def test_plain_decoding_is_measured_now_and_then_while_drafting_wins() -> None:
    """The gain that is shown is measured against it."""
    world = World({"d": Simulated(0.5, 0.9)})
    world.run(3000, COLD)
    assert any(s.is_probe and s.drafter == OFF for s in world.steps[1000:])


@pytest.mark.parametrize("busy", [{1: 40.0}, dict.fromkeys(WIDTHS, 4.0)])
@pytest.mark.parametrize("draft_busy", [1.0, 4.0])
def test_what_was_measured_on_a_busy_machine_is_found_out(
    busy: dict[int, float], draft_busy: float
) -> None:
    """Plain decoding seemed hopeless, so it was never tried, and every gain was far too high."""
    world = World({"d": Simulated(0.5, 0.9)})
    for width, times in busy.items():
        world.controller.costs.set_verify(width, 0, times * verify_ms(width - 1))
    world.controller.costs.set_draft_step("d", 0, draft_busy * 0.5)
    world.run(80, COLD)
    costs = world.controller.costs
    assert costs.plain_ms(0) == pytest.approx(PLAIN_MS, rel=0.25)
    assert costs.draft_ms("d", 1, 0) == pytest.approx(0.5, rel=0.25)
    assert world.share("d", last=40) > 0.8


def test_a_drafter_that_becomes_bad_is_dropped_soon() -> None:
    drafter = Simulated(2.0, 0.9)
    world = World({"d": drafter})
    world.run(500, COLD)
    drafter.rate = 0.02
    world.run(300, COLD)
    assert world.share("d", last=100) < 0.1


# -- steadiness -------------------------------------------------------------------------------


def test_near_ties_do_not_make_the_choice_flicker() -> None:
    """Two drafters within a percent of each other: few changes in 1500 rounds."""
    world = World({"a": Simulated(1.0, 0.80), "b": Simulated(1.0, 0.801)}, noise=0.05)
    world.run(1500, COLD)
    chosen = [s.drafter for s in world.steps if not s.is_probe][300:]
    changes = sum(a != b for a, b in itertools.pairwise(chosen))
    assert changes < 60


# -- never slower -----------------------------------------------------------------------------


def drafted_round(accepted: int, took_ms: float) -> Outcome:
    """Of four draft tokens."""
    step = Step("d", 4, accepted, accepted + 1, 4.0, took_ms - 4.0, 2, signal="s")
    verdict = Verdict(tuple(range(accepted)), 5)
    return Outcome(step, chain((5,) * 4), verdict, torch.empty(0))


def test_drafting_that_loses_in_a_turn_ends_there_and_not_in_the_next() -> None:
    """What was accepted of other texts counts for much, but not against this one."""
    world = World({"d": Simulated(1.0, 0.5)})
    for _ in range(100):
        world.controller.acceptance.observe("d", "s", Situation(0), 4, 2)
    used = list[int]()
    for _ in range(2):
        world.controller.budget(0).saved = 0.0  # nothing is explored
        sequence = turn_of((1, 2), 1000)
        policy = policy_of(world.controller, COLD, AUTO, None)
        num_used = 0
        while policy.plan(sequence).drafter == "d" and num_used < 50:
            policy.observe(sequence, drafted_round(accepted=0, took_ms=15.0))
            num_used += 1
        used.append(num_used)
    assert 0 < used[0] <= 20 and used[1] > 0


# -- the rule within a round ------------------------------------------------------------------


def plan_of(world: World) -> DraftPlan:
    rng: Any = None
    sequence = Sequence((1, 2, 3), COLD, 1000, frozenset(), rng)
    plan: DraftPlan = policy_of(world.controller, COLD, "d", None).plan(sequence)
    return plan


def test_a_confident_draft_goes_on_and_an_unsure_one_ends() -> None:
    drafter = Simulated(1.0, 0.8)
    drafter.confidence = 0.8
    world = World({"d": drafter})
    world.run(300, COLD)
    sure, unsure = plan_of(world), plan_of(world)
    assert sure.keep_drafting is not None and unsure.keep_drafting is not None
    assert sure.keep_drafting(0, 0.999)
    assert not unsure.keep_drafting(0, 0.01)


def test_the_rule_ends_at_the_widest_round_that_was_measured() -> None:
    drafter = Simulated(0.0001, 0.99)
    drafter.confidence = 0.99
    world = World({"d": drafter})
    world.run(300, COLD)
    assert max(step.num_draft_tokens for step in world.steps) <= 15


# -- host time --------------------------------------------------------------------------------


def test_deciding_and_learning_take_little_of_a_round(tally: Tally) -> None:
    """Three drafters, 300 rounds; about 100 us each."""
    names = {"a": Simulated(0.1, 0.5), "b": Simulated(1.0, 0.8), "c": Simulated(2.0, 0.9)}
    world = World(names)
    rng: Any = None
    sequence = Sequence(tuple(range(2000)), COLD, 10**6, frozenset(), rng)
    policy = policy_of(world.controller, COLD, "auto", None)
    times = []
    for _ in range(300):
        started = thread_time()
        plan = policy.plan(sequence)
        step = Step(plan.drafter, plan.num_draft_tokens, 1, 2, 1.0, 10.0, 1999, signal="s")
        drafted = chain((5,) * plan.num_draft_tokens)
        policy.observe(sequence, Outcome(step, drafted, Verdict((0,), 5), torch.empty(0)))
        times.append(thread_time() - started)
    tally.measured("a decision", 1e6 * median(times), 500.0, "us of processor time")


@pytest.mark.slow
def test_one_disturbed_look_does_not_end_all_later_ones() -> None:
    """A machine that was suspended while a drafter was looked at makes that round take an hour."""
    drafter = Simulated(1.0, 0.05)
    world = World({"d": drafter})
    world.run(1000, COLD)
    world.controller.budget(0).explored(-3_600_000.0 / PLAIN_MS)
    drafter.rate = 0.9
    world.run(6000, COLD)
    assert world.share("d", last=500) > 0.8


class Alternating(Simulated):
    """Its signal changes every round. num_asked: how often it was asked for it."""

    num_asked = 0

    def signal(self, sequence: Sequence) -> str | None:
        self.num_asked += 1
        return None if self.is_silent else f"s{self.num_asked % 2}"


def test_a_temperature_whose_costs_are_not_measured_is_decoded_plainly() -> None:
    """Greedy rounds are measured first, so a sampled turn may come before its costs are known."""
    world = World({"d": Alternating(0.5, 0.9)})
    world.run(50, COLD)
    world.controller.sampled_costs = Costs()
    world.run(50, SamplingParams(temperature=0.7))
    assert {step.drafter for step in world.steps[-50:]} == {OFF}


def test_a_signal_that_changes_is_noticed_in_the_same_round() -> None:
    """As where a lookup finds a repetition: it is not waited for until options are weighed."""
    world = World({"d": Alternating(0.5, 0.9)})
    drafter: Any = world.controller.drafters["d"]
    world.run(200, COLD)
    drafter.is_silent = True
    world.run(3, COLD)
    drafter.is_silent = False
    world.run(1, COLD)
    assert [step.drafter for step in world.steps[-4:]] == [OFF, OFF, OFF, "d"]


class Declining(Simulated):
    """Asked for a tree it takes its step's time, and finds that nothing pays."""

    shapes_itself = True


def run_declining(draft_ms: float, num_rounds: int) -> tuple[int, World]:
    """How often it was asked."""
    world, num_asked = World({"tree": Declining(draft_ms, 0.0)}), 0
    sampling, rng = SamplingParams(), None
    for _ in range(num_rounds // 400):
        sequence = Sequence((1, 2), sampling, 10**9, frozenset(), rng)  # type: ignore[arg-type]
        policy = policy_of(world.controller, sampling, AUTO, None)
        for _ in range(400):
            plan = policy.plan(sequence)
            was_asked = plan.drafter == "tree"
            num_asked += was_asked
            took_ms = draft_ms if was_asked else 0.0
            is_probe = plan.is_probe and plan.drafter == OFF
            step = Step(OFF, 0, 0, 1, took_ms, PLAIN_MS, 100, is_probe, plan.signal)
            sequence.append([9])
            policy.observe(sequence, Outcome(step, Proposal(), Verdict((), 9), torch.empty(0)))
    return num_asked, world


@pytest.mark.slow
@pytest.mark.parametrize("draft_ms", [0.3, 1.0, 3.0])
def test_a_look_in_vain_costs_what_it_took_and_the_next_comes_later(draft_ms: float) -> None:
    num_asked, _ = run_declining(draft_ms, 4000)
    extra = num_asked * draft_ms / (4000 * PLAIN_MS)
    assert 0 < extra < EXPLORED + 2 * ALLOWANCE / 4000, f"asking took {extra:.2%} of the time"


# -- reading late -----------------------------------------------------------------------------

LONG_PROMPT = tuple(range(1000))
READ_MS = 0.3  # a token: 300 ms for the prompt, 30 plain rounds


def reader(read_ms: float = READ_MS) -> World:
    """A drafter that gains 2.6 tokens in 1.2 plain rounds, and has to read the prompt first."""
    world = World({"d": Simulated(0.5, 0.7)})
    world.run(400, COLD)
    world.controller.catch_up.observe("d", 1000, 1000 * read_ms)
    return world


def turn_of(prompt: tuple[int, ...], max_tokens: int) -> Sequence:
    rng: Any = None
    return Sequence(prompt, COLD, max_tokens, frozenset(), rng)


def drafters_of(world: World, sequence: Sequence, num_rounds: int) -> list[str]:
    policy = policy_of(world.controller, COLD, AUTO, None)
    start = len(world.steps)
    for _ in range(num_rounds):
        world.game.round(sequence, policy)
    return [step.drafter for step in world.steps[start:]]


def test_the_first_token_waits_for_no_reading_and_then_the_drafter_reads() -> None:
    world = reader(read_ms=0.013)  # 1.3 plain rounds
    assert drafters_of(world, turn_of(LONG_PROMPT, 500), 4) == [OFF, "d", "d", "d"]
    assert drafters_of(reader(), turn_of((1, 2), 500), 1) == ["d"], "there is nothing to read"


def test_a_short_reply_is_not_worth_reading_the_prompt() -> None:
    assert set(drafters_of(reader(), turn_of(LONG_PROMPT, 20), 18)) == {OFF}
    assert set(drafters_of(reader(), turn_of(LONG_PROMPT, 500), 18)) == {OFF}, "it may end here"


def test_a_reply_that_goes_on_is_worth_reading_an_expensive_prompt() -> None:
    """Once a third of its tokens would gain that: of 48 plain rounds, and more as it grows."""
    world = reader()
    world.controller.catch_up.observe("d", 10000, 10000 * 1.6 * READ_MS)
    used = drafters_of(world, turn_of(LONG_PROMPT, 2000), 700)
    assert 250 < used.index("d") < 600


def test_what_was_read_of_the_conversation_is_not_read_again() -> None:
    world = reader(read_ms=0.013)
    sequence = turn_of(LONG_PROMPT, 500)
    drafters_of(world, sequence, 8)
    next_turn = turn_of((*sequence.tokens, 7, 8, 9), 20)
    assert drafters_of(world, next_turn, 2) == ["d", "d"]
    world.controller.catch_up.observe("d", 10000, 10000 * READ_MS)
    assert drafters_of(world, turn_of((5, *LONG_PROMPT), 20), 2) == [OFF, OFF], "another one"


@pytest.mark.parametrize("length", [None, 4])
def test_reading_is_no_cost_of_a_drafter_s_step(length: int | None) -> None:
    """Also where the drafter was asked for by name."""
    world = World({"d": Simulated(0.5, 0.7)})
    policy = policy_of(world.controller, COLD, "d", length)
    sequence = turn_of(LONG_PROMPT, 500)
    plan = policy.plan(sequence)
    step = Step("d", 4, 1, 2, 300.0, 11.0, 999, signal="s")
    for _ in range(2):  # the second one really takes so long
        policy.observe(sequence, Outcome(step, chain((5,) * 4), Verdict((0,), 5), torch.empty(0)))
    dearer = world.controller.costs.draft_ms("d", 1, 999)
    assert plan.drafter == "d" and dearer is not None and 0.5 < dearer < 0.55


def test_rounds_by_name_teach_acceptance_before_costs_are_measured() -> None:
    world = World({"d": Simulated(0.5, 0.9)}, is_measured=False)
    world.run(40, COLD, requested="d")
    known = world.controller.acceptance.estimate("d", "s", Situation(0))
    assert known.evidence > 20.0 and known.rates[0] > 0.75


def test_one_disturbed_draft_does_not_end_drafting() -> None:
    """A machine that was suspended during a draft makes that round take an hour."""
    world = World({"d": Simulated(1.0, 0.9)})
    world.run(100, COLD)
    sequence = turn_of((1, 2), 1000)
    policy = policy_of(world.controller, COLD, AUTO, None)
    while policy.plan(sequence).drafter != "d":
        world.game.round(sequence, policy)
    policy.observe(sequence, drafted_round(accepted=4, took_ms=3_600_000.0))
    before = len(world.steps)
    for _ in range(60):
        world.game.round(sequence, policy)
    drafted = [step.num_draft_tokens > 0 for step in world.steps[before:]]
    assert sum(drafted) > 40
