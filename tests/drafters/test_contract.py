"""What every registered drafter must keep: the output is the target's own, whatever it guesses.

Greedy text is compared token by token in fp32 on tiny real models. When sampling, every course that
chance can take through a round is played (tests.engine.enumeration), so the distribution of the
first two tokens is computed and compared with the target's own. With the real random source a few
drafters are compared by chi-squared. Faults are planted and must be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from statistics import NormalDist
from typing import Any

import pytest
import torch

from localspec import core
from localspec.core import OFF, DraftPlan, Growth, Outcome, Proposal, SamplingParams, Step, chain
from localspec.drafters.parts import Parts
from localspec.drafters.registry import REGISTRY, drafter_class
from localspec.engine import engine as engine_module
from localspec.engine.distributions import DenseRow, target_rows
from localspec.engine.engine import Engine
from localspec.engine.sampling import distributions
from localspec.forward.cache import KVCache, KVShape
from tests.drafters.foreign_tiny import foreign_to
from tests.drafters.random_heads import KINDS as HEAD_KINDS
from tests.drafters.random_heads import head_for
from tests.engine.enumeration import courses, largest_error, path_of
from tests.tiny import (
    CPU,
    Context,
    Plans,
    TableModel,
    agreeing_draft,
    play,
    remembered,
    remembered_model,
    tiny_llama,
    with_cache,
)

NAMES = tuple(REGISTRY)
PROMPT = (5, 9, 12, 5, 9, 30, 7, 5, 9)  # repeats itself, so that lookup has something to say
LENGTH = 40
SMALL_GAP = 1e-4  # below this two forwards of different width may name different tokens

SMALL_VOCAB = 6
SMALL_PROMPT = (1, 2, 3, 1, 2, 4, 1, 2)
ROUNDING = 1e-5  # of probabilities in fp32
FAULT = 1e-3  # a planted one moves a pair of tokens by more

NUM_TURNS = 1000
SIGNIFICANCE = 1e-5

WARPS = {
    "plain": SamplingParams(temperature=1.0),
    "top_k": SamplingParams(temperature=1.2, top_k=4),
    "top_p": SamplingParams(temperature=1.2, top_p=0.8),
    "min_p": SamplingParams(temperature=1.2, min_p=0.1),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.4),
    "all": SamplingParams(0.9, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.2),
}


def build(name: str, parts: Parts, module: Callable[[], Any] = tiny_llama) -> Any:
    """The drafter; one that needs a head gets a random one. module: the target's weights."""
    heads = {name: head_for(name, module)} if name in HEAD_KINDS else {}
    return drafter_class(name).build(replace(parts, heads=heads))


@dataclass(frozen=True)
class Stage:
    """A target with its drafters, all real."""

    engine: Engine
    drafters: dict[str, Any]


def stage(names: tuple[str, ...] = NAMES) -> Stage:
    module = tiny_llama()
    target = with_cache(module)
    parts = Parts(target, with_cache(agreeing_draft(module)), foreign=foreign_to(module))
    drafters = {name: build(name, parts) for name in names}
    return Stage(Engine(target, drafters), drafters)


@lru_cache
def plain_text(prompt: Context = PROMPT, length: int = LENGTH, seed: int = 0) -> Context:
    """What the target alone writes, by transformers' own forward of the whole text each time."""
    module, text = tiny_llama(seed), list(prompt)
    for _ in range(length):
        with torch.no_grad():
            best = module(input_ids=torch.tensor([text])).logits[0, -1].topk(2)
        assert float(best.values[0] - best.values[1]) > SMALL_GAP, "choose another seed"
        text.append(int(best.indices[0]))
    return tuple(text)


def check_greedy(engine: Engine, *plans: tuple[str, int]) -> list[Step]:
    policy = Plans(*plans)
    sequence = play(engine, PROMPT, policy, LENGTH)
    assert tuple(sequence.tokens) == plain_text()
    assert engine.target.cache.tokens == sequence.tokens[:-1]
    return policy.steps


# -- greedy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 4, 15])
def test_greedy_text_is_the_targets_own(name: str, length: int) -> None:
    steps = check_greedy(stage((name,)).engine, (name, length))
    assert sum(step.num_accepted_tokens for step in steps) > 0, "nothing was ever accepted"


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_targets_own_with_a_penalty(name: str) -> None:
    sampling = SamplingParams(repetition_penalty=1.5)
    texts = []
    for plan in ((OFF, 0), (name, 5)):
        sequence = play(stage((name,)).engine, PROMPT, Plans(plan), LENGTH, sampling)
        texts.append(sequence.tokens)
    assert texts[0] == texts[1]


