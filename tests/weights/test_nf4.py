"""NF4 layers as one product: what they answer, which bits rows have, and what is left alone."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from localspec.weights import nf4
from localspec.weights.library import bitsandbytes
from localspec.weights.linear import SideBySide
from localspec.weights.nf4 import BLOCK, Nf4Embedding, Nf4Linear, UnpackedLinear
from localspec.weights.precision import Precision, linear_for
from localspec.weights.stored import Nf4
from tests.kit.fake_card import CUDA, fake_card
from tests.kit.tiny import NEEDS_BF16

CPU = torch.device("cpu")
AS_STORED = Precision(torch.bfloat16, CPU)


def stored(out: int, seed: int, kind: str = "nf4") -> Nf4:
    bitsandbytes()
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, 64, generator=generator).to(torch.bfloat16)
    quantise = torch.ops.bitsandbytes.quantize_4bit.default
    packed, scales = quantise(weight, BLOCK, kind, torch.uint8)
    return Nf4(packed, scales, (out, 64), BLOCK, kind)


def rows(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 64, generator=generator).to(torch.bfloat16)


@NEEDS_BF16
@torch.inference_mode()
def test_layers_of_one_input_become_one_product() -> None:
    weights, bias = [stored(32, 1), stored(64, 2)], torch.randn(32, dtype=torch.bfloat16)
    fused = linear_for(weights, [bias, None], AS_STORED)
    assert isinstance(fused, Nf4Linear) and fused.dense() is None
    parts = zip(weights, (bias, None), strict=True)
    wanted = torch.cat([linear_for([w], [b], AS_STORED)(rows(3)) for w, b in parts], dim=-1)
    assert torch.equal(fused(rows(3)), wanted)
    assert torch.equal(fused.add_to(rows(3), wanted), 2.0 * wanted)


@torch.inference_mode()
def test_what_no_kernel_multiplies_with_is_unpacked_at_every_product() -> None:
    """A table of another kind, or rows that the kernel of a processor does not take."""
    for weight in (stored(32, 1, "fp4"), stored(24, 1)):
        layer = linear_for([weight], [None], AS_STORED)
        assert isinstance(layer, UnpackedLinear) and not layer.has_invariant_rows
        assert layer.weight_bytes == weight.packed.nbytes + weight.scales.nbytes
        wanted = rows(3) @ weight.dense(torch.bfloat16).T
        assert torch.equal(layer(rows(3)), wanted)


@NEEDS_BF16
@torch.inference_mode()
def test_a_row_has_the_same_bits_at_every_width() -> None:
    layer = linear_for([stored(96, 3)], [None], AS_STORED)
    assert layer.has_invariant_rows
    together = layer(rows(9))
    for width in (1, 2, 3, 5):
        assert torch.equal(layer(rows(9)[:width]), together[:width])


def test_layers_of_other_tables_stay_apart() -> None:
    weights = [stored(32, 1), stored(32, 2, "fp4")]
    assert isinstance(linear_for(weights, [None, None], AS_STORED), SideBySide)


def test_a_card_multiplies_once_for_layers_of_one_input() -> None:
    with fake_card(), torch.inference_mode():
        weights = [
            Nf4(
                torch.empty(out * 32, 1, dtype=torch.uint8, device=CUDA),
                torch.empty(out, device=CUDA),
                (out, 64),
                BLOCK,
                "nf4",
            )
            for out in (16, 40)
        ]
        fused = linear_for(weights, [None, None], Precision(torch.bfloat16, CUDA))
        assert isinstance(fused, Nf4Linear)
        made = fused(torch.empty(3, 64, dtype=torch.bfloat16, device=CUDA))
        assert (made.shape, made.dtype, made.device) == ((3, 56), torch.bfloat16, CUDA)
        assert fused.weight_bytes == 56 * 32 + 4 * 56


def test_a_card_s_pieces_of_a_product_with_many_rows_are_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the library's own unpacking, on the processor."""
    bitsandbytes()
    kernel = import_module("bitsandbytes.backends.default.ops")._gemm_4bit_default_impl
    ops = torch.ops.bitsandbytes
    packed, scales = ops.quantize_4bit.default(torch.randn(320, 128), 64, "nf4", torch.uint8)
    monkeypatch.setattr(ops, "gemm_4bit", SimpleNamespace(default=kernel))
    monkeypatch.setattr(nf4, "UNPACKED_AT_ONCE", 3 * 32 * 128)
    given = torch.randn(40, 128)
    made = nf4._on_card(packed, scales, (320, 128))(given)
    assert torch.equal(made, kernel(given, packed, (320, 128), scales, 64, "nf4"))


def test_rows_of_an_embedding_are_those_of_its_weight_unpacked() -> None:
    bitsandbytes()
    ops, num_rows, width = torch.ops.bitsandbytes, 96, 128
    weight = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))
    packed, scales = ops.quantize_4bit.default(weight, BLOCK, "nf4", torch.uint8)
    whole = ops.dequantize_4bit.default(packed, scales, BLOCK, "nf4", weight.shape, torch.float32)
    table = Nf4Embedding(Nf4Linear(packed, scales, (num_rows, width), None), torch.float32)
    ids = torch.tensor([5, 95, 5])
    assert torch.equal(table.rows(ids), whole[ids])
    assert table.nbytes == packed.nbytes + scales.nbytes and table.shape == weight.shape
