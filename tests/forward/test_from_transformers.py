"""Plain weights for single rows are kept where they pay and fit, and change no result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from localspec.forward.decoder import Decoder
from localspec.forward.from_transformers import PASSES, tune
from localspec.forward.linear import PackedLinear
from tests.tiny import tiny_llama, with_cache

TEXT = [3, 14, 15, 9, 26]


def packed_layers(decoder: Decoder) -> list[PackedLinear]:
    return [each for each in decoder.linears() if isinstance(each, PackedLinear)]


def ticking(packed_s: float, plain_s: float) -> Callable[[], float]:
    """A clock by which a pass of packed layers, timed first, and one of plain ones take so long."""
    calls, now = 0, 0.0

    def clock() -> float:
        nonlocal calls, now
        calls += 1
        per_call = packed_s if calls <= 3 * (PASSES + 1) + 1 else plain_s
        now += per_call
        return now

    return clock


def test_plain_weights_are_kept_where_they_are_faster() -> None:
    decoder = with_cache(tiny_llama())
    before = decoder.weight_bytes
    assert tune(decoder, None, ticking(0.02, 0.01))
    assert all(layer.rows_alone is not None for layer in packed_layers(decoder))
    assert decoder.weight_bytes > before, "what is held twice is counted twice"


def test_they_are_let_go_where_they_are_not() -> None:
    decoder = with_cache(tiny_llama())
    assert not tune(decoder, None, ticking(0.0101, 0.01))
    assert all(layer.rows_alone is None for layer in packed_layers(decoder))


def test_nothing_is_tried_where_the_memory_is_short() -> None:
    decoder = with_cache(tiny_llama())
    needed = sum(layer.weight_bytes for layer in packed_layers(decoder))
    assert not tune(decoder, needed - 1, ticking(0.02, 0.01))
    assert tune(decoder, needed, ticking(0.02, 0.01))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_stay(dtype: torch.dtype) -> None:
    module = tiny_llama(later=1.0).to(dtype)
    packed, tuned = with_cache(module), with_cache(module)
    assert tune(tuned, None, ticking(0.02, 0.01))
    allowed = 1e-4 if dtype == torch.float32 else 0.05
    for token in TEXT:
        wanted, found = packed.forward([token]), tuned.forward([token])
        assert float((found - wanted).norm()) <= allowed * float(wanted.norm())


def test_a_tied_head_shares_the_embedding() -> None:
    module = tiny_llama()
    module.lm_head.weight = module.model.embed_tokens.weight
    decoder = with_cache(module)
    assert tune(decoder, None, ticking(0.02, 0.01))
    head = decoder.weights.head
    assert isinstance(head, PackedLinear) and head.rows_alone is decoder.weights.embedding


def test_single_rows_leave_the_kernels_switched_on() -> None:
    decoder = with_cache(tiny_llama())
    tune(decoder, None, ticking(0.02, 0.01))
    decoder.forward(TEXT[:1])
    assert torch.backends.mkldnn.enabled
