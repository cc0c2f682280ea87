"""What every registered drafter must keep: the output is the target's own, whatever it guesses.

Text is compared token by token in fp32 on tiny real models. Faults are planted and must be seen.
At temperatures above 0: test_contract_sampled.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from collections.abc import Sequence as Several
from itertools import zip_longest
from typing import Any

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import OFF, DraftPlan, Growth, Proposal, Round, SamplingParams, chain
from localspec.drafters.parts import Parts
from localspec.engine import batch as batches
from localspec.engine import engine as engine_module
from localspec.engine.batch import Batch, Forwarded
from localspec.engine.engine import Engine
from localspec.engine.sampling import noise_after
from localspec.forward.cache import KVCache
from localspec.forward.passes import Pass, Rows
from tests.drafters.stages import (
    LENGTH,
    NAMES,
    PROMPT,
    Guesser,
    build,
    check_greedy,
    check_same,
    lent_parts,
    parts_for,
    place_of,
    plain_text,
    stage,
    tensors_of,
)
from tests.kit.tiny import (
    Context,
    Plans,
    agreeing_draft,
    play,
    tiny_llama,
    with_cache,
)

# -- greedy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_targets_own(name: str) -> None:
    engine = stage((name,)).engine
    for length in (1, 4, 15):
        engine.target.cache.rollback(0)
        steps = check_greedy(engine, (name, length))
        assert sum(step.num_accepted_tokens for step in steps) > 0, "nothing was ever accepted"


def test_plain_decoding_is_the_reference() -> None:
    check_greedy(stage(()).engine, (OFF, 0))


def test_changing_the_drafter_every_round_changes_nothing() -> None:
    plans = [(name, length) for length in (1, 3, 6) for name in (*NAMES, OFF)]
    check_greedy(stage().engine, *plans)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_stopped_anywhere_the_text_goes_on_the_same(name: str) -> None:
    """Cancel after k rounds, then a new turn with the tokens so far."""
    engine = stage((name,)).engine
    for num_rounds in (1, 3):
        engine.target.cache.rollback(0)
        sequence = engine.start(PROMPT, decoding.SamplingParams(), LENGTH, frozenset())
        engine.prefill(sequence, threading.Event())
        cancel = threading.Event()
        for count, _ in enumerate(engine.decode(sequence, Plans((name, 4)), cancel), 1):
            if count == num_rounds:
                cancel.set()
        assert engine.target.cache.tokens == sequence.tokens[:-1]
        rest = play(engine, tuple(sequence.tokens), Plans((name, 3)), sequence.num_remaining or 1)
        assert tuple(rest.tokens) == plain_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_round_loop_leaves_the_cache_at_the_root(name: str) -> None:
    engine = stage((name,)).engine
    sequence = engine.start(PROMPT, decoding.SamplingParams(), LENGTH, frozenset())
    engine.prefill(sequence, threading.Event())
    rounds = engine.decode(sequence, Plans((name, 4)), threading.Event())
    next(rounds)
    rounds.close()
    assert engine.target.cache.tokens == sequence.tokens[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_another_conversation_between_two_turns_does_no_harm(name: str) -> None:
    engine = stage((name,)).engine
    check_greedy(engine, (name, 4))
    play(engine, (3, 4, 3, 4, 3, 4, 50, 51), Plans((name, 4)), 12)
    check_greedy(engine, (name, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_end_of_text_inside_a_draft_ends_the_turn_there(name: str) -> None:
    text, engine = plain_text(), stage((name,)).engine
    for place in range(len(PROMPT) + 2, len(text), 2):
        if text[place] not in text[len(PROMPT) : place]:
            engine.target.cache.rollback(0)
            end = frozenset({text[place]})
            sequence = play(engine, PROMPT, Plans((name, 6)), LENGTH, end_ids=end)
            assert tuple(sequence.tokens) == text[: place + 1]
            assert sequence.finish_reason == "eos"
            assert engine.target.cache.tokens == sequence.tokens[:-1]


@pytest.mark.parametrize("name", NAMES)
def test_reply_has_exactly_the_tokens_asked_for(name: str) -> None:
    engine = stage((name,)).engine
    for length in (1, 2, 5, 11):
        policy = Plans((name, 8))
        sequence = play(engine, PROMPT, policy, length)
        assert tuple(sequence.tokens) == plain_text()[: len(PROMPT) + length]
        assert sequence.finish_reason == "length"
        left = length
        for step in policy.steps:
            assert step.num_draft_tokens <= left - 1, "a draft for the last token is wasted"
            left -= step.num_output_tokens


# -- proposals ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_proposals_are_well_formed(name: str, temperature: float) -> None:
    set_up = stage((name,))
    drafter = set_up.drafters[name]
    sequence = set_up.engine.start(PROMPT, SamplingParams(temperature, seed=3), 20, frozenset())
    for length in (1, 3, 7):
        set_up.engine.target.cache.rollback(0)
        set_up.engine.prefill(sequence, threading.Event())
        assert drafter.signal(sequence) is not None
        proposal = drafter.propose(sequence, DraftPlan(name, length))
        assert 0 < len(proposal.tokens) <= length
        if proposal.confidences is not None:
            assert len(proposal.confidences) == len(proposal.tokens)
            assert all(0.0 < c <= 1.0 + 1e-6 for c in proposal.confidences)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NAMES} - {"lookahead", "cross_tokenizer"}))
def test_nothing_is_drafted_behind_the_end_of_the_text(name: str) -> None:
    """It costs time, and where the target would go on there it looks like drafts that are right.
    Lookahead's window is no guess: it gathers what may follow at other places. A draft of another
    vocabulary ends with that vocabulary's special tokens."""
    for growth in (None, Growth(lambda confidence: confidence, (0.0,) * 15, 0.0)):
        plan, ends = DraftPlan(name, 15, growth=growth), set[int]()
        for _ in range(2):
            set_up = stage((name,))
            sequence = set_up.engine.start(PROMPT, SamplingParams(), 20, frozenset(ends))
            set_up.engine.prefill(sequence, threading.Event())
            proposal = set_up.drafters[name].propose(sequence, plan)
            parents = {proposal.tokens[parent] for parent in proposal.parents if parent >= 0}
            assert ends or parents or growth is None, "without an end something follows"
            assert not ends & parents
            ends = parents


