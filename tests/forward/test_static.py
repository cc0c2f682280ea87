"""The fixed-shape forward gives the decoder's own logits and harms no slot that is held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from localspec.forward import attention
from localspec.forward.attention import (
    can_split,
    grouped_attention,
    grouped_mask,
    parts_of,
    split_attention,
)
from localspec.forward.cache import WIDEST
from localspec.forward.decoder import Decoder
from localspec.forward.restoring import undisturbed
from localspec.forward.static import StaticForward, Window
from localspec.forward.tree import additive_mask
from tests.kit.families import ATTENTION_ALONE, SETTINGS, assert_close, small
from tests.kit.tiny import CPU, with_plain_cache

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3, 23, 11, 2, 40, 41, 6, 19, 30]
TREE = (-1, 0, 0, 1, 2, 2, -1)
CAPACITY = 64
KEY_HEADS = {"shared by all": 1, "shared by two": 2, "one each": 4}


def native(name: str = "llama", num_key_heads: int = 2, num_layers: int = 2) -> Decoder:
    changed = {"num_key_value_heads": num_key_heads}
    if name != "smollm3" and "layer_types" not in SETTINGS[name]:  # they name each of their layers
        changed["num_hidden_layers"] = num_layers
    return with_plain_cache(small(name, **changed), CAPACITY)


def static_logits(
    decoder: Decoder,
    tokens: Sequence[int],
    width: int,
    bucket: int,
    parents: Sequence[int] | None = None,
    parts: int = 1,
) -> torch.Tensor:
    """Logits of `tokens` after what the cache holds, which stays as long as it was."""
    out = torch.zeros(width, decoder.vocab_size)
    static = StaticForward(Window(decoder, bucket, lambda _: parts), width, out)
    static.fill(tokens, parents, decoder.cache.length)
    static()
    return out[: len(tokens)]


def wanted_logits(
    decoder: Decoder, tokens: Sequence[int], parents: Sequence[int] | None = None
) -> torch.Tensor:
    length = decoder.cache.length
    logits = decoder.forward(tokens, parents)
    decoder.cache.rollback(length)
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("width", range(1, 17))
def test_a_chain_of_every_width_gives_the_decoders_logits(width: int) -> None:
    decoder = native()
    for length in (0, 1, 7):
        decoder.cache.rollback(0)
        if length:
            decoder.forward(TEXT[:length])
        wanted = wanted_logits(decoder, TEXT[:width])
        assert_close(static_logits(decoder, TEXT[:width], width, 32), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTION_ALONE)
def test_every_family(name: str) -> None:
    decoder = native(name)
    decoder.forward(TEXT[:9])
    for tokens, parents in ((TEXT[9:14], None), (TEXT[:7], TREE)):
        wanted = wanted_logits(decoder, tokens, parents)
        assert_close(static_logits(decoder, tokens, 8, 32, parents), wanted)


@pytest.mark.parametrize("num_key_heads", KEY_HEADS.values(), ids=KEY_HEADS)
@pytest.mark.parametrize("width", [7, 8, 16])
def test_a_tree_sees_its_own_path_whatever_pads_it(num_key_heads: int, width: int) -> None:
    decoder = native(num_key_heads=num_key_heads)
    decoder.forward(TEXT[:6])
    wanted = wanted_logits(decoder, TEXT[:7], TREE)
    assert_close(static_logits(decoder, TEXT[:7], width, CAPACITY, TREE), wanted)


@pytest.mark.parametrize("bucket", [16, 24, CAPACITY])
@pytest.mark.parametrize("width", [1, 4])
def test_the_last_slot_of_a_window_and_of_the_cache(bucket: int, width: int) -> None:
    decoder = native()
    decoder.forward([1 + i % 40 for i in range(bucket - width)])
    wanted = wanted_logits(decoder, TEXT[:width])
    assert_close(static_logits(decoder, TEXT[:width], width, bucket), wanted)


def test_rows_beyond_the_window_are_a_mistake() -> None:
    decoder = native()
    decoder.forward(TEXT[:14])
    with pytest.raises(AssertionError):
        static_logits(decoder, TEXT[:2], 4, 16)


def test_what_lies_beyond_the_end_is_never_seen() -> None:
    decoder = native()
    decoder.forward(TEXT[:5])
    wanted = static_logits(decoder, TEXT[5:8], 4, 32).clone()
    for keys, values in decoder.cache.slots:
        keys[:, :, 5:] = 100.0
        values[:, :, 5:] = -100.0
    assert torch.equal(static_logits(decoder, TEXT[5:8], 4, 32), wanted)


def test_what_is_no_number_beyond_the_end_can_be_cleared() -> None:
    decoder = native()
    decoder.forward(TEXT[:5])
    wanted = static_logits(decoder, TEXT[5:8], 4, 32).clone()
    for _, values in decoder.cache.slots:
        values[:, :, 12:] = float("nan")
    assert bool(static_logits(decoder, TEXT[5:8], 4, 32).isnan().all()), "no mask hides it"
    decoder.cache.zero_beyond()
    assert torch.equal(static_logits(decoder, TEXT[5:8], 4, 32), wanted)


def test_held_slots_are_untouched_and_the_tokens_own_are_those_of_the_decoder() -> None:
    decoder = native()
    decoder.forward(TEXT[:8])
    every = decoder.cache.slots
    before = [tensor.clone() for pair in every for tensor in pair]
    static_logits(decoder, TEXT[8:11], 8, 32)
    after = [tensor.clone() for pair in every for tensor in pair]
    decoder.forward(TEXT[8:11])
    for old, new, pair in zip(before, after, [t for p in every for t in p], strict=True):
        assert torch.equal(new[:, :, :8], old[:, :, :8])
        assert torch.allclose(new[:, :, 8:11], pair[:, :, 8:11], atol=1e-5)
        assert torch.equal(new[:, :, 16:], old[:, :, 16:]), "pads write within their width only"


def test_one_forward_serves_chains_and_trees_in_turn() -> None:
    decoder = native()
    out = torch.zeros(8, decoder.vocab_size)
    static = StaticForward(Window(decoder, 32), 8, out)
    decoder.forward(TEXT[:4])
    rounds: list[tuple[list[int], tuple[int, ...] | None]] = [
        (TEXT[:5], None),
        (TEXT[:7], TREE),
        (TEXT[2:4], None),
        (TEXT[:3], (-1, -1, 0)),
        (TEXT[:7], TREE),
        (TEXT[:8], None),
    ]
    for tokens, parents in rounds:
        wanted = wanted_logits(decoder, tokens, parents)
        static.fill(tokens, parents, decoder.cache.length)
        static()
        assert_close(out[: len(tokens)], wanted)


def test_inputs_are_read_when_it_runs_not_when_it_is_made() -> None:
    decoder = native()
    out = torch.zeros(2, decoder.vocab_size)
    static = StaticForward(Window(decoder, 32), 2, out)
    static.fill([1, 2], None, 0)
    static()
    first = out.clone()
    static.fill([9, 4], None, 0)
    static()
    assert not torch.allclose(out, first)


def test_slots_scribbled_on_come_back() -> None:
    decoder = native()
    decoder.forward(TEXT[:10])
    wanted = wanted_logits(decoder, TEXT[10:12])
    with undisturbed(decoder.cache, 6):
        for keys, values in decoder.cache.slots:
            keys[:, :, :6] = 7.0
            values[:, :, :6] = float("nan")
    assert torch.equal(wanted_logits(decoder, TEXT[10:12]), wanted)


def test_bf16_stays_close() -> None:
    """The cache's precision, not fp32, goes through attention and its mask."""
    module = small("llama").bfloat16()
    decoder = with_plain_cache(module, CAPACITY)
    decoder.forward(TEXT[:9])
    wanted = wanted_logits(decoder, TEXT[9:13])
    found = static_logits(decoder, TEXT[9:13], 4, 32)
    assert found.dtype == torch.float32
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("num_key_heads", KEY_HEADS.values(), ids=KEY_HEADS)
@pytest.mark.parametrize("parents", [None, TREE], ids=["chain", "tree"])
def test_keys_in_parts_give_what_keys_at_once_give(
    num_key_heads: int, parents: Sequence[int] | None
) -> None:
    """Also where a whole part lies beyond the end, or its last rows see a part of it only."""
    decoder, tokens = native(num_key_heads=num_key_heads), [5, 6, 7, 8, 9, 10, 11]
    for length in (1, 12, 20):
        decoder.cache.rollback(0)
        decoder.forward(TEXT[:length], num_logits=1)
        wanted = wanted_logits(decoder, tokens, parents)
        for parts in (2, 4, 8):
            found = static_logits(decoder, tokens, 8, CAPACITY, parents, parts)
            assert_close(found, wanted)