def test_plain_decoding_is_the_reference() -> None:
    check_greedy(stage(()).engine, (OFF, 0))


def test_changing_the_drafter_every_round_changes_nothing() -> None:
    plans = [(name, length) for length in (1, 3, 6) for name in (*NAMES, OFF)]
    check_greedy(stage().engine, *plans)


@pytest.mark.parametrize("name", NAMES)
def test_stopped_anywhere_the_text_goes_on_the_same(name: str) -> None:
    """Cancel after k rounds, then a new turn with the tokens so far."""
    engine = stage((name,)).engine
    for num_rounds in (1, 2, 4):
        engine.target.cache.rollback(0)
        sequence = engine.start(PROMPT, core.SamplingParams(), LENGTH, frozenset())
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
    sequence = engine.start(PROMPT, core.SamplingParams(), LENGTH, frozenset())
    engine.prefill(sequence, threading.Event())
    rounds = engine.decode(sequence, Plans((name, 4)), threading.Event())
    next(rounds)
    rounds.close()
    assert engine.target.cache.tokens == sequence.tokens[:-1]


@pytest.mark.parametrize("name", NAMES)
def test_another_conversation_between_two_turns_does_no_harm(name: str) -> None:
    engine = stage((name,)).engine
    check_greedy(engine, (name, 4))
    play(engine, (3, 4, 3, 4, 3, 4, 50, 51), Plans((name, 4)), 12)
    check_greedy(engine, (name, 4))


@pytest.mark.parametrize("name", NAMES)
def test_end_of_text_inside_a_draft_ends_the_turn_there(name: str) -> None:
    text = plain_text()
    for place in range(len(PROMPT) + 2, len(text)):
        if text[place] not in text[len(PROMPT) : place]:
            engine = stage((name,)).engine
            end = frozenset({text[place]})
            sequence = play(engine, PROMPT, Plans((name, 6)), LENGTH, end_ids=end)
            assert tuple(sequence.tokens) == text[: place + 1]
            assert sequence.finish_reason == "eos"
            assert engine.target.cache.tokens == sequence.tokens[:-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 2, 5, 11])
def test_reply_has_exactly_the_tokens_asked_for(name: str, length: int) -> None:
    policy = Plans((name, 8))
    sequence = play(stage((name,)).engine, PROMPT, policy, length)
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
        if temperature == 0.0:
            assert proposal.probs is None, "an argmax or a copy was not drawn from anything"
        elif proposal.probs is not None:
            assert proposal.probs.shape == (len(proposal.tokens), set_up.engine.target.vocab_size)
            assert torch.allclose(proposal.probs.sum(-1), torch.ones(len(proposal.tokens)))
            drawn = proposal.probs[torch.arange(len(proposal.tokens)), list(proposal.tokens)]
            assert bool((drawn > 0).all())
        if proposal.confidences is not None:
            assert len(proposal.confidences) == len(proposal.tokens)
            assert all(0.0 < c <= 1.0 + 1e-6 for c in proposal.confidences)


@pytest.mark.parametrize("name", NAMES)
def test_stop_rule_is_asked_about_drawn_tokens_and_the_last_is_submitted(name: str) -> None:
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


def place_of(tensor: torch.Tensor) -> tuple[str, int]:
    if tensor.is_mkldnn:  # packed weights have no storage to be asked for
        return "packed", id(tensor)
    return "plain", tensor.untyped_storage().data_ptr()


def tensors_of(thing: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in thing if isinstance(thing, tuple) else vars(thing).values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers()]
        elif isinstance(value, tuple):
            found += tensors_of(tuple(v for v in value if hasattr(v, "__dict__")))
        elif type(value).__module__.startswith("localspec") and hasattr(value, "__dict__"):
            found += tensors_of(value)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_context_filled_to_the_last_slot(name: str) -> None:
    module = tiny_llama()
    target = with_cache(module, capacity=len(PROMPT) + 12)
    draft = with_cache(agreeing_draft(module), capacity=len(PROMPT) + 12)
    parts = Parts(target, draft, foreign=foreign_to(module, capacity=len(PROMPT) + 12))
    engine = Engine(target, {name: build(name, parts)})
    sequence = play(engine, PROMPT, Plans((name, 6)), 12)
    assert tuple(sequence.tokens) == plain_text()[: len(PROMPT) + 12]