@pytest.mark.parametrize("name", NAMES)
def test_stop_rule_is_asked_about_each_token_and_ends_the_draft(name: str) -> None:
    asked: list[int] = []

    def twice(index: int, confidence: float) -> bool:
        asked.append(index)
        return index < 1

    set_up = stage((name,))
    sequence = set_up.engine.start(PROMPT, SamplingParams(1.0, seed=1), 20, frozenset())
    set_up.engine.prefill(sequence, threading.Event())
    plan = DraftPlan(name, 6, keep_drafting=twice)
    proposal = set_up.drafters[name].propose(sequence, plan)
    if asked:
        assert asked == [0, 1]
        assert len(proposal.tokens) == 2


@pytest.mark.parametrize("name", NAMES)
def test_declared_memory_covers_what_is_held(name: str) -> None:
    """Every tensor reachable from the drafter, less those of the target, counted once."""
    set_up = stage((name,))
    target = set_up.engine.target
    own = {place_of(tensor) for tensor in tensors_of(target)}
    assert len(own) > 10
    held = {}
    for tensor in tensors_of(set_up.drafters[name]):
        if place_of(tensor) not in own:
            held[place_of(tensor)] = tensor.numel() * tensor.element_size()
    assert set_up.drafters[name].memory_bytes >= sum(held.values())


@pytest.mark.parametrize("name", NAMES)
def test_context_filled_to_the_last_slot(name: str) -> None:
    module = tiny_llama()
    parts = parts_for((name,), module, len(PROMPT) + 12)
    engine = Engine(parts.target, {name: build(name, parts)})
    sequence = play(engine, PROMPT, Plans((name, 6)), 12)
    assert tuple(sequence.tokens) == plain_text()[: len(PROMPT) + 12]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "draft_tree", "chained"])
def test_a_draft_model_with_a_shorter_context_drafts_to_the_end_of_the_turn(name: str) -> None:
    """It reads the first tokens and the latest."""
    module = tiny_llama()
    target = with_cache(module)
    parts = Parts(target, with_cache(agreeing_draft(module), capacity=48))
    policy = Plans((name, 4))
    check_same(Engine(target, {name: build(name, parts)}), policy, length=80)
    assert all(step.num_draft_tokens > 0 for step in policy.steps[:-1])


@pytest.mark.parametrize("warp", ["greedy", "plain"])
def test_draft_that_returns_nan_costs_time_only(warp: str) -> None:
    """A damaged draft, or one whose half precision overflows."""
    module = tiny_llama()
    draft = agreeing_draft(module)
    with torch.no_grad():
        draft.lm_head.weight[3] = float("nan")
    parts, policy = Parts(with_cache(module), with_cache(draft)), Plans(("draft_model", 4))
    engine = Engine(parts.target, {"draft_model": build("draft_model", parts)})
    check_same(engine, policy, warp, seed=1)
    for proposal in policy.proposals:
        assert all(c == c for c in proposal.confidences or ()), "a confidence is not a number"


# -- drafters that only a test would write ----------------------------------------------------


