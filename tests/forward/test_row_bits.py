"""A row of a forward has the same bits whatever rows run beside it, and a prompt the same cache
however it is read: bf16 and fp32, chains and trees, after rollbacks, compaction and other texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache as remembered
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from localspec.forward import row_attention
from localspec.forward.cache import KVCache, KVShape
from localspec.forward.decoder import Decoder, run_together
from localspec.forward.passes import Rows, forward_together
from localspec.weights.dense import PackedLinear
from localspec.weights.linear import ROW_MULTIPLE, filled
from tests.kit.tiny import NEEDS_BF16, with_cache

BF16, FP32 = torch.bfloat16, torch.float32
HEADS = {
    "a key head each": (4, 4),
    "shared key heads": (6, 2),
    "one key head": (4, 1),
    "a window": (4, 2),
}
WINDOWS = {"a window": 300}  # fewer positions than a block of keys has
CAPACITY = 1100
VOCAB_SIZE = 64
TREE = (-1, 0, 0, 1, 2, 2, -1)
PATHS = ((0, 1, 3), (0, 2, 4), (0, 2, 5), (6,))  # of TREE, root to leaf


@remembered
def model(heads: str, dtype: torch.dtype) -> Decoder:
    """Long inputs: for short ones a single row takes the kernel of several."""
    num_heads, num_kv_heads = HEADS[heads]
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32 * num_heads,
        head_dim=32,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        pad_token_id=0,
        sliding_window=WINDOWS.get(heads),
    )
    module: Any = MistralForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for layer in module.model.layers:  # attention that looks at some tokens more than at others
            layer.self_attn.q_proj.weight.mul_(30.0)
    return with_cache(module, CAPACITY)


@pytest.fixture(
    params=[
        ("a key head each", FP32),
        ("shared key heads", BF16),
        ("one key head", BF16),
        ("a window", FP32),
    ],
    ids=["fp32", "bf16", "bf16 of one key head", "fp32 with a window"],
)
def target(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    yield model(*request.param)
    model(*request.param).cache.rollback(0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def text(size: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=size)


def read(target: Decoder, tokens: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
    """The logits of `tokens` after what is held, in pieces of these widths over and over."""
    made, place = list[torch.Tensor](), 0
    for width in cycle(widths):
        made.append(target.forward(tokens[place : place + width]))
        place += width
        if place >= len(tokens):
            return torch.cat(made)
    raise AssertionError


def held(cache: KVCache) -> torch.Tensor:
    return torch.stack([part[:, :, : cache.length] for pair in cache.slots for part in pair])


def assert_same(target: Decoder, tokens: Sequence[int], widths: Sequence[int]) -> None:
    target.cache.rollback(0)
    wanted, cached = read(target, tokens, [len(tokens)]), held(target.cache)
    target.cache.rollback(0)
    assert torch.equal(read(target, tokens, widths), wanted)
    assert torch.equal(held(target.cache), cached)


SINGLE_ROWS = [*[1] * 12, 108, *[1] * 12]


@pytest.mark.slow
@pytest.mark.parametrize("widths", [SINGLE_ROWS, [2, 8, 64]], ids=["1", "2, 8, 64"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_every_width_gives_the_bits_of_one_forward(
    heads: str, dtype: torch.dtype, widths: list[int]
) -> None:
    assert_same(model(heads, dtype), text(132), widths)


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("widths", [[5], [7, 1, 2]])
def test_with_two_threads_as_well(target: Decoder, widths: list[int]) -> None:
    assert_same(target, text(70), widths)


@pytest.mark.slow
def test_at_every_length_of_a_context(target: Decoder) -> None:
    """Keys are read in blocks; within and across them nothing changes."""
    tokens = text(CAPACITY)
    wanted = read(target, tokens, [512])
    for start in (
        1090,
        1025,
        1024,
        1020,
        830,
        820,
        700,
        513,
        512,
        511,
        508,
        500,
        382,
        254,
        128,
        60,
        0,
    ):
        for width in (1, 2, 6, 20):
            target.cache.rollback(start)
            made = target.forward(tokens[start : start + width])
            assert torch.equal(made, wanted[start : start + width]), (start, width)


@pytest.mark.slow
def test_one_row_after_the_other_as_well(target: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose library gives rows other bits beside others."""
    monkeypatch.setattr(row_attention, "tile_of", lambda *_: row_attention.TILES[-1])
    before, nodes = text(140), text(len(TREE), seed=2)
    whole = torch.cat((target.forward(before), target.forward(nodes, TREE)))
    target.cache.rollback(0)
    apart = torch.cat((read(target, before, [1, 7, 20]), target.forward(nodes, TREE)))
    assert torch.equal(apart, whole)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_attention_gives_heads_of_usual_sizes_the_same_bits(
    dtype: torch.dtype, head_dim: int
) -> None:
    """The library has other kernels for few rows, and more rows are few for larger heads."""
    torch.manual_seed(0)
    cache = KVCache(KVShape(1, 2, head_dim, 1024), dtype, torch.device("cpu"), has_key_blocks=True)
    heads = row_attention.Heads(2, 2, head_dim)
    queries = torch.randn(100, 2, head_dim).to(dtype)
    keys_values = torch.randn(100, 4, head_dim).to(dtype)
    whole = row_attention.RowAttention(cache, 480, 100, heads)(0, queries, keys_values)
    for size in (*range(1, 12), 24, *range(31, 41), 63, 65, 97):
        rows = slice(50 - size // 2, 50 - size // 2 + size)
        attend = row_attention.RowAttention(cache, 480 + rows.start, size, heads)
        assert torch.equal(attend(0, queries[rows], keys_values[rows]), whole[rows]), size


@pytest.mark.slow
def test_threads_change_nothing(target: Decoder, two_threads: None) -> None:
    both = read(target, text(90), [1, 6])
    torch.set_num_threads(1)
    target.cache.rollback(0)
    assert torch.equal(read(target, text(90), [1, 6]), both)


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 70, 382, 508, 511])
def test_a_path_of_a_tree_has_the_bits_of_its_chain(target: Decoder, length: int) -> None:
    """Also where a block of keys ends among its slots."""
    before, nodes = text(length), text(len(TREE), seed=2)
    if before:
        target.forward(before)
    found = target.forward(nodes, TREE)
    for path in PATHS:
        target.cache.rollback(len(before))
        chain = read(target, [nodes[node] for node in path], [1])
        assert torch.equal(found[list(path)], chain)


