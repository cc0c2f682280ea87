"""The norm made of a layer norm is the root-mean-square norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from localspec.forward.norm import RootMeanSquareNorm


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_rows_are_normed_as_torch_does(scale: float, offset: float) -> None:
    rows, weight = scale * (noise(3, 64) + offset), 1.0 + noise(64, seed=1)
    wanted = F.rms_norm(rows, (64,), weight, 1e-5)
    assert torch.allclose(RootMeanSquareNorm(weight, 1e-5)(rows), wanted, rtol=1e-5, atol=1e-6)


def test_heads_may_have_weights_of_their_own() -> None:
    rows, weight = noise(3, 4, 16), 1.0 + noise(4, 16, seed=1)
    wanted = F.rms_norm(rows, (16,), None, 1e-6) * weight
    assert torch.allclose(RootMeanSquareNorm(weight, 1e-6)(rows), wanted, rtol=1e-5, atol=1e-6)


def test_bf16_is_rounded_once() -> None:
    rows, weight = noise(5, 256).bfloat16(), (1.0 + noise(256, seed=1)).bfloat16()
    exact = F.rms_norm(rows.float(), (256,), weight.float(), 1e-5)
    found = RootMeanSquareNorm(weight, 1e-5)(rows)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), exact.bfloat16().float(), rtol=2**-8, atol=1e-6)
