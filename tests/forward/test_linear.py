"""Every form of a linear layer is the same product, and a wrong kernel is never used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from localspec.forward import linear as forms
from localspec.forward.linear import Joined, ModuleLinear, PackedLinear, PlainLinear, fused, packed

BF16, FP32 = torch.bfloat16, torch.float32


def layer(out_features: int, *, bias: bool = False, dtype: torch.dtype = FP32) -> nn.Linear:
    torch.manual_seed(out_features)
    return nn.Linear(24, out_features, bias=bias).to(dtype).requires_grad_(False)


def rows(dtype: torch.dtype, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 24, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(dtype: torch.dtype, bias: bool) -> None:
    module = layer(40, bias=bias, dtype=dtype)
    made = packed(module.weight, module.bias)
    assert isinstance(made, PackedLinear)
    plain, residual = PlainLinear(module.weight, module.bias), torch.ones(3, 40, dtype=dtype)
    allowed = {"atol": 0.02, "rtol": 0.02} if dtype == BF16 else {"atol": 1e-5, "rtol": 1e-5}
    assert torch.allclose(made(rows(dtype)), plain(rows(dtype)), **allowed)
    added = made.add_to(rows(dtype), residual)
    assert torch.allclose(added, plain.add_to(rows(dtype), residual), **allowed)
    assert torch.equal(residual, torch.ones(3, 40, dtype=dtype)), "the residual is only read"
    assert made.weight_bytes == plain.weight_bytes


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_packed_layer_gives_its_weight_back(dtype: torch.dtype) -> None:
    module = layer(40, bias=True, dtype=dtype)
    dense = packed(module.weight, module.bias).dense()
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

    monkeypatch.setattr(forms.PackedLinear, "__call__", broken)
    module = layer(40)
    assert isinstance(packed(module.weight, None), PlainLinear)


def test_a_precision_without_a_packed_kernel_stays_plain() -> None:
    assert isinstance(packed(layer(40, dtype=torch.float16).weight, None), PlainLinear)


def test_fused_layers_are_their_outputs_side_by_side() -> None:
    parts = [layer(8, bias=True), layer(12), layer(20)]
    together = torch.cat([part(rows(FP32)) for part in parts], dim=-1)
    assert torch.allclose(fused(parts)(rows(FP32)), together, atol=1e-5)


def test_layers_of_another_format_are_not_opened() -> None:
    class Odd(nn.Linear):
        """A quantised layer: its weight is not what it seems."""

        def forward(self, given: Any) -> torch.Tensor:
            return super().forward(given) + 1.0

    odd = [Odd(24, 8), Odd(24, 4)]
    both = fused(odd)
    assert isinstance(both, Joined) and both.dense() is None
    wanted = torch.cat([part(rows(FP32)) for part in odd], dim=-1)
    assert torch.equal(both(rows(FP32)), wanted)
    single = fused(odd[:1])
    assert isinstance(single, ModuleLinear) and single.dense() is None
    assert torch.equal(single.add_to(rows(FP32), wanted[:, :8]), 2.0 * wanted[:, :8])