@pytest.mark.parametrize("name", ["draft_model", "draft_tree", "chained"])
def test_draft_with_a_shorter_context_ends_its_drafting_not_the_turn(name: str) -> None:
    """Also where it was asked for by name, and so is asked whatever it signals."""
    module = tiny_llama()
    target = with_cache(module)
    parts = Parts(target, with_cache(agreeing_draft(module), capacity=len(PROMPT) + 10))
    engine = Engine(target, {name: build(name, parts)})
    steps = check_greedy(engine, (name, 4))
    assert steps[0].num_draft_tokens > 0 and steps[-1].num_draft_tokens == 0


def test_draft_that_returns_nan_costs_time_only() -> None:
    """A damaged draft, or one whose half precision overflows."""
    for temperature in (0.0, 1.0):
        module = tiny_llama()
        draft = agreeing_draft(module)
        with torch.no_grad():
            draft.lm_head.weight[3] = float("nan")
        target = with_cache(module)
        engine = Engine(
            target, {"draft_model": build("draft_model", Parts(target, with_cache(draft)))}
        )
        sampling = SamplingParams(temperature, seed=1)
        policy = Plans(("draft_model", 4))
        sequence = play(engine, PROMPT, policy, LENGTH, sampling)
        assert len(sequence.tokens) == len(PROMPT) + LENGTH
        for step in policy.steps:
            assert all(c == c for c in step.confidences or ()), "a confidence is not a number"
        if temperature == 0.0:
            assert tuple(sequence.tokens) == plain_text()


# -- sampled: every course of a round against the target's exact distribution -----------------


def small_module() -> Any:
    """Its draft would be accepted a little more than half the time, so that faults show."""
    return tiny_llama(3, vocab_size=SMALL_VOCAB, later=0.6)


@lru_cache(maxsize=1)
def small_logits() -> tuple[Callable[[Context], torch.Tensor], Callable[[Context], torch.Tensor]]:
    module = small_module()
    return remembered(module), remembered(agreeing_draft(module))


def small_target() -> TableModel:
    return TableModel(small_logits()[0], SMALL_VOCAB, capacity=32)


def small_stage(name: str) -> Engine:
    """The drafter is built on real modules; then its forwards are remembered ones."""
    module = small_module()
    real = with_cache(module, capacity=32)
    draft = with_cache(agreeing_draft(module), capacity=32)
    parts = Parts(real, draft, foreign=foreign_to(module, capacity=32))
    drafter = build(name, parts, small_module)
    if name in HEAD_KINDS:  # they read the target's states, which no table has
        return Engine(real, {name: drafter})
    target = small_target()
    if hasattr(drafter, "model"):
        shares = drafter.model.cache is real.cache
        drafting = small_logits()[1] if name == "draft_model" else remembered_model(drafter.model)
        size, cache = drafter.model.vocab_size, target.cache if shares else None
        drafter.model = TableModel(drafting, size, capacity=32, cache=cache)
    return Engine(target, {name: drafter})


class OnePlan:
    """A policy of one plan."""

    def __init__(self, plan: DraftPlan) -> None:
        self._plan = plan

    def plan(self, sequence: core.Sequence) -> DraftPlan:
        return self._plan

    def candidates(self, sequence: core.Sequence) -> tuple[str, ...]:
        return (self._plan.drafter,)

    def observe(self, sequence: core.Sequence, outcome: Outcome) -> None:
        pass


@dataclass(frozen=True)
class Sampled:
    """A drafter's first round after SMALL_PROMPT. logits: the target's."""

    engine: Engine
    plan: DraftPlan
    sampling: SamplingParams
    logits: Callable[[Context], torch.Tensor]

    def row_after(self, text: Context) -> torch.Tensor:
        context = (*SMALL_PROMPT, *text)
        return distributions(self.logits(context)[None], self.sampling, [context])[0]

    def round(self) -> core.Round:
        sequence = core.Sequence(SMALL_PROMPT, self.sampling, 8, frozenset(), torch.Generator())
        self.engine.prefill(sequence, threading.Event())
        rounds = self.engine.decode(sequence, OnePlan(self.plan), threading.Event())
        done = next(rounds)
        rounds.close()
        return done

    def rounds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[tuple[float, Proposal, Context, torch.Tensor]]:
        """(probability, proposal, accepted tokens, row of the next) of every course of a round."""
        for weight, done, last in courses(self.round, monkeypatch):
            assert done.proposal is not None and done.verdict is not None
            yield weight, done.proposal, path_of(done.proposal, done.verdict), last

    def error(self, monkeypatch: pytest.MonkeyPatch) -> float:
        """How far the first two tokens are from the target's own, at the worst pair."""
        found = ((weight, path, last) for weight, _, path, last in self.rounds(monkeypatch))
        return largest_error(found, self.row_after)


