"""The quantised self-draft on the target's own cache."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from localspec.controller.acceptance import Acceptance, Situation
from localspec.controller.controller import Controller
from localspec.controller.costs import WIDTHS, Costs
from localspec.controller.policy import policy_of
from localspec.core.decoding import (
    AUTO,
    OFF,
    DraftPlan,
    Outcome,
    Policy,
    SamplingParams,
    Sequence,
    Step,
)
from localspec.core.errors import ModelError, NumericsError
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.parts import Parts
from localspec.drafters.self_quant import SelfQuantDrafter
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder
from localspec.forward.model import LanguageModel
from localspec.forward.quantise import Kind, quantised_twin
from tests.kit.families import small
from tests.kit.tiny import KINDS, tiny_llama, turn_of, with_cache

NAME = SelfQuantDrafter.name
PROMPT = (3, 1, 4, 1, 5)
# A text of many tokens; drafts are rejected now and then.
SEED = 2


class Fixed:
    """Always the same plan; keeps the steps and calls `look` at the top of each round."""

    def __init__(
        self, name: str, length: int, look: Callable[[Sequence], None] = lambda _: None
    ) -> None:
        self.plan_of_all = DraftPlan(name, length)
        self.look = look
        self.steps = list[Step]()

    def plan(self, sequence: Sequence) -> DraftPlan:
        self.look(sequence)
        return self.plan_of_all

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        self.steps.append(outcome.step)

    @property
    def acceptance_rate(self) -> float:
        drafted = sum(step.num_draft_tokens for step in self.steps)
        return sum(step.num_accepted_tokens for step in self.steps) / drafted


def turn(length: int = 40, temperature: float = 0.0, prompt: tuple[int, ...] = PROMPT) -> Sequence:
    return turn_of(prompt, SamplingParams(temperature), length)


def decoded(engine: Engine, policy: Policy, sequence: Sequence | None = None) -> list[int]:
    """All tokens of one turn from an empty cache."""
    engine.target.cache.rollback(0)
    sequence = sequence or turn()
    engine.prefill(sequence, threading.Event())
    for _ in engine.decode(sequence, policy, threading.Event()):
        pass
    return sequence.tokens


def drafter_of(target: LanguageModel, kind: Kind = "int4") -> SelfQuantDrafter:
    twin = quantised_twin(target, kind)
    return SelfQuantDrafter(twin.model, twin.weight_bytes)


def engine_of(kind: Kind = "int4", seed: int = SEED) -> tuple[Engine, SelfQuantDrafter]:
    target = with_cache(tiny_llama(seed))
    drafter = drafter_of(target, kind)
    return Engine(target, {NAME: drafter}), drafter


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_plain_decoding(kind: Kind) -> None:
    engine, _ = engine_of(kind)
    plain = decoded(engine, Fixed(OFF, 0))
    assert len(set(plain)) > 8  # a text that stands still would prove little
    steps = list[Step]()
    for length in (1, 4, 7):
        policy = Fixed(NAME, length)
        assert decoded(engine, policy) == plain
        steps += policy.steps
    rejected = sum(step.num_draft_tokens - step.num_accepted_tokens for step in steps)
    assert rejected > 0 and any(step.num_accepted_tokens for step in steps)


@pytest.mark.slow
def test_a_copy_is_accepted_more_often_than_not() -> None:
    """Over three models, since one greedy text meets few contexts. Seeds 0, 1, 2."""
    policy = Fixed(NAME, 4)
    for seed in (0, 1, 2):
        engine, _ = engine_of(seed=seed)
        for temperature in (0.0, 0.7):
            decoded(engine, policy, turn(temperature=temperature))
    assert policy.acceptance_rate > 0.5  # of 64 tokens that are about as likely


def test_the_cache_is_shared_and_stands_at_the_root_each_round() -> None:
    engine, drafter = engine_of()
    assert drafter.model.cache is engine.target.cache
    looks = list[int]()

    def look(sequence: Sequence) -> None:
        assert engine.target.cache.tokens == sequence.tokens[:-1]
        looks.append(engine.target.cache.length)

    policy = Fixed(NAME, 4, look)
    tokens = decoded(engine, policy)
    assert len(looks) == len(policy.steps) > 5
    assert engine.target.cache.tokens == tokens[:-1]


def test_after_a_turn_every_slot_is_the_targets_own() -> None:
    engine, _ = engine_of()
    tokens = decoded(engine, Fixed(NAME, 4))
    after = engine.target.forward(tokens[-1:])
    engine.target.cache.rollback(0)
    fresh = engine.target.forward(tokens)[-1:]
    torch.testing.assert_close(after, fresh, atol=1e-4, rtol=1e-4)


def test_the_target_answers_bit_for_bit_as_before() -> None:
    target = with_cache(tiny_llama(SEED))
    before = target.forward(PROMPT)
    drafter = drafter_of(target)
    decoded(Engine(target, {NAME: drafter}), Fixed(NAME, 4))
    target.cache.rollback(0)
    assert torch.equal(target.forward(PROMPT), before)


def test_memory_is_the_quantised_weights_and_no_cache() -> None:
    engine, drafter = engine_of()
    assert isinstance(drafter.model, Decoder)
    own = sum(linear.weight_bytes for linear in drafter.model.weights.linears)
    assert drafter.memory_bytes == own
    assert 0 < drafter.memory_bytes < engine.target.weight_bytes


def test_a_full_context_has_nothing_to_propose() -> None:
    target = with_cache(tiny_llama(), capacity=8)
    drafter = drafter_of(target)
    assert drafter.signal(turn(prompt=(1,) * 7)) == "model"
    assert drafter.signal(turn(prompt=(1,) * 8)) is None
    target.forward((1,) * 6)
    proposal = drafter.propose(turn(prompt=(1,) * 7), DraftPlan(NAME, 4))
    assert len(proposal.tokens) == 1


def test_a_target_that_returns_no_numbers_is_named_by_its_own_check() -> None:
    module = tiny_llama(SEED)
    with torch.no_grad():
        module.model.embed_tokens.weight[PROMPT[-1]] = float("nan")
    target = with_cache(module)
    drafter = drafter_of(target)
    with pytest.raises(NumericsError):
        decoded(Engine(target, {NAME: drafter}), Fixed(NAME, 4))


def controller_with(
    drafter: SelfQuantDrafter, plain_ms: float, wide_ms: float, draft_step_ms: float
) -> Controller:
    """Planted costs, and 20 rounds in which three of four tokens were accepted."""
    costs, acceptance = Costs(), Acceptance()
    for width in WIDTHS:
        costs.set_verify(width, 128, plain_ms if width == 1 else wide_ms)
    costs.set_draft_step(NAME, 128, draft_step_ms)
    for index in range(20):
        acceptance.observe(NAME, "model", Situation(0), 4, 4 if index % 2 else 2)
    # Lookup has nothing to say about PROMPT, so the choice is the self-draft or plain decoding.
    return Controller({"ngram": NgramDrafter(), NAME: drafter}, costs, acceptance)


def test_a_cheap_quantised_step_is_chosen_and_the_output_stays() -> None:
    engine, drafter = engine_of()
    plain = decoded(engine, Fixed(OFF, 0))
    # A large bf16 target on a processor: 45 ms a token, the copy 13 ms.
    controller = controller_with(drafter, plain_ms=45.0, wide_ms=47.0, draft_step_ms=13.0)
    policy = policy_of(controller, SamplingParams(), AUTO, None)
    *looks, plan = (policy.plan(turn()) for _ in range(3))
    assert all(one.drafter == OFF for one in looks), "plain decoding is looked at first"
    assert plan.drafter == NAME and plan.num_draft_tokens >= 1 and not plan.is_probe
    assert plan.reason.startswith(f"Drafting with {NAME}, ")
    learning = Engine(engine.target, controller.drafters)
    assert decoded(learning, policy_of(controller, SamplingParams(), AUTO, None)) == plain


@pytest.mark.parametrize(
    ("draft_step_ms", "reason"),
    [(1.65, "with self_quant it would be 1."), (1.8, "even with every token accepted")],
)
def test_a_step_as_dear_as_the_targets_own_is_left_with_a_reason(
    draft_step_ms: float, reason: str
) -> None:
    _, drafter = engine_of()
    # A tiny target: its step is mostly overhead, which the copy has as well.
    controller = controller_with(drafter, 1.7, 1.8, draft_step_ms)
    policy = policy_of(controller, SamplingParams(), AUTO, None)
    *_, plan = (policy.plan(turn()) for _ in range(3))  # a run may begin with two second looks
    assert (plan.drafter, plan.num_draft_tokens) == (OFF, 0)
    assert plan.off == "does_not_pay" and reason in plan.reason


def test_no_copy_of_a_mixture_of_experts_is_made() -> None:
    target = with_cache(small("qwen3_moe"), 64)
    with pytest.raises(ModelError, match=r"every expert.*A draft model would do"):
        SelfQuantDrafter.build(Parts(target))
