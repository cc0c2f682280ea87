"""The target's next candidates are its own logits in order, and leave the cache usable."""

from __future__ import annotations

import threading

import pytest
import torch

from localspec.core import SamplingParams
from localspec.engine.candidates import best_next
from localspec.engine.engine import Engine
from localspec.errors import NumericsError
from tests.tiny import TableModel, tiny_llama, with_cache

TOKENS = (5, 9, 17, 3)


def test_candidates_are_the_models_own_logits_best_first() -> None:
    module = tiny_llama()
    engine = Engine(with_cache(module), {})
    found = best_next(engine, TOKENS, 5)
    with torch.no_grad():
        logits = module(torch.tensor([TOKENS])).logits[0, -1]
    best = logits.topk(5)
    assert [one.token for one in found] == best.indices.tolist()
    assert [one.logit for one in found] == pytest.approx(best.values.tolist(), abs=1e-4)
    chances = logits.softmax(-1)[best.indices].tolist()
    assert [one.probability for one in found] == pytest.approx(chances, abs=1e-5)


def test_the_cache_holds_what_a_turn_would_leave() -> None:
    engine = Engine(with_cache(tiny_llama()), {})
    best_next(engine, TOKENS, 2)
    assert engine.target.cache.length == len(TOKENS) - 1
    sequence = engine.start(TOKENS, SamplingParams(), 4, frozenset())
    assert engine.prefill(sequence, threading.Event()).num_reused_tokens == len(TOKENS) - 1


def test_one_token_is_enough_and_no_more_are_named_than_there_are() -> None:
    engine = Engine(with_cache(tiny_llama(vocab_size=16)), {})
    assert len(best_next(engine, (3,), 99)) == 16


def test_no_numbers_are_refused() -> None:
    engine = Engine(TableModel(lambda tokens: torch.full((8,), float("nan")), 8), {})
    with pytest.raises(NumericsError):
        best_next(engine, (1, 2), 3)
