"""Every form of a linear layer is the same product, a wrong kernel is never used, and plain weights
for single rows are kept where they pay and fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from localspec.forward.decoder import Decoder
from localspec.weights.dense import (
    TIMED_PASSES,
    Fp16Linear,
    PackedLinear,
    dense_linear,
    fewest_rows,
    tune,
)
from localspec.weights.linear import ROW_MULTIPLE, PlainLinear
from localspec.weights.precision import Precision, linear_for
from localspec.weights.stored import Dense
from tests.kit.tiny import NEEDS_BF16, tiny_llama, with_cache

BF16, FP32 = torch.bfloat16, torch.float32
PACKED = (pytest.param(BF16, marks=NEEDS_BF16), FP32)


def layer(out_features: int, *, bias: bool = False, dtype: torch.dtype = FP32) -> nn.Linear:
    torch.manual_seed(out_features)
    return nn.Linear(24, out_features, bias=bias).to(dtype).requires_grad_(False)


def rows(dtype: torch.dtype, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 24, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(dtype: torch.dtype, bias: bool) -> None:
    module = layer(40, bias=bias, dtype=dtype)
    made = dense_linear(module.weight, module.bias)
    assert isinstance(made, PackedLinear)
    plain, residual = PlainLinear(module.weight, module.bias), torch.ones(3, 40, dtype=dtype)
    allowed = {"atol": 0.02, "rtol": 0.02} if dtype == BF16 else {"atol": 1e-5, "rtol": 1e-5}
    assert torch.allclose(made(rows(dtype)), plain(rows(dtype)), **allowed)
    added = made.add_to(rows(dtype), residual)
    assert torch.allclose(added, plain.add_to(rows(dtype), residual), **allowed)
    assert torch.equal(residual, torch.ones(3, 40, dtype=dtype)), "the residual is only read"
    assert made.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize("dtype", PACKED)
def test_a_packed_layer_gives_its_weight_back(dtype: torch.dtype) -> None:
    module = layer(40, bias=True, dtype=dtype)
    dense = dense_linear(module.weight, module.bias).dense()
    assert dense is not None
    assert torch.equal(dense.weight, module.weight) and torch.equal(dense.bias, module.bias)


@pytest.mark.parametrize("fault", ["wrong", "missing", "not a number"])
def test_a_kernel_that_is_wrong_or_missing_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def broken(self: PackedLinear, given: torch.Tensor) -> torch.Tensor:
        if fault == "missing":
            raise RuntimeError("no such kernel")
        return torch.full((given.shape[0], 40), 0.1 if fault == "wrong" else float("nan"))

    monkeypatch.setattr(PackedLinear, "__call__", broken)
    module = layer(40)
    assert isinstance(dense_linear(module.weight, None), PlainLinear)


# -- fp16 weights for rows in fp32 ----------------------------------------------------------


def halved(out_features: int, in_features: int = 1000) -> torch.Tensor:
    """A weight as published in bf16, in fp32."""
    torch.manual_seed(out_features)
    return (0.02 * torch.randn(out_features, in_features)).bfloat16().float()


def test_weights_published_in_bf16_are_kept_in_fp16() -> None:
    weight, bias = halved(40), torch.randn(40)
    made, plain = dense_linear(weight, bias), PlainLinear(weight, bias)
    assert isinstance(made, Fp16Linear) and made.weight_bytes == weight.numel() * 2 + bias.nbytes
    given, residual = torch.randn(5, 1000), torch.ones(5, 40)
    assert torch.allclose(made(given), plain(given), atol=1e-5, rtol=1e-5)
    added = made.add_to(given, residual)
    assert torch.allclose(added, plain.add_to(given, residual), atol=1e-5, rtol=1e-5)
    assert torch.equal(residual, torch.ones(5, 40)), "the residual is only read"
    dense = made.dense()
    assert float((dense.weight - weight).abs().max()) < 2.0**-24  # fp16 has no smaller number
    assert torch.equal(dense.bias, bias)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_at_every_width(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made, given = dense_linear(halved(72), None), torch.randn(260, 1000)
        at_once = made(given)
        for width in (1, 2, 3, 4, 5, 7, 8, 9, 14, 31, 32, 64, 121, 259):
            assert torch.equal(torch.cat([made(part) for part in given.split(width)]), at_once)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("number", [1.0 + 2.0**-12, 1e6, float("nan")])
def test_a_weight_that_fp16_does_not_hold_stays_in_fp32(number: float) -> None:
    weight = halved(40)
    weight[0, 0] = number
    assert not isinstance(dense_linear(weight, None), Fp16Linear)


@pytest.mark.parametrize("in_features", [512, 1536])
@pytest.mark.parametrize("dtype", PACKED)
def test_as_few_rows_as_are_enough_have_the_bits_of_many(
    dtype: torch.dtype, in_features: int
) -> None:
    """In fp32 a single row of a short sum is enough."""
    weight = torch.randn(96, in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed, many = dense_linear(weight, None), torch.randn(64, in_features).to(dtype)
    assert isinstance(packed, PackedLinear)
    count = fewest_rows([packed])
    assert 1 <= count <= ROW_MULTIPLE and packed.has_invariant_rows == (count == 1)
    for few in range(count, ROW_MULTIPLE + 1):
        assert torch.equal(packed(many[:few]), packed(many)[:few])
    if not torch.equal(packed(many[:1]), packed(many)[:1]):
        assert count > 1
    assert fewest_rows([packed, PlainLinear(weight, None)]) == ROW_MULTIPLE
    assert fewest_rows([]) == 1


def test_a_precision_without_a_packed_kernel_stays_plain() -> None:
    assert isinstance(dense_linear(layer(40, dtype=torch.float16).weight, None), PlainLinear)


def test_fused_layers_are_their_outputs_side_by_side() -> None:
    parts = [layer(8, bias=True), layer(12), layer(20)]
    together = torch.cat([part(rows(FP32)) for part in parts], dim=-1)
    weights, biases = [Dense(part.weight) for part in parts], [part.bias for part in parts]
    fused = linear_for(weights, biases, Precision(FP32, torch.device("cpu")))
    assert isinstance(fused, PackedLinear)
    assert torch.allclose(fused(rows(FP32)), together, atol=1e-5)


# -- plain weights for single rows ----------------------------------------------------------

TEXT = [3, 14, 15, 9, 26]


def packed_layers(decoder: Decoder) -> list[PackedLinear]:
    return [each for each in decoder.weights.linears if isinstance(each, PackedLinear)]


def tuned(decoder: Decoder, spare_bytes: int | None, clock: Callable[[], float]) -> bool:
    weights = decoder.weights
    return tune(weights.linears, weights.embedding, spare_bytes, clock)


def ticking(packed_s: float, plain_s: float) -> Callable[[], float]:
    """A clock by which a pass of packed layers, timed first, and one of plain ones take so long."""
    calls, now = 0, 0.0

    def clock() -> float:
        nonlocal calls, now
        calls += 1
        per_call = packed_s if calls <= 2 * (TIMED_PASSES + 1) else plain_s
        now += per_call
        return now

    return clock


def test_plain_weights_are_kept_where_they_are_faster() -> None:
    decoder = with_cache(tiny_llama())
    before = decoder.weight_bytes
    assert tuned(decoder, None, ticking(0.02, 0.01))
    assert all(layer.single_row_weight is not None for layer in packed_layers(decoder))
    assert decoder.weight_bytes > before, "what is held twice is counted twice"


def test_they_are_let_go_where_they_are_not() -> None:
    decoder = with_cache(tiny_llama())
    assert not tuned(decoder, None, ticking(0.0101, 0.01))
    assert all(layer.single_row_weight is None for layer in packed_layers(decoder))


def test_nothing_is_tried_where_the_memory_is_short() -> None:
    decoder = with_cache(tiny_llama())
    needed = sum(layer.weight_bytes for layer in packed_layers(decoder))
    assert not tuned(decoder, needed - 1, ticking(0.02, 0.01))
    assert tuned(decoder, needed, ticking(0.02, 0.01))


@pytest.mark.parametrize("dtype", PACKED)
def test_the_logits_stay(dtype: torch.dtype) -> None:
    module = tiny_llama(later=1.0).to(dtype)
    reference, plain = with_cache(module), with_cache(module)
    assert tuned(plain, None, ticking(0.02, 0.01))
    allowed = 1e-4 if dtype == torch.float32 else 0.05
    for token in TEXT:
        wanted, found = reference.forward([token]), plain.forward([token])
        assert float((found - wanted).norm()) <= allowed * float(wanted.norm())


def test_a_tied_head_shares_the_embedding() -> None:
    module = tiny_llama()
    module.lm_head.weight = module.model.embed_tokens.weight
    decoder = with_cache(module)
    assert tuned(decoder, None, ticking(0.02, 0.01))
    head = decoder.weights.head
    assert isinstance(head, PackedLinear) and head.single_row_weight is decoder.weights.embedding


def test_single_rows_leave_the_kernels_switched_on() -> None:
    decoder = with_cache(tiny_llama())
    tuned(decoder, None, ticking(0.02, 0.01))
    decoder.forward(TEXT[:1])
    assert torch.backends.mkldnn.enabled
