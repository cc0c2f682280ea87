"""Leaving after the first layers: which exit, what is refused, the draft and the exit itself."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from localspec.core.decoding import OFF, DraftPlan, SamplingParams, Sequence
from localspec.core.errors import ModelError
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.drafting import HEAD_SHARE
from localspec.drafters.early_exit import (
    FIRST_TURNS,
    LATER_TURNS,
    EarlyExit,
    EarlyExitDrafter,
    Exits,
    Tally,
    candidates,
    tokens_per_ms,
)
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.forward.heads.fixed import DRAFT_SIZES
from tests.drafters.stages import assert_chosen
from tests.kit.tiny import (
    GREEDY,
    Context,
    Plans,
    on_transformers,
    play,
    tiny_llama,
    turn_of,
    with_cache,
)
from tests.kit.tracing import TracingPool

NAME = EarlyExitDrafter.name
PROMPT = (5, 9, 12, 5, 9, 30, 7, 5, 9, 11, 40, 2)
LAYERS = 8


@cache
def made(later: float, num_layers: int) -> Decoder:
    return with_cache(tiny_llama(num_layers=num_layers, later=later))


def target_of(later: float = 0.3, num_layers: int = LAYERS) -> Decoder:
    """Over a cache of its own; its weights are made once."""
    return made(later, num_layers).beside()


def exits_of(target: Decoder, agreed: dict[int, float], step_ms: float = 1.0) -> Exits:
    """Steps that cost `step_ms` a layer, and what was counted over 1,000 positions."""
    found = Exits(target, {depth: step_ms * depth for depth in agreed}, step_ms * LAYERS)
    for depth, share in agreed.items():
        found.tallies[depth] = Tally(step_ms * depth, 1000.0 * share, 1000.0)
    return found


def drafter_of(target: Decoder, depth: int = 2) -> EarlyExitDrafter:
    return EarlyExitDrafter(target, exits_of(target, {depth: 0.9}))


def turn(temperature: float = 0.0, prompt: tuple[int, ...] = PROMPT) -> Sequence:
    return turn_of(prompt, SamplingParams(temperature), 40)


def prefilled(target: Decoder, sequence: Sequence) -> Engine:
    engine = Engine(target, {})
    engine.prefill(sequence, threading.Event())
    return engine


# -- which exit -------------------------------------------------------------------------------


def test_candidates_lie_between_an_eighth_and_a_half() -> None:
    assert candidates(1) == ()
    assert candidates(2) == candidates(3) == (1,)
    assert candidates(8) == (1, 2, 3, 4)
    assert candidates(12) == (1, 2, 3, 4, 5, 6)
    assert candidates(32) == (4, 6, 9, 11, 14, 16)
    assert len(candidates(80)) == 6


def test_the_rate_is_that_of_the_best_draft_length() -> None:
    assert tokens_per_ms(0.0, 1.0, 10.0) == pytest.approx(1 / 11)
    assert tokens_per_ms(1.0, 1.0, 10.0) == pytest.approx(9 / 18)
    assert tokens_per_ms(0.5, 4.0, 10.0) == pytest.approx(1.5 / 14)


def test_a_cheaper_exit_wins_where_both_agree_and_a_deeper_one_where_it_must() -> None:
    target = target_of()
    assert exits_of(target, {1: 0.9, 3: 0.9}).best() == 1
    assert exits_of(target, {1: 0.1, 3: 0.9}).best() == 3


def test_another_exit_must_be_clearly_better_to_be_changed_to() -> None:
    exits = exits_of(target_of(), {2: 0.80, 3: 0.925})
    rates = {d: tokens_per_ms(t.agreement, t.step_ms, 8.0) for d, t in exits.tallies.items()}
    assert rates[2] < rates[3] < 1.05 * rates[2]
    assert exits.best() == 3 and exits.best(2) == 2


def test_agreement_is_that_of_the_exits_own_likeliest_token() -> None:
    target = target_of()
    prefilled(target, turn())
    exits = Exits(target, {1: 1.0, 4: 1.0}, 8.0)
    exits.score()
    tokens = PROMPT[:-1]
    own = target_of().forward(tokens).argmax(-1)
    for depth, tally in exits.tallies.items():
        guessed = EarlyExit(target_of(), depth).forward(tokens).argmax(-1)
        assert tally.tried == len(tokens)
        assert tally.agreed == float((guessed == own).sum())
    assert exits.tallies[1].agreed < exits.tallies[4].agreed


def test_layers_that_say_nothing_leave_every_exit_right() -> None:
    exits = Exits.measured(target_of(later=0.0), [1 + i % 50 for i in range(40)])
    assert {tally.agreed for tally in exits.tallies.values()} == {40.0}
    assert all(tally.step_ms > 0.0 for tally in exits.tallies.values())


def test_scoring_leaves_the_cache_as_it_was() -> None:
    target, fresh = target_of(), target_of()
    prefilled(target, turn())
    drafter_of(target).propose(turn(), DraftPlan("early_exit", 0))
    assert target.cache.tokens == list(PROMPT[:-1])
    prefilled(fresh, turn())
    after, wanted = target.forward(PROMPT[-1:]), fresh.forward(PROMPT[-1:])
    torch.testing.assert_close(after, wanted, atol=1e-4, rtol=1e-4)


def test_what_was_counted_long_ago_fades() -> None:
    target = target_of()
    prefilled(target, turn())
    exits = exits_of(target, {2: 1.0})
    exits.score()
    assert exits.tallies[2].tried == pytest.approx(0.8 * 1000 + len(PROMPT) - 1)


def test_the_exit_changes_at_a_turns_first_draft_and_the_signal_with_it() -> None:
    target, before = target_of(), turn()
    prefilled(target, before)
    drafter = EarlyExitDrafter(target, exits_of(target, {1: 0.9, 3: 0.8}))
    drafter.propose(before, DraftPlan("early_exit", 0))
    assert drafter.signal(turn()) == "exit 1"
    drafter._exits.tallies[1].agreed = 0.0
    drafter.propose(before, DraftPlan("early_exit", 0))
    assert drafter.signal(before) == "exit 1"  # not within a turn
    drafter.propose(turn(), DraftPlan("early_exit", 0))
    assert drafter.signal(turn()) == "exit 3"
    assert isinstance(drafter.model, EarlyExit) and len(drafter.model.weights.blocks) == 3


def test_an_exit_that_is_changed_to_is_captured_and_each_keeps_its_graphs() -> None:
    target, pool, made = target_of(), TracingPool(), list[int]()
    drafter = EarlyExitDrafter(
        target, exits_of(target, {1: 0.9, 3: 0.8}), ChunkedDraft(target, target.vocab_size, pool)
    )
    (graphs,) = drafter.captures
    for agreed, depth in ((900.0, 1), (0.0, 3), (900.0, 1), (0.0, 3)):
        drafter._exits.tallies[1] = Tally(1.0, agreed, 1000.0)
        drafter.propose(prefilled_turn(target), DraftPlan(NAME, 2))  # may change the exit
        made.append(len(list(graphs.capture())))
        pool.num_replays = 0
        drafter.propose(prefilled_turn(target), DraftPlan(NAME, 2))
        assert (drafter.depth, pool.num_replays) == (depth, 1)
        assert not graphs.has_missing and graphs.notice is None
    assert made == [len(DRAFT_SIZES), len(DRAFT_SIZES), 0, 0]


def prefilled_turn(target: Decoder) -> Sequence:
    target.cache.rollback(0)
    sequence = turn()
    prefilled(target, sequence)
    return sequence


def test_exits_are_compared_in_the_first_turns_and_seldom_later() -> None:
    target = target_of()
    prefilled(target, turn())
    drafter = drafter_of(target)
    due = list[int]()
    for number in range(1, 4 * LATER_TURNS + 1):
        tried = drafter._exits.tallies[2].tried
        drafter.propose(turn(), DraftPlan("early_exit", 0))
        due += [number] if drafter._exits.tallies[2].tried != tried else []
    assert due == [*range(1, FIRST_TURNS + 1), 16, 24, 32]


def test_sequences_that_are_decoded_together_share_what_is_counted() -> None:
    """A text is run again while all of them wait."""
    first, second = target_of(), target_of()
    for each in (first, second):
        prefilled(each, turn())
    exits = exits_of(first, {2: 0.9})
    drafter, beside = (EarlyExitDrafter(each, exits.of(each)) for each in (first, second))
    scored = 0
    for _ in range(FIRST_TURNS):
        for each in (drafter, beside):
            tried = drafter._exits.tallies[2].tried
            each.propose(turn(), DraftPlan("early_exit", 0))
            scored += drafter._exits.tallies[2].tried != tried
    assert scored == FIRST_TURNS + 1, "of 16 turns the first eight, and the last"


# -- what it can be built from -----------------------------------------------------------------


def test_it_measures_itself_and_leaves_the_cache_empty() -> None:
    target = target_of()
    drafter = EarlyExitDrafter.build(Parts(target))
    assert drafter.depth in candidates(LAYERS)
    assert target.cache.length == 0 and drafter.memory_bytes == 0


def test_it_measures_on_an_earlier_conversation_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = list[Any]()
    monkeypatch.setattr(
        Exits, "measured", lambda target, text: seen.append(text) or exits_of(target, {2: 0.5})
    )
    past = (tuple(range(60)), tuple(7 for _ in range(70)))
    EarlyExitDrafter.build(Parts(target_of(), past=past))
    EarlyExitDrafter.build(Parts(target_of(), past=((1, 2, 3),)))
    assert seen[0] == [7] * 64 and seen[1] != [1, 2, 3]


def test_a_model_on_transformers_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match=r"transformers.*another drafter"):
        EarlyExitDrafter.build(Parts(on_transformers(tiny_llama())))


def test_a_model_of_one_layer_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="one layer"):
        EarlyExitDrafter.build(Parts(target_of(num_layers=1)))


# -- drafting ---------------------------------------------------------------------------------


def test_drafts_are_the_exits_own_text() -> None:
    target = target_of()
    sequence = turn()
    prefilled(target, sequence)
    proposal = drafter_of(target).propose(sequence, DraftPlan(NAME, 5))
    text = list(PROMPT)
    for _ in range(5):
        text.append(int(EarlyExit(target_of(), 2).forward(text)[-1].argmax()))
    assert list(proposal.tokens) == text[len(PROMPT) :]
    assert proposal.is_chain


def test_sampled_drafts_are_chosen_by_the_exits_logits() -> None:
    target = target_of()
    sequence = turn(0.8)
    prefilled(target, sequence)
    proposal = drafter_of(target).propose(sequence, DraftPlan(NAME, 4))
    exits = EarlyExit(target_of(), 2)

    def logits(text: Context) -> torch.Tensor:
        exits.cache.rollback(0)
        return exits.forward(text)[-1]

    assert_chosen(proposal, sequence, logits, HEAD_SHARE)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_reply_is_that_of_plain_decoding(temperature: float) -> None:
    """Also where the rounds of other ways come between."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    target = target_of()
    engine = Engine(target, {NAME: drafter_of(target)})
    plain = play(engine, PROMPT, Plans((OFF, 0)), 24, sampling)
    for plans in (((NAME, 4),), ((NAME, 3), (OFF, 0), (NAME, 1))):
        assert play(engine, PROMPT, Plans(*plans), 24, sampling).tokens == plain.tokens
        assert target.cache.tokens == plain.tokens[:-1]


