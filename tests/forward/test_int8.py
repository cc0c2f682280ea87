"""8-bit layers on a processor: what they answer, which bits rows have, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localspec.forward.int8 import Int8Linear, RoundedRowsLinear
from localspec.forward.nf4 import library
from localspec.forward.weight_layout import ModuleLinear, fused

WIDTH = 96


def module_of(out: int, seed: int, has_bias: bool = False) -> Any:
    """A layer as transformers loads it with bitsandbytes."""
    torch.manual_seed(seed)
    layer = library().nn.Linear8bitLt(WIDTH, out, has_bias, has_fp16_weights=False, threshold=6.0)
    return layer.to(torch.device("cpu")).eval().requires_grad_(False)


def dense(layer: Any) -> torch.Tensor:
    """The weight that the numbers of a layer stand for, [out, in]."""
    largest = layer.state.SCB if layer.weight.SCB is None else layer.weight.SCB
    return layer.weight.data.float() * largest[:, None] / 127


def rows(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    found = torch.randn(count, WIDTH, generator=generator)
    found[-1] *= 40.0  # a row of large numbers, which must not coarsen the others
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_run", [False, True])  # the first forward moves the scales
@torch.inference_mode()
def test_layers_of_one_input_are_the_product_with_the_weights_they_stand_for(
    dtype: torch.dtype, has_run: bool
) -> None:
    parts = [module_of(32, 1, True), module_of(64, 2)]
    if has_run:
        for part in parts:
            part(rows(1).float())
    given = rows(5, dtype)
    bias = torch.cat((parts[0].bias.float(), torch.zeros(64)))
    wanted = given.float() @ torch.cat([dense(part) for part in parts]).T + bias  # [5, 96]
    joined = fused(parts)
    assert isinstance(joined, Int8Linear) and joined.dense() is None
    made = joined(given)
    assert made.dtype == dtype
    # Of bf16's rounding of inputs, scales and results, not of rows rounded to 8 bits (0.01).
    assert float((made.float() - wanted).norm(dim=1).div(wanted.norm(dim=1)).max()) < 0.006
    added = joined.add_to(given, torch.ones_like(made))
    torch.testing.assert_close(added, made + 1.0)
    assert joined.weight_bytes == 96 * WIDTH + 96 * 2 + 96 * parts[0].bias.element_size()


@torch.inference_mode()
def test_a_row_has_the_same_bits_at_every_width() -> None:
    joined, given = fused([module_of(64, 3)]), rows(17)
    assert joined.has_invariant_rows
    alone = torch.cat([joined(row) for row in given.split(1)])
    for width in (2, 3, 5, 8, 17):
        assert torch.equal(joined(given[:width]), alone[:width])


@torch.inference_mode()
def test_layers_of_other_formats_stay_apart() -> None:
    parts = [module_of(32, 1), torch.nn.Linear(WIDTH, 32)]
    assert isinstance(fused(parts), ModuleLinear)


@torch.inference_mode()
def test_a_copy_rounds_rows_with_one_scale_for_all() -> None:
    weight = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    layer, given = RoundedRowsLinear(weight, None), rows(5, torch.float32)
    off = (layer(given[:1]) - given[:1] @ weight.T).norm() / (given[:1] @ weight.T).norm()
    assert float(off) < 0.03
    assert not layer.has_invariant_rows
    assert not torch.equal(layer(given)[:1], layer(given[:1]))
