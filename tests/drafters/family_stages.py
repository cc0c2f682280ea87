"""Targets of further families with every drafter that is offered for them, over tiny models.

Weights, draft models and heads are made once a run; a stage has caches of its own. Each family is
a kind of memory or of layers: states, a mixture with states, windows with keys that other layers
share and inputs for every layer, windows with sinks and a mixture.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from localspec.core import decoding
from localspec.core.decoding import OFF, DraftPlan, Proposal, SamplingParams, chain
from localspec.drafters.parts import Parts
from localspec.drafters.registry import REGISTRY
from localspec.engine.engine import Engine
from localspec.forward.cache import native_cache
from localspec.forward.decoder import Decoder, kv_shape_of
from localspec.loading.drafters import build_drafters
from tests.drafters.stages import Guesser
from tests.kit.families import SHAPE, small
from tests.kit.foreign_tiny import foreign_to
from tests.kit.random_heads import KINDS as HEAD_KINDS
from tests.kit.random_heads import head_for
from tests.kit.tiny import CPU, Context, Plans, play, tiny_llama, with_cache

VOCAB_SIZE = SHAPE["vocab_size"]
WORDS: Context = tuple((7 * at + at * at + 3) % VOCAB_SIZE for at in range(16))
PROMPT: Context = (*WORDS, *WORDS[3:13])  # repeats itself, so that lookup has something to say
# Of targets with windows: replies begin before the end of a ring of slots and go on behind it.
RINGS = {"gemma4, keys of earlier layers": 1024, "gpt_oss": 512}
NUM_DRAFT_LAYERS = 2
LATER = 0.2  # how much the layers after those of the draft say
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

CHAINS = {"ngram", "draft_model", "chained", "early_exit", "eagle", "medusa", "mtp", "block"}
TREES = {"lookahead", "draft_tree"}
FAMILIES: dict[str, set[str]] = {
    "qwen3_5": {*CHAINS, "self_quant", "cross_tokenizer"},
    "qwen3_5_moe": {*CHAINS, "cross_tokenizer"},
    "gemma4, keys of earlier layers": {*CHAINS, *TREES, "self_quant", "cross_tokenizer"},
    "gpt_oss": {*CHAINS, *TREES, "cross_tokenizer"},
}
CASES = [(family, dtype) for family in FAMILIES for dtype in (FP32, BF16)]
# In bf16 those alone that run the target's layers, and a head that reads their states: all drafters
# are drawn there in turn.
DRAFTED = [
    (family, dtype, name)
    for family, dtype in CASES
    for name in sorted(FAMILIES[family])
    if dtype == FP32 or REGISTRY[name].family == "self" or name == "mtp"
]


def named(value: Any) -> str:
    return str(value).removeprefix("torch.").partition(",")[0]


@cache
def module_of(family: str) -> Callable[[], Any]:
    """The weights of a family in fp32. Later layers say little, so that drafts are accepted."""

    @cache
    def made() -> Any:
        module = small(family, hidden_size=64, intermediate_size=64)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
                is_last = any(part in name for part in ("o_proj", "out_proj", "down_proj"))
                if layer >= NUM_DRAFT_LAYERS and is_last:
                    weight.mul_(LATER)
        return module

    return made


@cache
def parts_of(family: str, dtype: torch.dtype) -> Parts:
    heads = {kind: head_for(kind, module_of(family)) for kind in HEAD_KINDS}
    target = with_cache(small_in(family, dtype), capacity_of(family))
    assert bool(target.cache.key_values.rings) == (family in RINGS)
    foreign = foreign_to(tiny_llama(vocab_size=VOCAB_SIZE), capacity_of(family))
    return Parts(target, first_layers(target), heads=heads, foreign=foreign)


def capacity_of(family: str) -> int:
    return RINGS.get(family, 0) + 130


@cache
def prompt_of(family: str) -> Context:
    """A prompt that ends 6 tokens before a ring does, where the target has rings."""
    leading = max(0, RINGS.get(family, 0) - len(PROMPT) - 6)
    return (*((5 * at * at + 11 * at + 2) % VOCAB_SIZE for at in range(leading)), *PROMPT)


def small_in(family: str, dtype: torch.dtype) -> Any:
    module = module_of(family)()
    return module if dtype == FP32 else copy.deepcopy(module).to(dtype)


def first_layers(target: Decoder) -> Decoder:
    """A draft model of the target's first layers."""
    weights = replace(target.weights, blocks=target.weights.blocks[:NUM_DRAFT_LAYERS])
    shape = kv_shape_of(weights, target.cache.shape.capacity)
    kept_in = native_cache(shape, target.weights.embedding.dtype, CPU)
    return Decoder(weights, kept_in, is_fastest=True)