def sampled(name: str, warp: str, **plan: Any) -> Sampled:
    """A drafter that has drafted for another text before."""
    engine = small_stage(name)
    play(engine, (4, 2, 1, 3, 3), Plans((name, 3)), 6, SamplingParams(1.0, seed=1))
    size = 4 if engine.drafters[name].shapes_itself else 2
    return Sampled(engine, DraftPlan(name, size, **plan), WARPS[warp], small_logits()[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warp", WARPS)
def test_sampled_text_is_distributed_as_the_targets_own(
    name: str, warp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sampled(name, warp).error(monkeypatch) < ROUNDING


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_that_ends_by_its_confidences_and_prices_is_as_exact(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = Growth(lambda confidence: confidence, (0.05,) * 4, 0.1)
    found = sampled(name, "plain", keep_drafting=lambda index, c: c > 0.5, growth=growth)
    assert found.error(monkeypatch) < ROUNDING


# -- sampled: with the real random source -------------------------------------------------------


def table_of(row_after: Callable[[Context], torch.Tensor]) -> torch.Tensor:
    """Chance of each of the first three tokens together, [V, V, V]."""
    table = torch.zeros(SMALL_VOCAB, SMALL_VOCAB, SMALL_VOCAB, dtype=torch.float64)
    first = row_after(()).double()
    for a, b in product(range(SMALL_VOCAB), repeat=2):
        table[a, b] = first[a] * row_after((a,))[b].double() * row_after((a, b)).double()
    return table


def sampled_counts(found: Sampled, num_turns: int = NUM_TURNS) -> torch.Tensor:
    """How often each of the first three tokens came together; all turns go on with one source."""
    rng, counts = torch.Generator().manual_seed(100), torch.zeros(SMALL_VOCAB**3)
    for _ in range(num_turns):
        sequence = core.Sequence(SMALL_PROMPT, found.sampling, 3, frozenset(), rng)
        found.engine.prefill(sequence, threading.Event())
        for _ in found.engine.decode(sequence, OnePlan(found.plan), threading.Event()):
            pass
        a, b, c = sequence.tokens[len(SMALL_PROMPT) :]
        counts[(a * SMALL_VOCAB + b) * SMALL_VOCAB + c] += 1
    return counts


def chance_of(counts: torch.Tensor, table: torch.Tensor) -> float:
    """p-value of chi-squared; cells expected fewer than 5 times are put together.

    By the Wilson-Hilferty normal approximation, good to some percent from 3 degrees on.
    """
    expected = table.flatten() * counts.sum()
    impossible = expected < 1e-9
    if float(counts[impossible].sum()) > 0:
        return 0.0
    rare = expected < 5.0
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    filled = wanted > 0.5
    statistic = float(((observed - wanted)[filled] ** 2 / wanted[filled]).sum())
    degrees = int(filled.sum()) - 1
    assert degrees >= 5, "too few kinds of text for a test"
    spread = 2.0 / (9.0 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1.0 - spread)) / spread**0.5
    return 1.0 - NormalDist().cdf(z)


@pytest.mark.parametrize("name", ["draft_model", "draft_tree", "ngram"])
def test_turns_drawn_by_the_real_source_are_distributed_as_the_targets_own(name: str) -> None:
    """Seed 100, N = 1000: chi-squared of the first three tokens."""
    found = sampled(name, "plain")
    assert chance_of(sampled_counts(found), table_of(found.row_after)) > SIGNIFICANCE


def test_fault_one_number_for_draft_and_verification_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Enumeration takes them for independent, so the real source has to show it."""
    found = sampled("draft_model", "plain")
    drafter = found.engine.drafters["draft_model"]
    propose = drafter.propose

    def rewinding(sequence: core.Sequence, plan: DraftPlan) -> Proposal:
        state = sequence.rng.get_state()
        proposal = propose(sequence, plan)
        sequence.rng.set_state(state)
        return proposal

    monkeypatch.setattr(drafter, "propose", rewinding)
    assert chance_of(sampled_counts(found), table_of(found.row_after)) < SIGNIFICANCE


def test_the_same_seed_gives_the_same_reply() -> None:
    for name in NAMES:
        first, again, other = (
            play(stage((name,)).engine, PROMPT, Plans((name, 3)), 20, SamplingParams(1.0, seed=s))
            for s in (4, 4, 5)
        )
        assert first.tokens == again.tokens
        assert first.tokens != other.tokens


# -- drafters that only a test would write ----------------------------------------------------


class Guesser:
    """What a drafter needs beside `propose`."""

    name = "guesser"
    shapes_itself = False
    memory_bytes = 0

    def signal(self, sequence: core.Sequence) -> str:
        return "test"

    def prepare(self, sequence: object) -> None:
        pass

    def peek(self, sequence: core.Sequence) -> Context:
        return ()

    def observe(self, sequence: core.Sequence, outcome: Outcome) -> None:
        pass


class Scribbler(Guesser):
    """Drafts right and wrong tokens, and writes nonsense into the target's own cache."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def propose(self, sequence: core.Sequence, plan: DraftPlan) -> Proposal:
        self._target.forward([60] * 3)
        text = plain_text()
        place = len(sequence.tokens)
        right = text[place : place + 2]
        return chain((*right, 61)[: plan.num_draft_tokens])


class Branching(Guesser):
    """A tree whose right path is never the first branch."""

    def propose(self, sequence: core.Sequence, plan: DraftPlan) -> Proposal:
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


def test_fault_softmax_kept_at_temperature_zero_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_module,
        "target_rows",
        lambda logits, sampling, histories: target_rows(
            logits, SamplingParams(temperature=1.0), histories
        ),
    )
    with pytest.raises(AssertionError):
        check_greedy(stage(("draft_model",)).engine, ("draft_model", 4))


@pytest.mark.parametrize("name", ["ngram", "draft_tree", "eagle"])
def test_fault_no_residual_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseRow, "without", lambda row, token, drawn_from: row)
    assert sampled(name, "plain").error(monkeypatch) > FAULT


@pytest.mark.parametrize("name", NAMES)
def test_fault_dropping_an_unlikely_drawn_token_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sampled(name, "plain")
    drafter = found.engine.drafters[name]
    propose, num_trimmed = drafter.propose, [0]

    def trimmed(sequence: core.Sequence, plan: DraftPlan) -> Proposal:
        whole = propose(sequence, plan)
        if whole.probs is None or float(whole.probs[-1][whole.tokens[-1]]) > 0.4:
            return whole
        num_trimmed[0] += 1
        tokens, parents, probs = whole.tokens[:-1], whole.parents[:-1], whole.probs[:-1]
        return Proposal(tokens, parents, probs, cannot_branch=whole.cannot_branch)

    monkeypatch.setattr(drafter, "propose", trimmed)
    assert (found.error(monkeypatch) > FAULT) == bool(num_trimmed[0])


def test_fault_argmax_draft_with_a_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = small_logits()[1]

    class Claiming(Guesser):
        def propose(self, sequence: core.Sequence, plan: DraftPlan) -> Proposal:
            row = logits(tuple(sequence.tokens)).softmax(-1)
            return chain((int(row.argmax()),), row[None])

    engine, plan = Engine(small_target(), {"guesser": Claiming()}), DraftPlan("guesser", 1)
    found = Sampled(engine, plan, WARPS["plain"], small_logits()[0])
    assert found.error(monkeypatch) > FAULT


def test_fault_penalty_without_the_drafted_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fresh(Guesser):
        """Drafts a token that is in no history yet, twice, so that its penalty is new."""

        def propose(self, sequence: core.Sequence, plan: DraftPlan) -> Proposal:
            return chain((5, 5)[: plan.num_draft_tokens])

    def insistent(context: Context) -> torch.Tensor:
        return torch.tensor([2.0] * (SMALL_VOCAB - 1) + [4.0])

    target = TableModel(insistent, SMALL_VOCAB, capacity=32)
    engine, plan = Engine(target, {"guesser": Fresh()}), DraftPlan("guesser", 2)
    found = Sampled(engine, plan, SamplingParams(1.0, repetition_penalty=4.0), insistent)
    assert found.error(monkeypatch) < ROUNDING
    monkeypatch.setattr(
        engine_module,
        "_histories",
        lambda sequence, proposal: [sequence.tokens] * (1 + len(proposal.tokens)),
    )
    assert found.error(monkeypatch) > FAULT


def test_remembered_target_equals_the_real_one() -> None:
    """The remembered target gives the very rows of the real one."""
    model = with_cache(small_module(), capacity=32)
    table = TableModel(
        small_logits()[0], SMALL_VOCAB, cache=KVCache(KVShape(1, 1, 1, 32), torch.float32, CPU)
    )
    assert torch.allclose(model.forward(SMALL_PROMPT), table.forward(SMALL_PROMPT), atol=1e-5)
    parents = [-1, 0, 0]
    assert torch.allclose(
        model.forward([3, 4, 5], parents), table.forward([3, 4, 5], parents), atol=1e-5
    )
