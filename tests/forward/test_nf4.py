"""NF4 layers as one product: what they answer, which bits rows have, and what is left alone."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from localspec.forward import nf4
from localspec.forward.nf4 import BLOCK, Nf4Embedding, Nf4Linear, library
from localspec.forward.weight_layout import ModuleLinear, fused
from tests.kit.fake_card import CUDA, fake_card
from tests.kit.tiny import NEEDS_BF16

CPU = torch.device("cpu")


def module_of(out: int, seed: int, has_bias: bool = False, is_nested: bool = False) -> Any:
    """A layer as transformers loads it with bitsandbytes, bf16."""
    torch.manual_seed(seed)
    layer = library().nn.Linear4bit(
        64, out, bias=has_bias, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    layer.weight = (
        library()
        .nn.Params4bit(
            torch.randn(out, 64, dtype=torch.bfloat16),
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=is_nested,
            module=layer,
        )
        .to(CPU)
    )
    if has_bias:
        layer.bias = nn.Parameter(torch.randn(out, dtype=torch.bfloat16), requires_grad=False)
    return layer.eval()


def rows(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 64, generator=generator).to(torch.bfloat16)


@NEEDS_BF16
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("has_run", [False, True])  # the first forward lays weights out anew
@torch.inference_mode()
def test_layers_of_one_input_become_one_product(is_nested: bool, has_run: bool) -> None:
    parts = [module_of(32, 1, True, is_nested), module_of(64, 2, False, is_nested)]
    if has_run:
        for part in parts:
            part(rows(1))
    joined = fused(parts)
    assert isinstance(joined, Nf4Linear) and joined.dense() is None
    wanted = torch.cat([part(rows(3)) for part in parts], dim=-1)
    assert torch.equal(joined(rows(3)), wanted)
    assert torch.equal(joined.add_to(rows(3), wanted), 2.0 * wanted)


@pytest.mark.parametrize(("is_nested", "of_scales"), [(False, 4 * 24), (True, 24 + 4)])
def test_layers_that_stay_apart_are_counted_with_their_scales(
    is_nested: bool, of_scales: int
) -> None:
    """24 rows of one block each; quantised scales are bytes with a scale of their own."""
    layer = module_of(24, 1, is_nested=is_nested)
    assert fused([layer]).weight_bytes == 24 * 32 + of_scales


@NEEDS_BF16
@torch.inference_mode()
def test_a_row_has_the_same_bits_at_every_width() -> None:
    layer = Nf4Linear.of_weight(torch.randn(96, 64).to(torch.bfloat16), None)
    assert layer.has_invariant_rows
    together = layer(rows(9))
    for width in (1, 2, 3, 5):
        assert torch.equal(layer(rows(9)[:width]), together[:width])


@NEEDS_BF16
def test_layers_of_other_shapes_and_formats_stay_apart() -> None:
    odd = library().nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=True)
    assert isinstance(fused([odd]), ModuleLinear)
    assert isinstance(fused([module_of(24, 1), module_of(32, 2)]), ModuleLinear)


class Loaded(nn.Module):
    """A layer on a card, as far as it is read."""

    def __init__(self, out: int) -> None:
        super().__init__()
        packed = torch.empty(out * 32, 1, dtype=torch.uint8, device=CUDA)
        self.weight = nn.Parameter(packed, requires_grad=False)
        state = library().functional.QuantState(
            torch.empty(out, device=CUDA), (out, 64), None, 64, "nf4", torch.bfloat16
        )
        self.weight.quant_state = state  # type: ignore[attr-defined]
        self.bias = None


def test_a_card_multiplies_once_for_layers_of_one_input() -> None:
    with fake_card(), torch.inference_mode():
        joined = fused([Loaded(16), Loaded(40)])
        assert isinstance(joined, Nf4Linear)
        made = joined(torch.empty(3, 64, dtype=torch.bfloat16, device=CUDA))
        assert (made.shape, made.dtype, made.device) == ((3, 56), torch.bfloat16, CUDA)
        assert joined.weight_bytes == 56 * 32 + 4 * 56


def test_a_card_s_pieces_of_a_product_with_many_rows_are_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the library's own unpacking, on the processor."""
    library()
    kernel = import_module("bitsandbytes.backends.default.ops")._gemm_4bit_default_impl
    ops = torch.ops.bitsandbytes
    packed, scales = ops.quantize_4bit.default(torch.randn(320, 128), 64, "nf4", torch.uint8)
    monkeypatch.setattr(ops, "gemm_4bit", SimpleNamespace(default=kernel))
    monkeypatch.setattr(nf4, "UNPACKED_AT_ONCE", 3 * 32 * 128)
    given = torch.randn(40, 128)
    made = nf4._on_card(packed, scales, (320, 128))(given)
    assert torch.equal(made, kernel(given, packed, (320, 128), scales, 64, "nf4"))


@pytest.mark.parametrize("factor", [None, 16.0])
def test_rows_of_an_embedding_are_those_of_its_weight_unpacked(factor: float | None) -> None:
    library()
    ops, num_rows, width = torch.ops.bitsandbytes, 96, 128
    weight = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0))
    packed, scales = ops.quantize_4bit.default(weight, BLOCK, "nf4", torch.uint8)
    whole = ops.dequantize_4bit.default(packed, scales, BLOCK, "nf4", weight.shape, torch.float32)
    layer = Nf4Linear(packed, scales, (num_rows, width), None)
    table = Nf4Embedding(layer, torch.float32, None if factor is None else torch.tensor(factor))
    ids = torch.tensor([[5, 95, 5], [0, 1, 2]])
    assert torch.equal(table.rows(ids[0]), whole[ids[0]])
    assert torch.equal(table(ids), whole[ids] * (factor or 1.0))
    assert table.nbytes == packed.nbytes + scales.nbytes and table.shape == weight.shape
