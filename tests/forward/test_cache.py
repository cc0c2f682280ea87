"""Lengths, prefixes and compaction of the KV cache, without a model."""

from __future__ import annotations

import random

import pytest
import torch

from localspec.core.errors import CacheError
from localspec.core.prefix import common_prefix_length
from localspec.forward.cache import KEY_BLOCK, KVCache, KVShape
from tests.kit.tiny import CPU

SHAPE = KVShape(num_layers=2, num_kv_heads=3, head_dim=4, capacity=12)


def filled(tokens: list[int]) -> KVCache:
    """A cache whose slots say which token was written there."""
    cache = KVCache(SHAPE, torch.float32, CPU)
    write(cache, tokens)
    return cache


def write(cache: KVCache, tokens: list[int]) -> None:
    values = torch.tensor(tokens, dtype=torch.float32)[None, None, :, None].expand(1, 3, -1, 4)
    with cache.append(tokens):
        for layer in range(SHAPE.num_layers):
            cache.update(values + 100 * layer, -values, layer)


def held(cache: KVCache) -> list[int]:
    """What stands in the slots, checked over all layers, heads and both of K and V."""
    length = cache.length
    found = cache.slots[0][0][0, 0, :length, 0]
    for layer, (keys, values) in enumerate((keys[0], values[0]) for keys, values in cache.slots):
        assert torch.equal(keys[:, :length], (found + 100 * layer)[None, :, None].expand(3, -1, 4))
        assert torch.equal(values[:, :length], -found[None, :, None].expand(3, -1, 4))
    return [int(token) for token in found]


@pytest.mark.parametrize("kind", [list, tuple])
def test_common_prefix_equals_the_naive_count(kind: type) -> None:
    rng = random.Random(4)
    for _ in range(400):
        left = [rng.randrange(2) for _ in range(rng.randrange(12))]
        cut = rng.randrange(len(left) + 1)
        right = left[:cut] + [rng.randrange(2) for _ in range(rng.randrange(6))]
        naive = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
            min(len(left), len(right)),
        )
        assert common_prefix_length(left, kind(right)) == naive


def test_reuse_keeps_the_common_prefix_and_says_how_much() -> None:
    cache = filled([5, 6, 7, 8])
    assert cache.reuse([5, 6, 9]) == 2
    assert (cache.length, cache.tokens, held(cache)) == (2, [5, 6], [5, 6])


def test_reuse_of_a_longer_text_keeps_everything() -> None:
    cache = filled([5, 6, 7])
    assert cache.reuse([5, 6, 7, 8, 9]) == 3


def test_a_prompt_that_is_read_in_pieces_keeps_those_that_were_read_whole() -> None:
    cache = filled([])
    cache.piece = 4
    for piece in ([1, 2, 3, 4], [5, 6, 7, 8], [9], [10]):
        write(cache, piece)
    assert cache.reuse_read(range(1, 13)) == 8, "a piece that ended early is read again"
    write(cache, [9, 10, 11, 12])
    cache.rollback(10)
    assert cache.reuse_read(range(1, 13)) == 8, "of a piece that was cut nothing stays"
    assert cache.reuse_read([1, 2, 3, 4, 5, 0]) == 4
    for token in (5, 6, 7, 8):
        write(cache, [token])
    assert cache.reuse_read(range(1, 13)) == 4, "tokens that came one by one are no piece"
    write(cache, [5, 6])
    write(cache, [7, 8, 9, 10])
    assert cache.reuse_read(range(1, 13)) == 4, "pieces start where the one before ends"


def test_written_after_a_rollback_replaces_what_stood_there() -> None:
    cache = filled([5, 6, 7, 8])
    cache.rollback(2)
    write(cache, [1, 2, 3])
    assert held(cache) == cache.tokens == [5, 6, 1, 2, 3]


@pytest.mark.parametrize("length", [-1, 5])
def test_rollback_to_a_length_never_held_is_refused(length: int) -> None:
    cache = filled([5, 6, 7, 8])
    with pytest.raises(CacheError, match="cannot return"):
        cache.rollback(length)
    assert cache.length == 4


@pytest.mark.parametrize("path", [(), (0,), (0, 1), (0, 2), (1, 3, 4), (4,), (0, 1, 2, 3, 4)])
def test_keep_compacts_the_path(path: tuple[int, ...]) -> None:
    cache = filled([10, 11, 20, 21, 22, 23, 24])
    cache.keep(2, path)
    assert held(cache) == cache.tokens == [10, 11, *(20 + offset for offset in path)]


def test_nothing_stays_beyond_the_end() -> None:
    cache = filled([5, 6, 7, 8])
    cache.rollback(2)
    cache.zero_beyond()
    assert held(cache) == [5, 6]
    for part in (part for both in cache.slots for part in both):
        assert not bool(part[:, :, 2:].any())


def test_keep_of_an_unwritten_slot_is_refused_and_changes_nothing() -> None:
    cache = filled([10, 11, 20])
    with pytest.raises(CacheError, match="never written"):
        cache.keep(2, (0, 1))
    assert held(cache) == [10, 11, 20]


def test_error_during_the_forward_leaves_the_length() -> None:
    cache = filled([5, 6])
    with pytest.raises(ZeroDivisionError), cache.append([7, 8]):
        raise ZeroDivisionError
    assert cache.tokens == [5, 6]
    write(cache, [9])
    assert held(cache) == [5, 6, 9]


def test_more_tokens_than_slots_are_refused_with_both_numbers() -> None:
    cache = filled(list(range(10)))
    with pytest.raises(CacheError, match=r"12 tokens and this needs 13"), cache.append([1, 2, 3]):
        pytest.fail("opened too many slots")
    assert cache.length == 10
    write(cache, [1, 2])  # exactly full is allowed
    assert cache.length == SHAPE.capacity


@pytest.mark.parametrize(("has_key_blocks", "slots"), [(False, 12), (True, KEY_BLOCK)])
def test_declared_bytes_are_those_of_the_buffers(has_key_blocks: bool, slots: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(SHAPE, dtype, CPU, has_key_blocks)
        assert cache.kv_bytes == 2 * 2 * 3 * 4 * slots * dtype.itemsize


def test_keys_of_another_size_are_refused_and_not_repeated() -> None:
    cache, values = KVCache(SHAPE, torch.float32, CPU), torch.zeros(1, 1, 1, 4)
    with (
        pytest.raises(CacheError, match="1 heads of 4, where the config names 3 of 4"),
        cache.append([5]),
    ):
        cache.update(values, values, 0)
    assert cache.length == 0
