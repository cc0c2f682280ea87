"""Drafters in hindsight: what a review foretells of a reply is what really happens in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from localspec.controller.hindsight import foretold
from localspec.core.decoding import Drafter, DraftPlan, Noise, SamplingParams, Sequence
from localspec.core.hindsight import Reviewing
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.review import ChainReview
from localspec.engine.engine import Engine
from tests.drafters.stages import NAMES, PROMPT, Stage, stage
from tests.kit.tiny import Plans, agreeing_draft, play, tiny_llama, with_cache

UNTOLD = ("lookahead", "self_quant", "early_exit", "cross_tokenizer")
REVIEWED = tuple(name for name in NAMES if name not in UNTOLD)
QUICK = ("draft_model", "ngram")
LENGTH = 30
PROMPT_LENGTH = len(PROMPT)
LENGTHS = (1, 2, 4, 8)
# A turn without warps, and one in which a token's chance depends on the tokens before it.
SAMPLED = SamplingParams(0.7, top_k=20, repetition_penalty=1.2, presence_penalty=0.5, seed=3)
TURNS = {"greedy": SamplingParams(seed=3), "1": SamplingParams(1.0, seed=3), "0.7": SAMPLED}

# Every way of reading a reply at once; those that a drafter only repeats, in one turn.
CASES = [
    pytest.param(name, turn, marks=() if is_quick else pytest.mark.slow, id=f"{name}-{turn}")
    for name in REVIEWED
    for turn in TURNS
    for is_quick in (name in QUICK or turn == "0.7",)
]

Rounds = list[tuple[int, int]]  # output tokens of each round, and accepted ones


class Stopping(Plans):
    """Plans whose drafts end after the first token that is less sure."""

    def __init__(self, name: str, length: int, least: float) -> None:
        super().__init__((name, length))
        self._least = least

    def plan(self, sequence: Sequence) -> DraftPlan:
        def keep_drafting(index: int, confidence: float) -> bool:
            return confidence >= self._least

        return replace(super().plan(sequence), keep_drafting=keep_drafting)


def reviewed(drafter: Any, sequence: Sequence) -> Drafter:
    """The drafter in hindsight, all its forwards run."""
    assert isinstance(drafter, Reviewing)
    steps = drafter.review(sequence)
    assert steps is not None
    try:
        rows = next(steps)
        while True:
            rows = steps.send(rows.forward())
    except StopIteration as end:
        found: Drafter = end.value
        return found


def run(set_up: Stage, policy: Plans, sampling: SamplingParams, **facts: Any) -> Sequence:
    set_up.engine.target.cache.rollback(0)
    return play(set_up.engine, PROMPT, policy, LENGTH, sampling, **facts)


def real(policy: Plans) -> Rounds:
    return [(step.num_output_tokens, step.num_accepted_tokens) for step in policy.steps]


def told(engine: Engine, drafter: Drafter, policy: Plans, sequence: Sequence) -> Rounds:
    rounds = foretold(policy, drafter, sequence, engine.within_reach)
    return [(each.num_output_tokens, each.num_accepted_tokens) for each in rounds]


@pytest.mark.parametrize(("name", "turn"), CASES)
def test_rounds_foretold_are_the_rounds_run(name: str, turn: str) -> None:
    set_up = stage((name,))
    accepted = 0
    for length in LENGTHS if name in QUICK else LENGTHS[::3]:
        policy = Plans((name, length))
        sequence = run(set_up, policy, TURNS[turn])
        drafter = reviewed(set_up.drafters[name], sequence)
        assert told(set_up.engine, drafter, Plans((name, length)), sequence) == real(policy)
        accepted += sum(step.num_accepted_tokens for step in policy.steps)
    assert accepted > 0 or (name == "ngram" and turn != "greedy")  # random text repeats nothing


def test_rounds_of_a_draft_that_reads_a_part_of_the_text_are_foretold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.drafters.test_review.LENGTH", 90)
    module = tiny_llama()
    target, draft = with_cache(module), with_cache(agreeing_draft(module), capacity=48)
    drafter = DraftModelDrafter(draft, 64)
    set_up = Stage(Engine(target, {"draft_model": drafter}), {"draft_model": drafter})
    policy = Plans(("draft_model", 1))
    sequence = run(set_up, policy, TURNS["1"])
    foretold_rounds = told(
        set_up.engine, reviewed(drafter, sequence), Plans(("draft_model", 1)), sequence
    )
    assert foretold_rounds == real(policy)


@pytest.mark.parametrize("name", [name for name in REVIEWED if name not in ("draft_tree", "eagle")])
def test_a_stop_rule_ends_drafts_in_hindsight_where_it_ended_them(name: str) -> None:
    set_up = stage((name,))
    policy = Stopping(name, 8, 0.5)
    sequence = run(set_up, policy, TURNS["1"])
    drafter = reviewed(set_up.drafters[name], sequence)
    assert told(set_up.engine, drafter, Stopping(name, 8, 0.5), sequence) == real(policy)
    if name == "draft_model":  # that the rule ended drafts at all
        assert told(set_up.engine, drafter, Plans((name, 8)), sequence) != real(policy)


class Shifted:
    """The noise of the place before."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise

    def rows(self, position: int, count: int) -> torch.Tensor:
        return self._noise.rows(position - 1, count)

    def on(self, device: torch.device) -> Shifted:
        return self


