"""8-bit layers on a processor: what they answer, which bits rows have, and what is left alone."""

from __future__ import annotations

import pytest
import torch

from localspec.weights.int8 import Int8Linear, LibraryInt8Linear, RoundedRowsLinear
from localspec.weights.library import bitsandbytes
from localspec.weights.linear import SideBySide
from localspec.weights.precision import Precision, linear_for
from localspec.weights.stored import Dense, Int8

WIDTH = 96
CPU = torch.device("cpu")


def stored(out: int, seed: int) -> Int8:
    generator = torch.Generator().manual_seed(seed)
    return Int8.rounded(torch.randn(out, WIDTH, generator=generator))


def rows(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    found = torch.randn(count, WIDTH, generator=generator)
    found[-1] *= 40.0  # a row of large numbers, which must not coarsen the others
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_layers_of_one_input_are_the_product_with_the_weights_they_stand_for(
    dtype: torch.dtype,
) -> None:
    parts, bias = [stored(32, 1), stored(64, 2)], torch.randn(32).to(dtype)
    given = rows(5, dtype)
    of_all = torch.cat((bias.float(), torch.zeros(64)))
    dense = torch.cat([part.dense(torch.float32) for part in parts])
    wanted = given.float() @ dense.T + of_all  # [5, 96]
    fused = linear_for(parts, [bias, None], Precision(dtype, CPU))
    assert isinstance(fused, Int8Linear) and fused.dense() is None
    made = fused(given)
    assert made.dtype == dtype
    # Of bf16's rounding of inputs, scales and results, not of rows rounded to 8 bits (0.01).
    assert float((made.float() - wanted).norm(dim=1).div(wanted.norm(dim=1)).max()) < 0.006
    added = fused.add_to(given, torch.ones_like(made))
    torch.testing.assert_close(added, made + 1.0)
    assert fused.weight_bytes == 96 * WIDTH + 96 * 2 + 96 * bias.element_size()


@torch.inference_mode()
def test_a_row_has_the_same_bits_at_every_width() -> None:
    layer, given = linear_for([stored(64, 3)], [None], Precision(torch.bfloat16, CPU)), rows(17)
    assert layer.has_invariant_rows
    alone = torch.cat([layer(row) for row in given.split(1)])
    for width in (2, 3, 5, 8, 17):
        assert torch.equal(layer(given[:width]), alone[:width])


@torch.inference_mode()
def test_numbers_are_those_of_the_library_s_own_layer() -> None:
    torch.manual_seed(1)
    layer = bitsandbytes().nn.Linear8bitLt(WIDTH, 32, False, has_fp16_weights=False, threshold=6.0)
    weight = layer.weight.data.clone().float()
    layer = layer.to(CPU).eval().requires_grad_(False)
    rounded = Int8.rounded(weight)
    assert torch.equal(rounded.numbers, layer.weight.CB if layer.weight.CB is not None
                       else layer.weight.data)  # fmt: skip
    assert torch.equal(LibraryInt8Linear(rounded, None)(rows(3)), layer(rows(3)))


def test_the_library_s_layer_is_told_to_wait_for_the_host() -> None:
    """It looks for outliers there, so no graph can hold it."""
    assert LibraryInt8Linear(stored(32, 1), None).reads_host
    assert not linear_for([stored(32, 1)], [None], Precision(torch.bfloat16, CPU)).reads_host


@torch.inference_mode()
def test_layers_of_other_formats_stay_apart() -> None:
    weights = [stored(32, 1), Dense(torch.randn(32, WIDTH))]
    assert isinstance(linear_for(weights, [None, None], Precision(torch.float32, CPU)), SideBySide)


@torch.inference_mode()
def test_a_copy_rounds_rows_with_one_scale_for_all() -> None:
    weight = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    layer, given = RoundedRowsLinear(weight, None), rows(5, torch.float32)
    off = (layer(given[:1]) - given[:1] @ weight.T).norm() / (given[:1] @ weight.T).norm()
    assert float(off) < 0.03
    assert not layer.has_invariant_rows
    assert not torch.equal(layer(given)[:1], layer(given[:1]))