@dataclass(frozen=True)
class Stage:
    engine: Engine
    statuses: tuple[Any, ...]

    @property
    def target(self) -> Any:
        return self.engine.target


def stage(family: str, dtype: torch.dtype) -> Stage:
    """Over empty caches."""
    parts = parts_of(family, dtype).beside()
    assert parts is not None
    drafters, statuses = build_drafters(parts, lambda phrase: None)
    return Stage(Engine(parts.target, drafters), statuses)


def target_of(family: str, dtype: torch.dtype) -> Decoder:
    """Over an empty cache."""
    target = parts_of(family, dtype).target
    assert isinstance(target, Decoder)
    return target.beside()


@cache
def plain_reply(
    family: str, dtype: torch.dtype, prompt: Context, length: int, sampling: SamplingParams
) -> Context:
    """What the target writes without drafting, read afresh."""
    engine = Engine(target_of(family, dtype), {})
    return tuple(play(engine, prompt, Plans((OFF, 0)), length, sampling).tokens)


@cache
def row_after(family: str, dtype: torch.dtype, text: Context) -> torch.Tensor:
    """The target's logits after a text that was read afresh, [V]."""
    return target_of(family, dtype).forward(text, num_logits=1)[0]


def proposed(engine: Engine, name: str, text: Context, length: int) -> Proposal:
    """What a drafter sends after a text."""
    sequence = engine.start(text, SamplingParams(1.0, seed=5), length + 2, frozenset())
    engine.prefill(sequence, threading.Event())
    plan = DraftPlan(name, length, is_chain=True)
    found: Proposal = engine.drafters[name].propose(sequence, plan)
    engine.target.cache.rollback(len(text) - 1)
    return found


class Known(Guesser):
    """Knows the reply, and drafts the next wrong token after 0, 1, … of its tokens in turn."""

    def __init__(self, text: Context, size: int, num_right: int | None = None) -> None:
        """num_right: how many tokens are right every time."""
        self.text, self._size = text, size
        self._always_right, self._num_right = num_right, num_right or 0

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        place, right = len(sequence.tokens), self._num_right
        if self._always_right is None:
            self._num_right = (right + 1) % (self._size + 1)
        after = [*self.text[place:], *[0] * self._size][: self._size]
        wrong = [(token + 1) % VOCAB_SIZE for token in after[right:]]
        return chain((*after[:right], *wrong)[: plan.num_draft_tokens])


class KnownTree(Guesser):
    """Knows the reply, and drafts it as the second branch at every place, up to a wrong one."""

    def __init__(self, text: Context, size: int) -> None:
        self.text, self._size = text, size
        self._num_right = 0

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        place, right = len(sequence.tokens), self._num_right
        self._num_right = (right + 1) % (self._size + 1)
        after = self.text[place:][: min(self._size, plan.num_draft_tokens // 2)]
        tokens, parents, parent = list[int](), list[int](), -1
        for depth, token in enumerate(after):
            tokens += [(token + 1) % VOCAB_SIZE, token if depth < right else (token + 2) % 9]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Proposal(tuple(tokens), tuple(parents))