def test_another_places_noise_or_token_foretells_other_rounds() -> None:
    """The two faults that a review could have without being noticed elsewhere."""
    set_up = stage(("draft_model",))
    policy = Plans(("draft_model", 4))
    sequence = run(set_up, policy, TURNS["1"])
    model = set_up.drafters["draft_model"]
    sequence.noise, noise = Shifted(sequence.noise), sequence.noise
    shifted = reviewed(model, sequence)
    sequence.noise = noise
    assert told(set_up.engine, shifted, Plans(("draft_model", 4)), sequence) != real(policy)
    review = reviewed(model, sequence)
    assert isinstance(review, ChainReview)
    late = ChainReview(model, PROMPT_LENGTH, 64, review.choices[1:], review.confidences[1:])
    assert told(set_up.engine, late, Plans(("draft_model", 4)), sequence) != real(policy)


def test_a_review_warms_the_draft_and_leaves_the_target_alone() -> None:
    set_up = stage(("draft_model",))
    sequence = run(set_up, Plans(("off", 0)), TURNS["1"])
    model = set_up.drafters["draft_model"].model
    assert model.cache.length == 0
    reviewed(set_up.drafters["draft_model"], sequence)
    assert model.cache.tokens == sequence.tokens[:-1] == set_up.engine.target.cache.tokens


@pytest.mark.parametrize("name", UNTOLD)
def test_a_drafter_that_cannot_tell_says_so(name: str) -> None:
    set_up = stage((name,))
    sequence = run(set_up, Plans(("off", 0)), TURNS["greedy"])
    assert set_up.drafters[name].review(sequence) is None


def test_a_reply_that_was_stopped_leaves_its_last_draft_untold() -> None:
    """Whether the draft tokens beyond its end were right is not known."""
    set_up, name = stage(("draft_tree",)), "draft_tree"
    policy = Plans((name, 4))
    sequence = run(set_up, policy, TURNS["1"])
    whole, sequence.finish_reason = sequence.tokens, None
    num_cut = 0
    for length in range(PROMPT_LENGTH + 1, len(whole)):
        sequence.tokens = whole[:length]
        drafter = reviewed(set_up.drafters[name], sequence)
        limit = set_up.engine.within_reach
        *others, last = foretold(Plans((name, 4)), drafter, sequence, limit)
        step = policy.steps[len(others)]
        assert all(each.is_whole for each in others)
        if last.num_output_tokens < step.num_accepted_tokens:
            assert not last.is_whole
            num_cut += 1
        elif last.num_output_tokens == step.num_output_tokens:
            assert last.is_whole
    assert num_cut > 3
