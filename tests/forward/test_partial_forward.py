"""The first layers as a draft in the whole decoder's cache, and the forward that continues it.

The whole decoder's logits after a draft must equal those without one, wherever the draft ended and
whatever happened in between; and the lower layers must not run twice for the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from localspec.core import OFF, DraftPlan, Outcome, Proposal, SamplingParams, chain
from localspec.core import Sequence as Turn
from localspec.engine.engine import Engine
from localspec.errors import CacheError
from localspec.forward.cache import KVCache, PartialForward
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.forward.graphs import CapturedDecoder
from localspec.forward.partial_forward import EarlyExit
from localspec.forward.weight_layout import PlainLinear
from tests.forward.test_decoder import assert_close
from tests.forward.tracing import TracingPool
from tests.tiny import Plans, play, tiny_llama, with_cache, with_plain_cache

LAYERS = 5
TEXT = [5, 9, 12, 5, 30, 7]
DRAFT = [3, 14, 15, 9]


@cache
def module() -> Any:
    return tiny_llama(num_layers=LAYERS, later=1.0)


@cache
def taken_over() -> Decoder:
    return with_cache(module(), 48)


def whole() -> Decoder:
    """The same weights each time, and an empty cache."""
    return Decoder(taken_over().weights, taken_over().cache.another())


def alone(tokens: Sequence[int], before: Sequence[int] = TEXT) -> torch.Tensor:
    """The logits of a decoder without any draft."""
    return whole().forward([*before, *tokens])[len(before) :]


def drafted(depth: int = 2, tokens: Sequence[int] = DRAFT) -> tuple[Decoder, EarlyExit]:
    """A decoder whose exit ran `tokens` after TEXT, one by one, and was rolled back."""
    target = whole()
    target.forward(TEXT)
    leaving = EarlyExit(target, depth)
    for token in tokens:
        leaving.forward([token])
    target.cache.rollback(len(TEXT))
    return target, leaving


def slots(cache: KVCache) -> torch.Tensor:
    return torch.stack([part[:, :, : cache.length] for pair in cache.slots for part in pair])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(block, rows) of every block that any decoder runs."""
    found: list[tuple[int, int]] = []
    layers = Decoder.layers

    def counted(self: Decoder, rows: torch.Tensor, *rest: Any, **named: Any) -> Any:
        end = named.get("end") or len(self.weights.blocks)
        found.extend((block, rows.shape[0]) for block in range(named.get("first", 0), end))
        return layers(self, rows, *rest, **named)

    monkeypatch.setattr(Decoder, "layers", counted)
    return found


# -- the exit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", range(1, LAYERS))
def test_an_exit_has_the_logits_of_a_model_of_its_layers(depth: int) -> None:
    target = whole()
    weights = replace(target.weights, blocks=target.weights.blocks[:depth])
    wanted = Decoder(weights, whole().cache).forward([*TEXT, *DRAFT])
    found = EarlyExit(target, depth).forward([*TEXT, *DRAFT])
    assert torch.equal(found, wanted)


def test_it_holds_no_weight_and_no_cache_of_its_own() -> None:
    target = whole()
    leaving = EarlyExit(target, 2)
    assert leaving.cache is target.cache
    assert leaving.weights.blocks == target.weights.blocks[:2]
    assert leaving.weights.head is target.weights.head
    assert len(target.weights.blocks) == LAYERS


@pytest.mark.parametrize("depth", [0, LAYERS])
def test_an_exit_lies_between_the_first_and_the_last_block(depth: int) -> None:
    with pytest.raises(AssertionError, match="between"):
        EarlyExit(whole(), depth)


def test_it_leaves_the_features_of_cached_tokens_alone() -> None:
    target = whole()
    features = target.follow([0, 3, LAST])
    target.forward(TEXT)
    before = [features.rows(layer, 0, 48).clone() for layer in (0, 3, LAST)]
    EarlyExit(target, 2).forward(DRAFT)
    for layer, old in zip((0, 3, LAST), before, strict=True):
        assert torch.equal(features.rows(layer, 0, 48), old)


# -- continuing ------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", range(1, LAYERS))
@pytest.mark.parametrize("num_drafted", range(len(DRAFT) + 1))
def test_a_continued_chain_is_the_plain_forward(depth: int, num_drafted: int) -> None:
    target, _ = drafted(depth, DRAFT[:num_drafted])
    plain = whole()
    plain.forward(TEXT)
    assert_close(target.forward(DRAFT), plain.forward(DRAFT))
    assert target.cache.tokens == plain.cache.tokens
    assert_close(slots(target.cache), slots(plain.cache))
    assert target.cache.partial is None


def test_lower_layers_run_only_for_new_rows(runs: list[tuple[int, int]]) -> None:
    target, _ = drafted(2, DRAFT[:3])
    runs.clear()
    target.forward(DRAFT)
    assert runs == [(0, 1), (1, 1), (2, 4), (3, 4), (4, 4)]


