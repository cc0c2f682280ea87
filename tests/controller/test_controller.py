"""What the controller chooses from planted costs and acceptances, and what it keeps."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from localspec.controller.acceptance import Acceptance, Situation
from localspec.controller.catch_up import IN_TARGET, CatchUp
from localspec.controller.controller import (
    Controller,
    identity,
    measurements,
)
from localspec.controller.costs import Costs
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
from localspec.core.speculation import best_length, expected_tokens
from tests.kit.simulation import Simulated, World, best_fixed_rate, verify_ms

COLD, HOT = SamplingParams(0.0), SamplingParams(1.0)
TEXT = Sequence((1,) * 101, COLD, 100, frozenset(), torch.Generator())


def test_best_length_is_the_one_of_an_exhaustive_search() -> None:
    for rate in (0.05, 0.3, 0.6, 0.8, 0.95):
        for draft_ms in (0.1, 1.0, 4.0):
            curve = [10.0 + draft_ms * n for n in range(16)]
            wanted = max(range(1, 16), key=lambda n: sum(rate**i for i in range(n + 1)) / curve[n])
            length, found = best_length([rate] * 16, curve)
            assert length == wanted
            assert found == pytest.approx(expected_tokens([rate] * 16, wanted) / curve[wanted])


def length_of(world: World, sampling: SamplingParams) -> float:
    """Mean γ of the last 100 drafting rounds of 400."""
    world.run(400, sampling)
    lengths = [s.num_draft_tokens for s in world.steps[-100:] if s.num_draft_tokens]
    return sum(lengths) / max(1, len(lengths))


@pytest.mark.slow
@pytest.mark.parametrize("is_swapped", [False, True])
def test_two_temperatures_have_two_lengths(is_swapped: bool) -> None:
    """Planted acceptances: 0.95 in one bucket, 0.55 in the other; swapped they swap."""
    high, low = (HOT, COLD) if is_swapped else (COLD, HOT)
    drafter = Simulated(step_ms=1.0, rate=0.95)
    world = World({"d": drafter})
    long = length_of(world, high)
    drafter.rate = 0.55
    short = length_of(world, low)
    assert long >= short + 2
    drafter.rate = 0.95
    assert length_of(world, high) == pytest.approx(long, abs=2)


@pytest.mark.parametrize(("step_ms", "wins"), [(1.0, True), (9.0, False)])
def test_a_self_draft_wins_or_loses_by_its_cost(step_ms: float, wins: bool) -> None:
    """Right nine times in ten; a step of 1 ms or of 9 against 10 ms of the target."""
    world = World({"self_quant": Simulated(step_ms, 0.9)})
    world.run(300, COLD)
    assert (world.share("self_quant") > 0.5) == wins


def test_the_cheaper_of_two_equal_drafters_wins() -> None:
    world = World({"dear": Simulated(2.0, 0.8), "cheap": Simulated(0.5, 0.8)})
    world.run(400, COLD)
    assert world.share("cheap", last=200) > 0.85


def test_the_better_of_two_wins_although_the_worse_was_first() -> None:
    world = World({"worse": Simulated(1.0, 0.4), "better": Simulated(1.0, 0.9)})
    world.run(1500, COLD)
    assert world.share("better", last=500) > 0.85


def test_off_names_the_drafter_and_the_numbers() -> None:
    world = World({"d": Simulated(4.0, 0.05)})
    world.run(200, COLD)
    assert world.steps[-1].num_draft_tokens == 0
    assert re.search(r"with d it would be \d+\.\dx slower", world.reasons[-1])


def test_what_can_never_pay_is_looked_at_twice_and_no_more() -> None:
    world = World({"d": Simulated(50.0, 1.0)})
    world.run(2000, COLD)
    assert sum(step.drafter == "d" for step in world.steps) == 2
    assert "even with every token accepted" in world.reasons[-1]


def test_a_drafter_that_was_measured_far_too_dear_is_found_out() -> None:
    """Another program was computing while its step was measured."""
    world = World({"d": Simulated(0.5, 0.9)})
    world.controller.costs.set_draft_step("d", 0, 20 * 0.5)
    world.run(1000, COLD)
    assert world.share("d", last=100) > 0.8


def test_a_reason_promises_no_gain_that_the_rounds_after_it_may_contradict() -> None:
    """Two drafters whose acceptance drops, after drafting was the best choice."""
    drafters = {"d": Simulated(0.5, 0.9), "e": Simulated(0.2, 0.6)}
    world = World(drafters)
    world.run(60, COLD)
    drafters["d"].rate = drafters["e"].rate = 0.1
    world.run(120, COLD)
    assert any(reason.startswith("Drafting with d, ") for reason in world.reasons)
    with_figures = [reason for reason in world.reasons if re.search(r"[0-9.]+x|[0-9] ?%", reason)]
    assert all("x slower" in reason for reason in with_figures), world.reasons


def test_fixed_choices_are_kept() -> None:
    drafters = {"d": Simulated(1.0, 0.1), "e": Simulated(0.1, 0.9)}
    for requested, length, wanted in (
        ("d", 3, ("d", 3)),
        (OFF, None, (OFF, 0)),
        ("e", 0, (OFF, 0)),
    ):
        world = World(drafters)
        world.run(50, COLD, requested, length)
        assert {(s.drafter, s.num_draft_tokens) for s in world.steps} == {wanted}


def test_a_drafter_asked_for_by_name_drafts_even_where_it_loses() -> None:
    world = World({"d": Simulated(9.0, 0.1), "e": Simulated(0.1, 0.9)})
    world.run(100, COLD, "d")
    assert world.share("d") == 1.0


@pytest.mark.parametrize("length", [1, 5, 15, 40, 64])
def test_auto_with_a_fixed_length_drafts_that_many_or_none(length: int) -> None:
    world = World({"d": Simulated(0.1, 0.95)})
    world.run(100, COLD, AUTO, length)
    assert {s.num_draft_tokens for s in world.steps} <= {0, length}


def test_auto_with_a_fixed_length_that_loses_is_off() -> None:
    """One draft token would pay here; the twelve asked for do not."""
    world = World({"d": Simulated(3.0, 0.6)})
    world.run(300, COLD, AUTO, 12)
    assert world.share("d", last=100) < 0.05


def test_nothing_measured_is_plain_and_says_so() -> None:
    world = World({"d": Simulated(0.1, 0.9)}, is_measured=False)
    world.run(20, COLD)
    assert world.share("d") == 0.0 and "not been measured" in world.reasons[-1]
    world.run(5, COLD, "d")
    assert world.steps[-1].drafter == "d"  # asked for by name it drafts all the same


def test_a_drafter_without_anything_to_say_is_passed_over() -> None:
    silent = Simulated(0.1, 0.9)
    silent.is_silent = True
    world = World({"d": silent})
    world.run(20, COLD)
    assert world.share("d") == 0.0 and "nothing" not in world.reasons[-1]
    assert "no drafter has anything to propose" in world.reasons[-1]


# -- state ------------------------------------------------------------------------------------


def learnt() -> World:
    world = World({"d": Simulated(1.0, 0.9)})
    world.run(200, COLD)
    return world


def test_restored_state_decides_the_same_at_once() -> None:
    world = learnt()
    state = json.loads(json.dumps(world.controller.snapshot()))
    fresh = World({"d": Simulated(1.0, 0.9)}, is_measured=False)
    assert fresh.controller.restore(state)
    fresh.run(3, COLD)
    assert [step.num_draft_tokens for step in fresh.steps[:2]] == [0, 0], (
        "plain decoding, looked at"
    )
    old = [step for step in world.steps if not step.is_probe][-1].num_draft_tokens
    assert fresh.steps[-1].drafter == "d" and abs(fresh.steps[-1].num_draft_tokens - old) <= 2


def test_restored_state_yields_to_what_is_seen_now() -> None:
    fresh = World({"d": Simulated(4.0, 0.05)}, is_measured=False)
    state = learnt().controller.snapshot()
    state["costs"]["draft_step_ms"]["d"] = {"0": 4.0}
    assert fresh.controller.restore(state)
    fresh.run(300, COLD)
    assert fresh.share("d", last=100) < 0.05


def garbage() -> list[Any]:
    good = learnt().controller.snapshot()
    costs, acceptance = good["costs"], good["acceptance"]
    record = acceptance["records"][0]
    zero = {**costs, "verify_ms": {"1": {"100": 0.0}}}
    return [
        {},
        {"version": 1},
        {**good, "version": 99},
        {**good, "costs": None},
        {**good, "costs": []},
        {**good, "costs": zero},
        {**good, "costs": {**costs, "verify_ms": {"1": {"100": 10**400}}}},
        {**good, "costs": {**costs, "verify_ms": {"one": {"100": 3.0}}}},
        {**good, "costs": {**costs, "draft_step_ms": {"d": {"100": math.nan}}}},
        {**good, "acceptance": {"records": "x", "confidence": []}},
        {**good, "acceptance": {**acceptance, "records": [{**record, "tried": [math.nan] * 16}]}},
        {**good, "acceptance": {**acceptance, "confidence": [{"drafter": "d"}]}},
    ]


@pytest.mark.slow
def test_garbage_is_refused_and_changes_nothing() -> None:
    for state in garbage():
        world = learnt()
        before = world.controller.snapshot()
        assert not world.controller.restore(state), state
        assert world.controller.snapshot() == before
        world.run(5, COLD)


def test_best_fixed_rate_of_the_simulation_is_sane() -> None:
    """The yardstick itself: a perfect free draft of 15 tokens, and a useless one."""
    assert best_fixed_rate({"d": Simulated(0.0, 1.0)}) == pytest.approx(16 / 13.0)
    assert best_fixed_rate({"d": Simulated(5.0, 0.0)}) == pytest.approx(1 / 10.0)


# plain decoding by itself


def plain_round(verify_ms: float, draft_ms: float = 0.0) -> Outcome:
    step = Step("off", 0, 0, 1, draft_ms, verify_ms, 100)
    return Outcome(step, Proposal(), Verdict((), 1), torch.empty(0))


def drafted_round(verify_ms: float) -> Outcome:
    step = Step("d", 2, 1, 2, 2.0, verify_ms, 100, signal="s")
    return Outcome(step, chain((5, 6)), Verdict((0,), 1), torch.empty(0))


def learn(controller: Controller, outcome: Outcome) -> None:
    """A round of a long text that the drafter has read."""
    step = outcome.step
    plan = DraftPlan(step.drafter, step.num_draft_tokens, signal=step.signal)
    controller.catch_up.read(step.drafter, TEXT, step.context_length)
    controller.observe(Situation(0), TEXT, plan, outcome)


def test_drafts_that_no_round_ran_teach_acceptance_and_no_costs() -> None:
    controller = World({"d": Simulated(1.0, 0.5)}).controller
    before = controller.snapshot()["costs"]
    for _ in range(50):
        controller.observe_acceptance(Situation(0), "d", "s", chain((5, 6)), Verdict((0,), 1))
    assert controller.acceptance.rates("d", "s", Situation(0))[:2] == pytest.approx([1, 0], abs=0.1)
    assert controller.snapshot()["costs"] == before


def test_what_a_drafter_read_in_a_round_is_not_missed_in_the_next() -> None:
    controller = World({"d": Simulated(1.0, 0.5)}).controller
    assert controller.catch_up.num_missed("d", TEXT, 100) == 101
    plan = DraftPlan("d", 2, signal="s")
    controller.observe(Situation(0), TEXT, plan, drafted_round(11.0))
    assert controller.catch_up.num_missed("d", TEXT, 102) == 0


def test_drafters_that_share_a_model_read_a_text_once() -> None:
    """What one of them took to read it is what any of them takes."""
    catch_up = CatchUp({"d": "small", "tree": "small"})
    assert catch_up.read("d", TEXT, 100) == 101
    catch_up.observe("d", 101, 202.0)
    assert catch_up.num_missed("tree", TEXT, 100) == 0
    assert catch_up.num_missed("e", TEXT, 100) == 101
    assert catch_up.ms("tree", 50, 1.0) == pytest.approx(100.0)


def test_what_a_drafter_has_kept_of_a_text_is_not_missed() -> None:
    catch_up = CatchUp({"d": "small", "tree": "small"})
    catch_up.know("tree", TEXT, 90)
    assert catch_up.num_missed("d", TEXT, 100) == 11
    catch_up.know("d", TEXT, 40)
    assert catch_up.num_missed("d", TEXT, 100) == 11, "it knows more already"


def test_a_drafter_in_the_targets_cache_has_nothing_to_read() -> None:
    catch_up = CatchUp({"d": "small", "self": IN_TARGET})
    assert catch_up.num_missed("self", TEXT, 100) == catch_up.read("self", TEXT, 100) == 0
    assert catch_up.num_missed("d", TEXT, 100) == 101, "the target's reading is not the draft's"


def plain_ms_after(*rounds: Outcome) -> float:
    """What plain decoding is believed to cost after these, four hundred times over in one turn."""
    world = World({"d": Simulated(1.0, 0.5)})
    policy_of(world.controller, COLD, AUTO, None)
    for _ in range(400):
        for outcome in rounds:
            learn(world.controller, outcome)
    found = world.controller.costs.plain_ms(100)
    assert found is not None
    return found


def test_plain_rounds_that_follow_plain_ones_teach_what_plain_decoding_costs() -> None:
    assert plain_ms_after(plain_round(13.0)) == pytest.approx(13.0, rel=0.05)


def test_a_plain_round_right_after_a_draft_says_nothing_of_plain_decoding() -> None:
    """The draft's weights took the place of the target's: it is slower than those after it."""
    assert plain_ms_after(drafted_round(10.4), plain_round(13.0)) == pytest.approx(10.0, rel=0.02)
    asked_in_vain = [plain_round(10.0, draft_ms=1.0), plain_round(13.0), plain_round(10.0)]
    assert plain_ms_after(*asked_in_vain) == pytest.approx(10.0, rel=0.02)


def test_the_first_round_of_a_turn_says_nothing_of_plain_decoding() -> None:
    world = World({"d": Simulated(1.0, 0.5)})
    for _ in range(100):
        policy_of(world.controller, COLD, AUTO, None)
        learn(world.controller, plain_round(13.0))
    assert world.controller.costs.plain_ms(100) == pytest.approx(10.0)


@pytest.mark.slow
def test_a_look_at_plain_decoding_takes_two_rounds() -> None:
    world = World({"d": Simulated(0.5, 0.95)})
    world.run(3000, COLD)
    looks = [s.is_probe and s.num_draft_tokens == 0 for s in world.steps]
    starts = [i for i in range(1, len(looks) - 1) if looks[i] and not looks[i - 1]]
    assert starts and all(looks[i + 1] for i in starts)


def test_shipped_acceptance_is_where_a_first_turn_starts() -> None:
    learnt = World({"d": Simulated(1.0, 0.9)})
    learnt.run(100, COLD)
    shipped = learnt.controller.acceptance.snapshot()
    drafters, costs = learnt.controller.drafters, learnt.controller.costs
    controller = Controller(drafters, costs, Acceptance(), costs, shipped)
    policy_of(controller, COLD, AUTO, None)
    assert controller.acceptance.rates("d", "s", Situation(0))[0] > 0.75
    unknown = Controller(drafters, costs, Acceptance()).budget(0)
    assert controller.budget(0).saved < 0.1 * unknown.saved, "there is less to find out"


@pytest.mark.parametrize("shapes_itself", [True, False])
def test_what_a_drafter_runs_for_a_token_is_learnt_whether_or_not_it_makes_chains(
    shapes_itself: bool,
) -> None:
    """One that re-encodes text runs twice a token; one that copies runs once for many."""
    drafter = Simulated(1.0, 0.8)
    drafter.shapes_itself = shapes_itself
    world = World({"d": drafter})
    for _ in range(50):
        world.controller.acceptance.observe("d", "s", Situation(0), 4, 3, num_steps=8)
    prices = world.controller.costs.at(128)
    assert prices is not None
    option = world.controller.option("d", "s", Situation(0), prices, fixed_length=5)
    assert option is not None and option.round_ms[5] == pytest.approx(verify_ms(5) + 5 * 2 * 1.0)


def test_a_hot_stretch_does_not_shorten_the_drafts_of_a_cold_one() -> None:
    """Of a drafter asked for by name: what one temperature teaches does not stick to another."""
    drafter = Simulated(1.0, 0.9)
    world = World({"d": drafter})
    world.run(200, COLD, "d")
    before = world.steps[-1].num_draft_tokens
    drafter.rate = 0.1
    world.run(400, SamplingParams(1.2), "d")
    assert world.steps[-1].num_draft_tokens < before
    drafter.rate = 0.9
    world.run(5, COLD, "d")
    assert world.steps[-1].num_draft_tokens >= before - 1


def test_signals_that_vary_before_anything_is_measured_decide_nothing() -> None:
    drafter = Simulated(0.1, 0.9)
    world = World({"d": drafter}, is_measured=False)
    for is_silent in (True, False) * 6:
        drafter.is_silent = is_silent
        world.run(3, COLD)
    assert world.share("d") == 0.0
    turn: Any = Sequence((1, 2), COLD, 100, frozenset(), torch.Generator())
    policy = policy_of(world.controller, COLD, AUTO, None)
    for is_silent in (True, False) * 20:
        drafter.is_silent = is_silent
        assert policy.plan(turn).drafter == OFF


# what earlier runs measured reaches the planner

NAME = identity("a/target", "a/draft", "bfloat16", "a processor", "torch 2")


def state_of(step_ms: float) -> dict[str, object]:
    costs, acceptance = Costs(), Acceptance()
    for width, ms in ((1, 10.0), (2, 10.5), (4, 11.0), (8, 12.0), (16, 15.0)):
        costs.set_verify(width, 128, ms)
    costs.set_draft_step("draft_model", 128, step_ms)
    for _ in range(40):
        acceptance.tick()
        acceptance.observe("draft_model", "model", Situation(3), 4, 3, 12.0)
    return Controller({}, costs, acceptance).snapshot()


def test_a_learnt_state_becomes_a_measurement_of_its_models() -> None:
    (found,) = measurements({NAME: state_of(1.0)}, 4096)
    assert (found.target, found.draft, found.precision) == ("a/target", "a/draft", "bf16")
    assert found.verify_ms[1] == 10.0
    assert found.acceptance["draft_model"][0] > 0.9


def test_a_dearer_draft_lowers_the_expected_speedup() -> None:
    cheap, dear = (measurements({NAME: state_of(ms)}, 4096)[0] for ms in (1.0, 8.0))
    cheap_speedup = cheap.expected_speedup("draft_model")
    dear_speedup = dear.expected_speedup("draft_model")
    assert cheap_speedup is not None and dear_speedup is not None
    assert cheap_speedup.value > 1.5 > dear_speedup.value


def test_a_state_that_cannot_be_read_is_passed_over() -> None:
    assert measurements({NAME: {"version": 0}, "": None, "x | y | no precision": {}}, 4096) == ()