@pytest.mark.slow
@pytest.mark.parametrize("length", [70, 124])
def test_after_the_accepted_path_of_a_tree_was_compacted(target: Decoder, length: int) -> None:
    before, nodes, after = text(length), text(len(TREE), seed=2), text(9, seed=3)
    path = PATHS[2]
    whole = [*before, *(nodes[node] for node in path), *after]
    wanted = target.forward(whole)
    target.cache.rollback(0)
    target.forward(before)
    target.forward(nodes, TREE)
    target.cache.keep(len(before), path)
    assert torch.equal(read(target, after, [4]), wanted[-len(after) :])


@pytest.mark.slow
def test_after_other_texts_and_rollbacks(target: Decoder) -> None:
    tokens = text(80)
    wanted = read(target, tokens, [80])
    cached = held(target.cache)
    target.cache.rollback(0)
    read(target, text(300, seed=5), [64])
    target.cache.reuse(tokens)
    target.forward(tokens[:40])
    target.forward(text(8, seed=6))  # a draft that is rejected
    target.cache.rollback(40)
    assert torch.equal(read(target, tokens[40:], [3]), wanted[40:])
    assert torch.equal(held(target.cache), cached)


@pytest.mark.slow
def test_a_wide_tree_as_well(target: Decoder) -> None:
    """A root, a chain of 20 under it, and 60 more children of the root."""
    parents = (-1, *range(20), *[0] * 60)
    before, nodes = text(30), text(len(parents), seed=2)
    target.forward(before)
    found = target.forward(nodes, parents)
    for path in (list(range(21)), [0, 33], [0, 80]):
        target.cache.rollback(len(before))
        chain = read(target, [nodes[node] for node in path], [1])
        assert torch.equal(found[path], chain)