class Scribbler(Guesser):
    """Drafts right and wrong tokens, and writes nonsense into the target's own cache."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        self._target.forward([60] * 3)
        text = plain_text()
        place = len(sequence.tokens)
        right = text[place : place + 2]
        return chain((*right, 61)[: plan.num_draft_tokens])


class Branching(Guesser):
    """A tree whose right path is never the first branch."""

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        text, place = plain_text(), len(sequence.tokens)
        if place + 2 > len(text) or plan.num_draft_tokens < 4:
            return Proposal()
        first, second = text[place : place + 2]
        return Proposal(((first + 1) % 60, first, (second + 1) % 60, second), (-1, -1, 1, 1))


def scribbling() -> Engine:
    target = with_cache(tiny_llama())
    return Engine(target, {"guesser": Scribbler(target)})


def test_scribbles_in_the_targets_cache_are_erased() -> None:
    check_greedy(scribbling(), ("guesser", 3))


def test_a_tree_gives_the_targets_own_text() -> None:
    engine = Engine(with_cache(tiny_llama()), {"guesser": Branching()})
    steps = check_greedy(engine, ("guesser", 4))
    assert max(step.num_accepted_tokens for step in steps) == 2


# -- planted faults: each check above must be able to fail ------------------------------------


def test_fault_no_rollback_before_verification_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scribbling()
    cache, rollback = engine.target.cache, engine.target.cache.rollback

    def only_a_little(length: int) -> None:
        if cache.length - length != 3:  # the scribble is three tokens long
            rollback(length)

    monkeypatch.setattr(cache, "rollback", only_a_little)
    with pytest.raises(AssertionError):
        check_greedy(engine, ("guesser", 3))


def test_fault_tree_truncated_instead_of_compacted_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def truncate(self: KVCache, base: int, path: tuple[int, ...]) -> None:
        self.tokens[base:] = [self.tokens[base + offset] for offset in path]

    monkeypatch.setattr(KVCache, "keep", truncate)
    with pytest.raises(AssertionError):
        check_greedy(Engine(with_cache(tiny_llama()), {"guesser": Branching()}), ("guesser", 4))


def test_fault_noise_at_temperature_zero_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(
        logits: torch.Tensor, sequence: decoding.Sequence, texts: list[tuple[int, ...]]
    ) -> torch.Tensor:
        return logits + noise_after(sequence, [len(text) for text in texts], logits.device)

    monkeypatch.setattr(engine_module, "scores", noisy)
    with pytest.raises(AssertionError):
        check_greedy(stage(("draft_model",)).engine, ("draft_model", 4))


def played(name: str, together: bool) -> list[tuple[Context, list[int]]]:
    """Two sequences in one batch, whose drafters share what is made of the weights, or one after
    the other, which do not: the text of each, and how many draft tokens its rounds accepted."""
    parts, prompts = lent_parts((name,), tiny_llama, 256), (PROMPT, PROMPT[::-1])
    first, own = build(name, parts), parts.beside()
    assert own is not None
    second = build(name, own)
    if hasattr(first, "model"):
        assert first.model.cache is not second.model.cache, "each would read its text over and over"
    if not together:
        own = lent_parts((name,), tiny_llama, 256)
        second = build(name, own)
    engines = (Engine(parts.target, {name: first}), Engine(own.target, {name: second}))
    batch, never, found = Batch[Round](), threading.Event(), list[tuple[Context, list[int]]]()

    def steps(engine: Engine, prompt: Context) -> Generator[Rows | Round | None, Forwarded, None]:
        sequence = engine.start(prompt, SamplingParams(), LENGTH, frozenset())
        yield from engine.read(sequence, never)
        with engine.decoding(sequence):
            while sequence.finish_reason is None:
                yield (yield from engine.round(sequence, Plans((name, 4))))

    open_ones = [
        batch.run(steps(engine, prompt)) for engine, prompt in zip(engines, prompts, strict=True)
    ]
    in_turn = zip(*zip_longest(*open_ones), strict=True) if together else map(list, open_ones)
    for prompt, rounds in zip(prompts, in_turn, strict=True):
        every = [each for each in rounds if each is not None]
        text = (*prompt, *(token for each in every for token in each.tokens))
        found.append((text, [each.step.num_accepted_tokens for each in every]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_sequences_at_once_are_drafted_and_written_as_each_is_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes that both share, where the drafter runs a model or a head token by token."""
    shared, forward = list[Several[Pass]](), batches.forward_together

    def counted(parts: Several[Pass]) -> list[torch.Tensor]:
        shared.extend([parts] if parts[0].is_draft else [])
        return forward(parts)

    monkeypatch.setattr(batches, "forward_together", counted)
    at_once, apart = played(name, together=True), played(name, together=False)
    assert bool(shared) == (name not in ("ngram", "lookahead", "block"))
    assert [text for text, _ in at_once] == [plain_text(PROMPT), plain_text(PROMPT[::-1])]
    if name == "self_quant":  # the rows of a forward are rounded by one scale
        sums = [sum(sum(accepted) for _, accepted in turns) for turns in (at_once, apart)]
        assert sums[0] >= 0.9 * sums[1]
    else:
        assert at_once == apart
    assert sum(sum(accepted) for _, accepted in at_once) > 0