def test_a_cache_is_split_where_each_part_is_long_enough() -> None:
    found = {length: parts_of(length) for length in (256, 500, 512, 2048, 4096, 16384, 3000)}
    assert found == {256: 1, 500: 1, 512: 2, 2048: 8, 4096: 16, 16384: 16, 3000: 1}


def test_the_kernels_of_parts_are_tried_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert can_split(torch.float32, CPU) and can_split(torch.bfloat16, CPU)
    wrong = split_attention

    def doubled(*given: Any) -> torch.Tensor:
        return 2.0 * wrong(*given)

    monkeypatch.setattr(attention, "split_attention", doubled)
    assert not can_split(torch.float32, CPU)


def test_many_rows_see_the_same_without_a_mask_for_each_query_head() -> None:
    generator = torch.Generator().manual_seed(0)
    size, start = WIDEST + 4, 7
    queries = torch.randn(size, 6, 16, generator=generator)
    keys, values = torch.randn(2, 1, 2, start + size, 16, generator=generator)
    mask = additive_mask(size, None, start, torch.float32, CPU)
    assert mask is not None and grouped_mask(mask, 3) is mask
    wanted = grouped_attention(queries, keys, values, mask.repeat(1, 1, 3, 1))
    assert torch.allclose(grouped_attention(queries, keys, values, mask), wanted, atol=1e-6)
