"""On fixed shapes a token has the same bits whatever runs beside it and whatever ran before.

A processor stands in for the card: its kernels, too, round by the number of rows, as the widths of
CapturedDecoder show here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache as remembered
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from localspec.core.decoding import OFF, SamplingParams
from localspec.core.errors import CacheError, ConfigError
from localspec.drafters.parts import Parts
from localspec.drafters.registry import REGISTRY, drafter_class
from localspec.engine.engine import Engine
from localspec.forward.cache import STRETCH, WIDEST, KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import CapturedDecoder
from localspec.forward.model import PREFILL_CHUNK, kv_shape
from localspec.forward.one_width import OneWidthDecoder
from localspec.forward.passes import Rows, forward_together
from localspec.loading.capture import capturable
from localspec.loading.drafters import build_drafters
from tests.kit.decoders import decoder_of
from tests.kit.foreign_tiny import foreign_to
from tests.kit.hybrids import module as hybrid_module
from tests.kit.random_heads import KINDS as HEADS
from tests.kit.random_heads import head_for
from tests.kit.tiny import CPU, Plans, play, tiny_llama, with_plain_cache
from tests.kit.tracing import TracingPool

CAPACITY = 700
VOCAB_SIZE = 64


@remembered
def module(change: float = 0.0) -> Any:
    """Long inputs: for short ones a single row takes the kernel of several. change: of the output
    head, for a draft."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    made: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in made.model.layers:  # attention that looks at some tokens more than at others
            layer.self_attn.q_proj.weight.mul_(30.0)
        made.lm_head.weight.mul_(20.0)
        made.lm_head.weight.add_(change * torch.randn_like(made.lm_head.weight))
    return made


def decoder(kind: type[CapturedDecoder] = OneWidthDecoder) -> Any:
    shape = kv_shape(module().config, CAPACITY)
    plain = decoder_of(module(), KVCache(shape, torch.float32, CPU, num_spare=WIDEST))
    return kind(plain, TracingPool())


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def read(model: Decoder, tokens: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
    found, place = list[torch.Tensor](), 0
    for width in cycle(widths):
        if place >= len(tokens):
            return torch.cat(found)
        found.append(model.forward(tokens[place : place + width]))
        place += width
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(3,), (1, 16, 2, 9, 5)], ids=str)
@pytest.mark.parametrize("start", [0, STRETCH - 20, 2 * STRETCH - 20])
def test_a_row_has_the_same_bits_at_every_width_and_in_every_window(
    start: int, widths: tuple[int, ...]
) -> None:
    found, tokens = list[torch.Tensor](), text(start + 40)
    for each in ((1,), widths):
        model = decoder()
        read(model, tokens[:start], [PREFILL_CHUNK]) if start else None
        found.append(read(model, tokens[start:], each))
    assert torch.equal(*found)


@pytest.mark.slow
def test_rows_of_their_own_widths_differ_here() -> None:
    """Else nothing was shown."""
    model, tokens = decoder(CapturedDecoder), text(40)
    one_by_one = read(model, tokens, [1])
    model.cache.rollback(0)
    assert not torch.equal(one_by_one, read(model, tokens, [5]))


def test_a_model_with_states_is_refused() -> None:
    hybrid = with_plain_cache(hybrid_module(), 96)
    assert isinstance(capturable(hybrid, TracingPool()), CapturedDecoder)
    with pytest.raises(ConfigError, match="--kernels same-bits cannot be kept"):
        capturable(hybrid, TracingPool(), is_fastest=False)


def test_captured_and_uncaptured_steps_have_the_same_bits() -> None:
    model, tokens = decoder(), text(40)
    uncaptured = read(model, tokens, [3])
    model.cache.rollback(0)
    assert list(model.capture()) and model.notice is None
    assert model.captured == {(WIDEST, 256), (WIDEST, 512), (WIDEST, 768)}
    assert torch.equal(read(model, tokens, [1, 4]), uncaptured)


