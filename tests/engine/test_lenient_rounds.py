"""Lenient turns in the engine and the controller: what they teach stays apart from exact ones."""

from __future__ import annotations

import itertools

import pytest

from localspec.controller.acceptance import LENIENT, Situation, bucket_of, temperature_bucket
from localspec.controller.policy import policy_of
from localspec.core.decoding import AUTO, SamplingParams, Sequence
from localspec.core.leniency import Factor, Threshold
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.engine.engine import Engine
from tests.kit.simulation import Simulated, World
from tests.kit.tiny import Plans, agreeing_draft, play, tiny_llama, turn_of, with_cache

EXACT, LOOSE = SamplingParams(), SamplingParams(leniency=Factor(2.0))


def sequence_of() -> Sequence:
    return turn_of((1, 2), EXACT, 10**9)


def test_lenient_turns_have_buckets_of_their_own() -> None:
    temperatures = (0.0, 0.2, 0.5, 0.7, 1.0, 2.0)
    exact = {bucket_of(SamplingParams(t)) for t in temperatures}
    loose = {bucket_of(SamplingParams(t, leniency=Factor())) for t in temperatures}
    assert exact == {temperature_bucket(t) for t in temperatures}
    assert not exact & loose and max(exact) + 2 < LENIENT  # no neighbour to learn from either


def test_what_a_lenient_turn_accepts_says_nothing_of_an_exact_one() -> None:
    drafter = Simulated(1.0, 0.95)
    world = World({"d": drafter})
    world.run(60, LOOSE)
    acceptance, exact = world.controller.acceptance, Situation(bucket_of(EXACT))
    signal = next(step.signal for step in world.steps if step.drafter == "d")
    assert acceptance.estimate("d", signal, Situation(bucket_of(LOOSE))).evidence > 10
    assert acceptance.estimate("d", signal, exact).evidence == 0.0
    assert acceptance.rates("d", signal, exact)[0] == pytest.approx(0.5)
    assert acceptance.best_known() == {}, "a planner must not hope for lenient rates either"


def test_lenient_greedy_rounds_cost_what_greedy_rounds_cost() -> None:
    world = World({"d": Simulated(1.0, 0.9)})
    controller = world.controller
    assert controller.costs_at(bucket_of(LOOSE)) is controller.costs
    warm = SamplingParams(0.7, leniency=Factor())
    assert controller.costs_at(bucket_of(warm)) is controller.sampled_costs


@pytest.mark.parametrize("first", [2, 7])
def test_the_first_length_holds_for_the_first_round_only(first: int) -> None:
    world = World({"d": Simulated(0.2, 0.9)})
    policy = policy_of(world.controller, EXACT, "d", None, first)
    sequence = sequence_of()
    lengths = []
    for _ in range(30):
        world.game.round(sequence, policy)
        lengths.append(world.steps[-1].num_draft_tokens)
    assert lengths[0] == first
    usual = World({"d": Simulated(0.2, 0.9)})
    usual.run(1, EXACT, "d")
    assert usual.steps[0].num_draft_tokens != first
    assert len(set(lengths)) > 1, "the length is learnt from then on"


def test_before_costs_are_known_the_first_length_is_used_where_a_drafter_is_named() -> None:
    world = World({"d": Simulated(0.2, 0.9)}, is_measured=False)
    plan = policy_of(world.controller, EXACT, "d", None, 9).plan(sequence_of())
    assert plan.num_draft_tokens == 9
    fixed = policy_of(world.controller, EXACT, "d", 3, 9).plan(sequence_of())
    assert fixed.num_draft_tokens == 3
    auto = policy_of(world.controller, EXACT, AUTO, None, 9)
    assert auto.plan(sequence_of()).num_draft_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_model_and_draft_count_what_is_not_the_models_own(temperature: float) -> None:
    """At threshold 0 the whole draft stands; when greedy the count is read off the model itself."""
    module = tiny_llama()
    drafter = DraftModelDrafter(with_cache(agreeing_draft(module)), 64)
    engine = Engine(with_cache(module), {"draft_model": drafter})
    plans = Plans(("draft_model", 4))
    sampling = SamplingParams(temperature, seed=3, leniency=Threshold(0.0))
    sequence = play(engine, (1, 2, 3), plans, 40, sampling)
    assert all(step.num_accepted_tokens == step.num_draft_tokens for step in plans.steps)
    counted = sum(step.num_lenient_tokens for step in plans.steps)
    assert 0 < counted < 40
    if temperature == 0.0:
        logits = with_cache(module).forward(sequence.tokens)
        own = logits.argmax(dim=-1).tolist()
        pairs = itertools.islice(zip(own, sequence.tokens[1:], strict=False), 2, None)
        assert counted == sum(best != token for best, token in pairs)
    exact = play(
        engine, (1, 2, 3), Plans(("draft_model", 4)), 40, SamplingParams(temperature, seed=3)
    )
    assert exact.tokens != sequence.tokens