def test_a_draft_that_is_never_verified_leaves_no_trace() -> None:
    target, fresh = target_of(), target_of()
    for each in (target, fresh):
        prefilled(each, turn())
    drafter_of(target).propose(turn(), DraftPlan(NAME, 4))
    target.cache.rollback(len(PROMPT) - 1)
    wanted = fresh.forward([PROMPT[-1], 8, 9])
    torch.testing.assert_close(target.forward([PROMPT[-1], 8, 9]), wanted, atol=1e-4, rtol=1e-4)


# -- the exit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", range(1, LAYERS))
def test_an_exit_has_the_logits_of_a_model_of_its_layers(depth: int) -> None:
    target = target_of()
    weights = replace(target.weights, blocks=target.weights.blocks[:depth])
    wanted = Decoder(weights, target_of().cache).forward(PROMPT)
    assert torch.equal(EarlyExit(target, depth).forward(PROMPT), wanted)


def test_it_holds_no_weight_and_no_cache_of_its_own() -> None:
    target = target_of()
    leaving = EarlyExit(target, 2)
    assert leaving.cache is target.cache
    assert leaving.weights.blocks == target.weights.blocks[:2]
    assert leaving.weights.head is target.weights.head
    assert len(target.weights.blocks) == LAYERS


@pytest.mark.parametrize("depth", [0, LAYERS])
def test_an_exit_lies_between_the_first_and_the_last_block(depth: int) -> None:
    with pytest.raises(AssertionError, match="between"):
        EarlyExit(target_of(), depth)