@pytest.mark.slow
def test_up_to_the_end_of_the_context_and_not_beyond() -> None:
    tokens, found = text(CAPACITY), list[torch.Tensor]()
    for widths in ((1,), (4,)):
        model = decoder()
        model.forward(tokens[: CAPACITY - 8])
        found.append(read(model, tokens[-8:], widths))
        with pytest.raises(CacheError):
            model.forward([1])
    assert torch.equal(*found)


def held(cache: KVCache) -> torch.Tensor:
    parts = [part[:, :, : cache.length] for pair in cache.slots for part in pair]
    return torch.stack(parts)


class RoundedByWidth(OneWidthDecoder):
    """As on a card: whatever does not run at the one width has other bits at every width."""

    def layers(self, rows: torch.Tensor, *rest: Any) -> Any:
        return super().layers(rows + 1e-4 * len(rows), *rest)


def engine_with(name: str) -> Engine:
    target = decoder(RoundedByWidth)
    heads = {kind: head_for(kind, module) for kind in HEADS}
    foreign = foreign_to(tiny_llama(vocab_size=VOCAB_SIZE), CAPACITY)
    parts = Parts(target, with_plain_cache(module(0.1), CAPACITY), heads=heads, foreign=foreign)
    return Engine(target, {name: drafter_class(name).build(parts)})


@remembered
def turns_of(name: str, length: int, temperature: float) -> list[tuple[list[int], torch.Tensor]]:
    """Return the text, and what is cached of the prompt, of a turn that goes on with a reply and of
    one with another prompt, after turns with other texts. name: of a drafter, or OFF."""
    engine = engine_with(name) if name != OFF else Engine(decoder(RoundedByWidth), {})
    prompt, sampling, plans = tuple(text(length)), SamplingParams(temperature, seed=3), (name, 5)
    other = (*prompt[: length // 2], *text(length // 2 + 10, seed=5))
    play(engine, other, Plans(plans), 4, sampling)
    before = play(engine, prompt[: length - 20], Plans(plans), 16, sampling)
    turns = list[tuple[list[int], torch.Tensor]]()
    for asked, count in ((*before.tokens, 4), 16), (prompt, 24):
        turn = play(engine, asked, Plans(plans), count, sampling)
        turns.append((turn.tokens, held(engine.target.cache)[..., :length, :]))
    return turns


# All but those that draft trees alone, and the drafters of Gemma 4.
DRAFTERS = sorted({*REGISTRY} - {"lookahead", "draft_tree", "assistant"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "length", "temperature"),
    [
        ("draft_model", 30, 0.0),
        ("draft_model", PREFILL_CHUNK - 12, 0.9),
        *((name, PREFILL_CHUNK + 90, 0.9) for name in DRAFTERS),
    ],
)
def test_a_reply_and_its_cache_are_the_same_after_other_turns_and_with_drafts(
    name: str, length: int, temperature: float
) -> None:
    """Also where a chat goes on, whose replies were decoded and are read as a prompt now."""
    wanted, prompt = turns_of(OFF, length, temperature), tuple(text(length))
    for (tokens, rows), (own, own_rows) in zip(
        turns_of(name, length, temperature), wanted, strict=True
    ):
        assert tokens == own
        assert torch.equal(rows, own_rows)
    fresh = Engine(decoder(RoundedByWidth), {})
    alone = play(fresh, prompt, Plans((OFF, 0)), 24, SamplingParams(temperature, seed=3))
    assert alone.tokens == wanted[1][0]
    assert torch.equal(held(fresh.target.cache)[..., :length, :], wanted[1][1])


def test_sequences_beside_each_other_have_the_bits_that_they_have_alone() -> None:
    first = decoder()
    second = first.beside()
    alone = [first.forward(text(5)), first.forward(text(7, seed=1))]
    first.cache.rollback(0)
    found = forward_together([Rows(first, text(5)), Rows(second, text(3, seed=2))])
    assert torch.equal(found[0], alone[0])
    found = forward_together([Rows(second, text(2)), Rows(first, text(7, seed=1))])
    assert torch.equal(found[1], alone[1])


def test_what_drafts_trees_alone_is_refused() -> None:
    _, statuses = build_drafters(Parts(decoder()), lambda phrase: None)
    refused = {each.name for each in statuses if "chain of tokens" in each.reason}
    assert refused == {"lookahead", "draft_tree"}