def test_rows_of_several_tokens_in_one_forward_count_as_well(runs: list[tuple[int, int]]) -> None:
    target = whole()
    target.forward(TEXT)
    EarlyExit(target, 2).forward(DRAFT[:2])
    EarlyExit(target, 2).forward(DRAFT[2:3])
    target.cache.rollback(len(TEXT))
    runs.clear()
    assert_close(target.forward(DRAFT), alone(DRAFT))
    assert runs[0] == (0, 1)


@pytest.mark.parametrize("same", range(len(DRAFT)))
def test_of_another_text_only_the_common_beginning_counts(
    same: int, runs: list[tuple[int, int]]
) -> None:
    target, _ = drafted()
    other = [*DRAFT[:same], *(token + 20 for token in DRAFT[same:])]
    runs.clear()
    assert_close(target.forward(other), alone(other))
    assert (0, len(DRAFT) - same) in runs


def test_a_draft_rolled_back_in_part_continues_from_that_part() -> None:
    target, leaving = drafted()
    leaving.forward(DRAFT[:3])
    target.cache.rollback(len(TEXT) + 1)
    leaving.forward([40])
    leaving.forward([41])
    target.cache.rollback(len(TEXT))
    tokens = [DRAFT[0], 40, 41, 2]
    assert_close(target.forward(tokens), alone(tokens))


@pytest.mark.parametrize("layers", [(0,), (1,), (1, 2), (0, 4), (LAST,), (0, 1, 2, 3, 4, LAST)])
def test_features_come_out_as_without_a_draft(layers: tuple[int, ...]) -> None:
    target, plain = whole(), whole()
    for model in (target, plain):
        model.follow(layers)
        model.forward(TEXT)
    leaving = EarlyExit(target, 2)
    for token in DRAFT[:3]:
        leaving.forward([token])
    target.cache.rollback(len(TEXT))
    target.forward(DRAFT)
    plain.forward(DRAFT)
    assert target.cache.features is not None and plain.cache.features is not None
    for layer in layers:
        found, wanted = (m.cache.features.rows(layer, 0, 10) for m in (target, plain))
        assert_close(found, wanted)


def test_layers_that_are_first_followed_after_the_draft_are_run_for_all() -> None:
    target, _ = drafted()
    features, plain = target.follow([0]), whole()
    plain.follow([0])
    target.forward(DRAFT)
    plain.forward([*TEXT, *DRAFT])
    assert plain.cache.features is not None
    assert_close(features.rows(0, 6, 10), plain.cache.features.rows(0, 6, 10))


# -- what makes rows invalid --------------------------------------------------------------------


def another_forward(target: Decoder, leaving: EarlyExit) -> None:
    target.forward([33, 34])
    target.cache.rollback(len(TEXT))


def another_text(target: Decoder, leaving: EarlyExit) -> None:
    target.cache.rollback(2)
    target.forward([31, 32, 33, 34])


def a_shorter_text(target: Decoder, leaving: EarlyExit) -> None:
    target.cache.rollback(2)


def the_same_text_again(target: Decoder, leaving: EarlyExit) -> None:
    target.cache.rollback(2)
    target.forward(TEXT[2:])


def a_draft_by_another_exit(target: Decoder, leaving: EarlyExit) -> None:
    EarlyExit(target, 3).forward([DRAFT[0]])
    target.cache.rollback(len(TEXT))


def a_draft_by_other_weights(target: Decoder, leaving: EarlyExit) -> None:
    def noisy(linear: Any) -> PlainLinear:
        return PlainLinear(linear.dense().weight + 0.3, None)

    EarlyExit(target.with_linears(noisy), 2).forward(DRAFT[:3])
    target.cache.rollback(len(TEXT))


def a_tree(target: Decoder, leaving: EarlyExit) -> None:
    target.forward([8, DRAFT[0], DRAFT[1]], [-1, -1, 1])
    target.cache.keep(len(TEXT), ())


def a_tree_of_the_exit(target: Decoder, leaving: EarlyExit) -> None:
    leaving.forward([8, DRAFT[0], DRAFT[1]], [-1, -1, 1])
    target.cache.rollback(len(TEXT))


def a_path_kept(target: Decoder, leaving: EarlyExit) -> None:
    leaving.forward(DRAFT[:3])
    target.cache.keep(len(TEXT), (1, 2))
    target.cache.rollback(len(TEXT))


def a_forward_that_fails(target: Decoder, leaving: EarlyExit) -> None:
    with pytest.raises(IndexError):
        target.forward([DRAFT[0], 10_000])


def a_clearing_of_slots(target: Decoder, leaving: EarlyExit) -> None:
    target.cache.zero_beyond()