@pytest.mark.slow
def test_only_the_last_logits_are_the_same(target: Decoder) -> None:
    tokens = text(30)
    wanted = target.forward(tokens)
    for count in (1, 2, 5):
        target.cache.rollback(0)
        assert torch.equal(target.forward(tokens, num_logits=count), wanted[-count:])


def test_a_head_alone_has_the_bits_of_the_forward(target: Decoder) -> None:
    (output,) = run_together([Rows(target, text(12))], keep=(-1,))
    rows = output.hidden[-1]
    alone = torch.cat([target.head(row[None]) for row in rows])
    assert torch.equal(alone, output.logits)


@pytest.mark.parametrize("in_features", [832, 1024, 1025, 3584])
@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=NEEDS_BF16), FP32])
def test_a_product_gives_a_row_its_bits_alone_and_beside_others(
    dtype: torch.dtype, in_features: int
) -> None:
    torch.manual_seed(0)
    half = torch.randn(2, 40, in_features)
    weight, rows = torch.cat((half, half), -1)[:, :, :in_features].to(dtype)
    rows[:, in_features // 2 :] *= -1.0  # the sums are small, so that rounding shows
    layer = PackedLinear(weight, None)
    together = layer(rows)
    added = layer.add_to(rows, together)
    for row, made, summed in zip(rows.split(1), together, added, strict=True):
        several = filled(row, ROW_MULTIPLE)
        assert torch.equal(layer(several)[0], made)
        assert torch.equal(layer.add_to(several, made.expand(len(several), -1))[0], summed)


def sums_one_row_as_several(layer: PackedLinear) -> bool:
    torch.manual_seed(0)
    rows = torch.randn(4, layer.in_features).to(layer.dtype)
    return torch.equal(layer(rows)[:1], layer(rows[:1]))


# -- faults that must be seen ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_a_single_row_of_a_long_sum_that_runs_alone_is_seen(dtype: torch.dtype) -> None:
    whole = model("a key head each", dtype)
    layers = [each for each in whole.weights.linears if isinstance(each, PackedLinear)]
    if all(sums_one_row_as_several(layer) for layer in layers):
        pytest.skip("here a row alone has the bits that it has beside others")
    unfilled = Decoder(whole.weights, whole.cache.another(), is_fastest=True)
    with pytest.raises(AssertionError):
        assert_same(unfilled, text(70), [1])


def test_a_tree_that_is_summed_by_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_attention, "leaf_paths", lambda parents: [tuple(range(len(parents)))])
    with pytest.raises(AssertionError):
        test_a_path_of_a_tree_has_the_bits_of_its_chain(model("a key head each", FP32), 70)


@pytest.mark.slow
def test_sequences_of_one_forward_have_the_bits_of_forwards_of_their_own(target: Decoder) -> None:
    """A prompt, a draft, a tree and a single row, each over a cache of its own."""
    shape, dtype = target.cache.shape, target.cache.dtype
    caches = [KVCache(shape, dtype, target.device, has_key_blocks=True) for _ in range(4)]
    beside = [Decoder(target.weights, cache) for cache in caches]
    before = [text(size, size) for size in (0, 130, 61, 300)]
    asked: list[tuple[list[int], tuple[int, ...] | None, int | None]] = [
        (text(70, 5), None, 1),
        (text(5, 6), None, None),
        (text(len(TREE), 7), TREE, None),
        (text(1, 8), None, None),
    ]
    wanted = list[torch.Tensor]()
    for tokens, (new, parents, count) in zip(before, asked, strict=True):
        target.cache.rollback(0)
        if tokens:
            target.forward(tokens)
        wanted.append(target.forward(new, parents, count))
    for each, tokens in zip(beside, before, strict=True):
        if tokens:
            each.forward(tokens)
    parts = [Rows(each, *one) for each, one in zip(beside, asked, strict=True)]
    for found, own in zip(forward_together(parts), wanted, strict=True):
        assert torch.equal(found, own)
    assert [each.cache.tokens for each in beside] == [
        [*tokens, *one[0]] for tokens, one in zip(before, asked, strict=True)
    ]
    after = forward_together([Rows(each, [9]) for each in beside[1:]])
    for each, found in zip(beside[1:], after, strict=True):
        each.cache.rollback(each.cache.length - 1)
        assert torch.equal(found, each.forward([9]))