def test_it_leaves_the_features_of_cached_tokens_alone() -> None:
    target = target_of()
    features = target.follow([0, 3, LAST])
    target.forward(PROMPT)
    before = [features.rows(layer, 0, 48).clone() for layer in (0, 3, LAST)]
    EarlyExit(target, 2).forward([3, 14, 15, 9])
    for layer, old in zip((0, 3, LAST), before, strict=True):
        assert torch.equal(features.rows(layer, 0, 48), old)


@pytest.mark.slow
def test_greedy_text_is_the_targets_own_at_every_exit() -> None:
    plain = play(Engine(target_of(0.05), {}), PROMPT, Plans(("off", 0)), 40).tokens
    for depth in candidates(LAYERS):
        target = target_of(0.05)
        engine = Engine(target, {NAME: drafter_of(target, depth)})
        policy = Plans((NAME, 4), (NAME, 1), (NAME, 7))
        assert play(engine, PROMPT, policy, 40).tokens == plain
        assert sum(step.num_accepted_tokens for step in policy.steps) > 0


def test_a_full_context_has_nothing_to_propose() -> None:
    target = with_cache(tiny_llama(num_layers=LAYERS), capacity=8)
    drafter = drafter_of(target)
    assert drafter.signal(turn(prompt=(1,) * 7)) == "exit 2"
    assert drafter.signal(turn(prompt=(1,) * 8)) is None
    target.forward((1,) * 6)
    assert len(drafter.propose(turn(prompt=(1,) * 7), DraftPlan(NAME, 4)).tokens) == 1


@pytest.mark.slow
def test_the_target_answers_bit_for_bit_as_before() -> None:
    target = target_of()
    before = target.forward(PROMPT)
    play(Engine(target, {NAME: drafter_of(target)}), PROMPT, Plans((NAME, 4)), 20, GREEDY)
    target.cache.rollback(0)
    assert torch.equal(target.forward(PROMPT), before)
