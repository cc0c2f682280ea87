"""Drafters over tiny models for the contract: real ones, and small ones that can be enumerated.

`stage` builds drafters on a real target of 64 tokens. `sampled` sets one up over six tokens, where
every course that chance can take through a round is played.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from localspec import core
from localspec.core import DraftPlan, Outcome, Proposal, SamplingParams, Step
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.registry import REGISTRY, drafter_class
from localspec.engine.engine import Engine
from localspec.engine.sampling import distributions
from tests.drafters.foreign_tiny import foreign_to
from tests.drafters.random_heads import KINDS as HEAD_KINDS
from tests.drafters.random_heads import head_for
from tests.engine.enumeration import courses, largest_error, path_of
from tests.tiny import (
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
LENGTH = 24
SMALL_GAP = 1e-4  # below this two forwards of different width may name different tokens

SMALL_VOCAB = 6
SMALL_PROMPT = (1, 2, 3, 1, 2, 4, 1, 2)
ROUNDING = 1e-5  # of probabilities in fp32
FAULT = 1e-3  # a planted one moves a pair of tokens by more

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


def parts_for(names: tuple[str, ...], module: Any, capacity: int) -> Parts:
    """What these drafters may be built from, beside heads."""
    needs = {REGISTRY[name].needs for name in names}
    draft = with_cache(agreeing_draft(module), capacity) if "draft" in needs else None
    foreign = foreign_to(module, capacity) if "foreign" in needs else None
    return Parts(with_cache(module, capacity), draft, foreign=foreign)


@dataclass(frozen=True)
class Stage:
    """A target with its drafters, all real."""

    engine: Engine
    drafters: dict[str, Any]


def stage(names: tuple[str, ...] = NAMES) -> Stage:
    module = tiny_llama()
    parts = parts_for(names, module, 256)
    drafters = {name: build(name, parts) for name in names}
    return Stage(Engine(parts.target, drafters), drafters)


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


class Guesser(DrafterBase):
    """What a made-up drafter needs beside `propose`."""

    name = "guesser"
    shapes_itself = False

    def signal(self, sequence: core.Sequence) -> str:
        return "test"


# -- six tokens ---------------------------------------------------------------------------------


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
    parts = parts_for((name,), module, 32)
    drafter, real = build(name, parts, small_module), parts.target
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
