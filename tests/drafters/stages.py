"""Drafters over tiny models for the contract: real ones, and small ones that can be enumerated.

`stage` builds drafters on a real target of 64 tokens. `small_stage` sets one up over six tokens,
where every text of a few tokens can be made the target's choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import OFF, Outcome, Proposal, SamplingParams, Step
from localspec.drafters.drafting import chances
from localspec.drafters.parts import DrafterBase, Parts
from localspec.drafters.registry import REGISTRY, drafter_class
from localspec.engine.engine import Engine
from tests.kit.foreign_tiny import foreign_to
from tests.kit.random_heads import KINDS as HEAD_KINDS
from tests.kit.random_heads import head_for
from tests.kit.tiny import (
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
from tools.identity import RandomPolicy

OF_GEMMA = ("assistant",)  # drafts for Gemma 4 alone: test_assistant
NAMES = tuple(name for name in REGISTRY if name not in OF_GEMMA)
PROMPT = (5, 9, 12, 5, 9, 30, 7, 5, 9)  # repeats itself, so that lookup has something to say
LENGTH = 24
SHORT = 16  # of a sampled reply: several seeds are drawn
SMALL_GAP = 1e-4  # below this two forwards of different width may name different tokens

SMALL_VOCAB = 6
SMALL_PROMPT = (1, 2, 3, 1, 2, 4, 1, 2)

WARPS = {
    "greedy": SamplingParams(),
    "greedy with a penalty": SamplingParams(repetition_penalty=1.5),
    "cool": SamplingParams(temperature=0.7),
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


@lru_cache
def _made(names: tuple[str, ...], module: Callable[[], Any], capacity: int) -> Parts:
    return parts_for(names, module(), capacity)


def lent_parts(names: tuple[str, ...], module: Callable[[], Any], capacity: int) -> Parts:
    """`parts_for` with new caches over weights that are made once a run, because to make them
    takes longer than a reply. No test may change these weights."""
    parts = _made(names, module, capacity).beside()
    assert parts is not None
    return replace(parts, made={})


def stage(names: tuple[str, ...] = NAMES) -> Stage:
    parts = lent_parts(names, tiny_llama, 256)
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


@lru_cache
def plain_reply(warp: str, seed: int, length: int = SHORT) -> Context:
    """What the engine writes without drafting."""
    engine, sampling = stage(()).engine, replace(WARPS[warp], seed=seed)
    return tuple(play(engine, PROMPT, Plans((OFF, 0)), length, sampling).tokens)


def check_same(
    engine: Engine, policy: Any, warp: str = "greedy", seed: int = 0, length: int = SHORT
) -> decoding.Sequence:
    """The reply is that of plain decoding with the seed; returns its sequence."""
    sampling = replace(WARPS[warp], seed=seed)
    sequence = play(engine, PROMPT, policy, length, sampling)
    assert tuple(sequence.tokens) == plain_reply(warp, seed, length)
    assert engine.target.cache.tokens == sequence.tokens[:-1]
    return sequence


def check_greedy(engine: Engine, *plans: tuple[str, int]) -> list[Step]:
    policy = Plans(*plans)
    check_same(engine, policy, length=LENGTH)
    assert plain_reply("greedy", 0, LENGTH) == plain_text()
    return policy.steps


def assert_chosen(
    proposal: Proposal,
    sequence: decoding.Sequence,
    logits: Callable[[Context], torch.Tensor],
    share: float = 1.0,
) -> None:
    """Each token is what a share of the turn's noise chooses by the drafter's own logits after its
    parent, and its confidence is its chance."""
    assert proposal.tokens and proposal.confidences is not None
    for text, confidence in zip(proposal.texts, proposal.confidences, strict=True):
        above = text[:-1]
        row = logits((*sequence.tokens, *above))
        chance = chances(row[None], len(row), sequence, [above], share)[0]  # [V]
        assert text[-1] == int(chance.argmax())
        assert confidence == pytest.approx(float(chance.max()), abs=1e-4)


class RandomPlans(RandomPolicy):
    """Random drafters, lengths, stop rules, prices and fillings, with the rounds that came of
    them."""

    def __init__(self, names: tuple[str, ...], seed: int) -> None:
        super().__init__(names, random.Random(seed), "ngram" if "ngram" in names else None)
        self.steps = list[Step]()

    def observe(self, sequence: decoding.Sequence, outcome: Outcome) -> None:
        self.steps.append(outcome.step)


class Guesser(DrafterBase):
    """What a made-up drafter needs beside `propose`."""

    name = "guesser"
    shapes_itself = False

    def signal(self, sequence: decoding.Sequence) -> str:
        return "test"


def place_of(tensor: torch.Tensor) -> tuple[str, int]:
    if tensor.is_mkldnn:  # packed weights have no storage to be asked for
        return "packed", id(tensor)
    return "plain", tensor.untyped_storage().data_ptr()


def tensors_of(thing: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Return all tensors that can be reached. seen: objects that were looked into."""
    found: list[torch.Tensor] = []
    seen = set() if seen is None else seen
    if not isinstance(thing, tuple):  # a tuple made here may be freed, and its id used again
        if id(thing) in seen:
            return found
        seen.add(id(thing))
    for value in thing if isinstance(thing, tuple) else vars(thing).values():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, torch.nn.Module):
            found += [*value.parameters(), *value.buffers()]
        elif isinstance(value, tuple):
            found += tensors_of(tuple(v for v in value if hasattr(v, "__dict__")), seen)
        elif type(value).__module__.startswith("localspec") and hasattr(value, "__dict__"):
            found += tensors_of(value, seen)
    return found


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
    parts = lent_parts((name,), small_module, 32)
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
