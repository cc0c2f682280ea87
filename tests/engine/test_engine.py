"""The loop: the invariant at every yield, accounting, and every way out of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import (
    OFF,
    TARGET,
    DraftPlan,
    Outcome,
    Proposal,
    Round,
    SamplingParams,
    Step,
    chain,
)
from localspec.core.errors import CacheError, NumericsError
from localspec.engine.engine import Engine
from localspec.forward.model import PREFILL_CHUNK
from tests.kit.tiny import Plans, TableModel, play, scripted, tiny_llama, with_cache

PROMPT = (1, 2, 3)
SCRIPT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
VOCAB = 24


class Guesser:
    """Proposes the script, wrong from place `wrong_at` of the script on."""

    name = "guesser"
    shapes_itself = False
    block_length = None
    memory_bytes = 0

    def __init__(self, wrong_at: int = 99) -> None:
        self._wrong_at = wrong_at
        self.observed: list[Step] = []

    def signal(self, sequence: decoding.Sequence) -> str:
        return "s"

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        place = len(sequence.tokens) - len(PROMPT)
        wanted = range(place, min(place + plan.num_draft_tokens, len(SCRIPT)))
        return chain(tuple(1 if at >= self._wrong_at else SCRIPT[at] for at in wanted))

    def observe(self, sequence: decoding.Sequence, outcome: Outcome) -> None:
        self.observed.append(outcome.step)


def engine_with(guesser: Guesser) -> Engine:
    return Engine(scripted(SCRIPT, len(PROMPT), VOCAB), {"guesser": guesser})


def rounds_of(
    engine: Engine, length: int, max_tokens: int = len(SCRIPT)
) -> tuple[decoding.Sequence, Iterator[Round]]:
    sequence = engine.start(PROMPT, SamplingParams(), max_tokens, frozenset())
    engine.prefill(sequence, threading.Event())
    plans = Plans(("guesser", length))
    return sequence, engine.decode(sequence, plans, threading.Event())


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 5, 99])
@pytest.mark.parametrize("length", [0, 1, 3, 9])
def test_cache_holds_all_but_the_root_at_every_yield(wrong_at: int, length: int) -> None:
    engine = engine_with(Guesser(wrong_at))
    sequence, rounds = rounds_of(engine, length)
    for _ in rounds:
        assert engine.target.cache.tokens == sequence.tokens[:-1]
    assert sequence.tokens == [*PROMPT, *SCRIPT]


def test_a_right_draft_saves_forwards() -> None:
    engine = engine_with(Guesser())
    _, rounds = rounds_of(engine, 4)
    found = list(rounds)
    assert [round.step.num_accepted_tokens for round in found] == [4, 4]
    assert [len(round.tokens) for round in found] == [5, 5]
    assert isinstance(engine.target, TableModel) and engine.target.num_forwards == 3  # one prefill


def test_a_round_says_what_was_drafted_and_what_the_target_chose() -> None:
    guesser = Guesser(wrong_at=2)
    _, rounds = rounds_of(engine_with(guesser), 4)
    first, second = next(rounds), next(rounds)
    assert first.tokens == (10, 11, 12)
    assert first.provenance == ("guesser", "guesser", TARGET)
    assert (first.step.num_draft_tokens, first.step.num_accepted_tokens) == (4, 2)
    assert first.step.context_length == 2 and second.step.context_length == 5
    assert second.provenance == (TARGET,)
    for observed, step in zip(guesser.observed, (first.step, second.step), strict=True):
        learning_ms = step.verify_ms - observed.verify_ms
        assert learning_ms > 0.0, "learning from a round is a part of it"
        assert step.policy_ms == pytest.approx(observed.policy_ms + learning_ms)
        times = {"verify_ms": step.verify_ms, "policy_ms": step.policy_ms}
        assert replace(observed, **times) == step


def test_a_token_is_said_to_come_from_its_maker() -> None:
    class Helped(Guesser):
        """Beside the right chain it proposes a wrong sibling of the first token."""

        def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
            return Proposal((1, *SCRIPT[:3]), (-1, -1, 1, 2), makers=("no", "one", "two", "two"))

    _, rounds = rounds_of(engine_with(Helped()), 4)
    assert next(rounds).provenance == ("one", "two", "two", TARGET)


def test_an_empty_proposal_is_plain_decoding() -> None:
    class Silent(Guesser):
        def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
            return Proposal()

    _, rounds = rounds_of(engine_with(Silent()), 4)
    step = next(rounds).step
    assert step.drafter == OFF and step.num_draft_tokens == 0 and step.num_output_tokens == 1


def test_prefill_reuses_what_earlier_turns_left() -> None:
    engine = engine_with(Guesser())
    play(engine, PROMPT, Plans((OFF, 0)), 4)
    sequence = engine.start((*PROMPT, 10, 11, 20), SamplingParams(), 4, frozenset())
    assert engine.prefill(sequence, threading.Event()).num_reused_tokens == 5


def test_cancel_during_a_long_prefill_is_seen_between_chunks() -> None:
    target = TableModel(lambda context: torch.zeros(VOCAB), VOCAB, capacity=4 * PREFILL_CHUNK)
    engine, cancel = Engine(target, {}), threading.Event()
    forward = target.forward

    def stop_after_this(*arguments: Any, **named: Any) -> torch.Tensor:
        cancel.set()
        return forward(*arguments, **named)

    target.forward = stop_after_this  # type: ignore[method-assign]
    sequence = engine.start((1,) * (3 * PREFILL_CHUNK), SamplingParams(), 5, frozenset())
    engine.prefill(sequence, cancel)
    assert target.cache.length == PREFILL_CHUNK
    assert list(engine.decode(sequence, Plans((OFF, 0)), cancel)) == []


def failing(engine: Engine, fault: Exception) -> None:
    """The target writes its slots, then fails, on its fourth forward."""
    target: Any = engine.target
    forward = target.forward

    def fail(*arguments: Any, **named: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(*arguments, **named)
        if target.num_forwards == 4:
            raise fault
        return logits

    target.forward = fail


def check_usable_after_an_error(engine: Engine) -> None:
    sequence, rounds = rounds_of(engine, 2)
    failing(engine, RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        list(rounds)
    assert engine.target.cache.tokens == sequence.tokens[:-1]
    assert sequence.tokens == [*PROMPT, *SCRIPT[: len(sequence.tokens) - 3]]


def test_error_in_a_forward_leaves_the_cache_at_the_root() -> None:
    check_usable_after_an_error(engine_with(Guesser()))


def test_fault_no_finally_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "decoding", lambda self, sequence: nullcontext())
    with pytest.raises(AssertionError):
        check_usable_after_an_error(engine_with(Guesser()))


def test_logits_that_are_not_numbers_end_the_turn_with_a_plain_sentence() -> None:
    def logits(context: tuple[int, ...]) -> torch.Tensor:
        return torch.full((VOCAB,), float("nan") if len(context) > 5 else 0.0)

    engine = Engine(TableModel(logits, VOCAB), {})
    sequence = engine.start(PROMPT, SamplingParams(), 9, frozenset())
    engine.prefill(sequence, threading.Event())
    with pytest.raises(NumericsError, match="not numbers"):
        list(engine.decode(sequence, Plans((OFF, 0)), threading.Event()))
    assert engine.target.cache.tokens == sequence.tokens[:-1]


def test_after_logits_that_are_not_numbers_no_slot_keeps_any() -> None:
    """A captured forward reads slots beyond the end, and a NaN comes through every mask."""
    model = with_cache(tiny_llama())
    model.weights.embedding[7] = float("nan")
    engine = Engine(model, {})
    sequence = engine.start((3, 5, 7), SamplingParams(), 9, frozenset())
    engine.prefill(sequence, threading.Event())
    with pytest.raises(NumericsError):
        list(engine.decode(sequence, Plans((OFF, 0)), threading.Event()))
    for keys, values in model.cache.slots:
        assert bool(keys.isfinite().all()) and bool(values.isfinite().all())


def test_context_full_without_room_for_the_root_is_a_cache_error() -> None:
    engine = Engine(TableModel(lambda context: torch.zeros(VOCAB), VOCAB, capacity=5), {})
    with pytest.raises(CacheError):
        play(engine, PROMPT, Plans((OFF, 0)), 9)


def test_no_draft_reaches_past_the_end_of_the_context() -> None:
    target = scripted(SCRIPT, len(PROMPT), VOCAB)
    target.cache.rollback(0)
    small = TableModel(target._logits, VOCAB, capacity=8)
    engine = Engine(small, {"guesser": Guesser()})
    policy = Plans(("guesser", 9))
    sequence = play(engine, PROMPT, policy, 6)
    assert sequence.tokens == [*PROMPT, *SCRIPT[:6]]
    assert policy.steps[0].num_draft_tokens == 5


def test_a_seed_fixes_the_noise_and_a_sampled_turn_without_one_is_refused() -> None:
    engine = engine_with(Guesser())

    def noise(seed: int | None) -> torch.Tensor:
        sequence = engine.start(PROMPT, SamplingParams(1.0, seed=seed), 4, frozenset())
        return sequence.noise.rows(4, 2)

    assert torch.equal(noise(7), noise(7)) and not torch.equal(noise(7), noise(8))
    assert noise(7).shape == (2, VOCAB)
    with pytest.raises(AssertionError, match="draws its seed"):
        noise(None)


def test_times_of_a_round_are_those_of_its_parts() -> None:
    class Slow(Guesser):
        def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
            threading.Event().wait(0.03)
            return super().propose(sequence, plan)

    class SlowPlans(Plans):
        def plan(self, sequence: decoding.Sequence) -> DraftPlan:
            threading.Event().wait(0.05)
            return super().plan(sequence)

    engine = engine_with(Slow())
    sequence = engine.start(PROMPT, SamplingParams(), 4, frozenset())
    engine.prefill(sequence, threading.Event())
    step = next(engine.decode(sequence, SlowPlans(("guesser", 2)), threading.Event())).step
    assert step.draft_ms >= 29.0
    assert step.verify_ms >= 49.0  # deciding is no drafter's cost


def test_a_round_that_asks_no_drafter_takes_no_time_to_draft() -> None:
    """By a limit of 0.01 ms, a busy machine took such a round for one that was asked in vain."""
    asked = next(rounds_of(engine_with(Guesser()), 2)[1]).step
    unasked = next(rounds_of(engine_with(Guesser()), 2, max_tokens=1)[1]).step
    assert asked.draft_ms > 0.0 and unasked.draft_ms == 0.0