EVENTS = (
    another_forward,
    another_text,
    a_shorter_text,
    the_same_text_again,
    a_draft_by_another_exit,
    a_draft_by_other_weights,
    a_tree,
    a_tree_of_the_exit,
    a_path_kept,
    a_forward_that_fails,
    a_clearing_of_slots,
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_no_stale_rows_are_continued(event: Callable[[Decoder, EarlyExit], None]) -> None:
    target, leaving = drafted()
    event(target, leaving)
    before = list(target.cache.tokens)
    assert_close(target.forward(DRAFT), alone(DRAFT, before))


def test_a_full_context_leaves_the_rows_valid() -> None:
    target, _ = drafted()
    with pytest.raises(CacheError):
        target.forward([1] * 60)
    assert_close(target.forward(DRAFT), alone(DRAFT))


def test_fault_rows_that_outlive_their_text_are_seen() -> None:
    """Planted: the cache forgets to drop them, in one event after the other."""
    num_seen = 0
    for event in (another_text, a_draft_by_other_weights, a_clearing_of_slots):
        target, leaving = drafted()
        partial = target.cache.partial
        assert isinstance(partial, PartialForward)
        event(target, leaving)
        before = list(target.cache.tokens)
        target.cache.partial = partial
        error = (target.forward(DRAFT) - alone(DRAFT, before)).abs().max()
        num_seen += float(error) > 0.1
    assert num_seen == 3


def test_a_tree_is_verified_as_without_a_draft() -> None:
    parents = [-1, 0, 0, 1]
    target, _ = drafted()
    plain = whole()
    plain.forward(TEXT)
    assert_close(target.forward(DRAFT, parents), plain.forward(DRAFT, parents))


def test_a_captured_forward_computes_everything_anew() -> None:
    target = CapturedDecoder(with_plain_cache(module(), 48), TracingPool())
    for _ in target.capture():
        pass
    target.forward(TEXT)
    EarlyExit(target, 2).forward(DRAFT[:3])
    target.cache.rollback(len(TEXT))
    assert_close(target.forward(DRAFT), alone(DRAFT))
    assert target.cache.partial is None


def test_an_uncaptured_forward_of_a_captured_decoder_continues(runs: list[tuple[int, int]]) -> None:
    target = CapturedDecoder(with_plain_cache(module(), 48), TracingPool())
    target.forward(TEXT)
    EarlyExit(target, 2).forward(DRAFT[:3])
    target.cache.rollback(len(TEXT))
    runs.clear()
    assert_close(target.forward(DRAFT), alone(DRAFT))
    assert runs[0] == (0, 1)


# -- in the engine ----------------------------------------------------------------------------


class Leaving:
    """Drafts tokens by an exit and proposes what `shape` makes of them."""

    name = "leaving"
    shapes_itself = False
    memory_bytes = 0

    def __init__(self, target: Decoder, shape: Callable[[list[int]], Proposal]) -> None:
        self._exit = EarlyExit(target, 2)
        self._shape = shape

    def signal(self, sequence: Turn) -> str:
        return "test"

    def propose(self, sequence: Turn, plan: DraftPlan) -> Proposal:
        logits, tokens = self._exit.forward(sequence.tokens[-1:]), list[int]()
        for _ in range(plan.num_draft_tokens):
            tokens.append(int(logits[-1].argmax()))
            logits = self._exit.forward(tokens[-1:])
        return self._shape(tokens)

    def observe(self, sequence: Turn, outcome: Outcome) -> None:
        pass


def as_chain(tokens: list[int]) -> Proposal:
    return chain(tuple(tokens))


def as_tree(tokens: list[int]) -> Proposal:
    if len(tokens) < 2:
        return chain(tuple(tokens))
    return Proposal((1, *tokens), (-1, -1, *range(1, len(tokens))))


def as_nothing(tokens: list[int]) -> Proposal:
    return Proposal()


def as_something_else(tokens: list[int]) -> Proposal:
    return chain((*tokens[:1], 2, 3)[: len(tokens)])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [as_chain, as_tree, as_nothing, as_something_else])
def test_greedy_text_is_that_of_plain_decoding(shape: Callable[[list[int]], Proposal]) -> None:
    target = with_cache(tiny_llama(num_layers=LAYERS, later=0.3))
    engine = Engine(target, {"leaving": Leaving(target, shape)})
    plain = play(engine, tuple(TEXT), Plans((OFF, 0)), 24)
    for plans in ((("leaving", 4),), (("leaving", 3), (OFF, 0), ("leaving", 1))):
        drafted_text = play(engine, tuple(TEXT), Plans(*plans), 24)
        assert drafted_text.tokens == plain.tokens
        assert target.cache.tokens == plain.tokens[:-1]


def test_an_abandoned_round_leaves_no_trace() -> None:
    """Proposed and never verified; the next turn has another text."""
    target = with_cache(tiny_llama(num_layers=LAYERS, later=0.3))
    drafter = Leaving(target, as_chain)
    engine = Engine(target, {"leaving": drafter})
    plain = play(engine, (*TEXT, 8, 9), Plans((OFF, 0)), 20).tokens
    sequence = engine.start(tuple(TEXT), SamplingParams(), 20, frozenset())
    target.cache.rollback(0)
    target.forward(TEXT[:-1])
    drafter.propose(sequence, DraftPlan("leaving", 4))
    assert play(engine, (*TEXT, 8, 9), Plans(("leaving", 4)), 20).tokens == plain
