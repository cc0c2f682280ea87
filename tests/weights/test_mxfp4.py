"""MXFP4: the very values of transformers, a product with the bits of the dense weight, and parts
that do not belong together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from localspec.core.errors import ModelError
from localspec.formats.folder_files import check_folder
from localspec.weights import mxfp4
from localspec.weights.dense import PackedLinear
from localspec.weights.library import bitsandbytes
from localspec.weights.mxfp4 import Mxfp4Linear, OneRowLinear
from localspec.weights.precision import Precision, linear_for, stack_for
from localspec.weights.source import open_source
from localspec.weights.stored import Mxfp4, joined
from tests.kit.mxfp4 import random_mxfp4
from tests.kit.tiny import CPU, NEEDS_BF16

BF16, FP32 = torch.bfloat16, torch.float32


def test_every_byte_and_scale_stand_for_the_values_of_transformers() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255).view(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    wanted = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=FP32)
    assert torch.equal(Mxfp4(blocks, scales).dense(FP32), wanted.mT)


@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=NEEDS_BF16), FP32])
def test_a_product_has_the_bits_of_the_dense_weight_at_every_width(dtype: torch.dtype) -> None:
    """Sums of more than 1,024 products: a single row of them has other bits."""
    weight, generator = random_mxfp4(64, 2880), torch.Generator().manual_seed(1)
    rows, bias = torch.randn(16, 2880, generator=generator).to(dtype), torch.randn(64).to(dtype)
    layer = linear_for([weight], [bias], Precision(dtype, CPU))
    assert isinstance(layer, Mxfp4Linear)
    assert layer.weight_bytes == 64 * 2880 * 4.25 / 8 + bias.nbytes
    wanted = PackedLinear(weight.dense(dtype), bias)(rows)
    for width in range(2, 17):
        assert torch.equal(layer(rows[:width]), wanted[:width])
    residual = torch.ones(16, 64, dtype=dtype)
    assert torch.equal(layer.add_to(rows, residual), wanted + residual)


def test_a_large_weight_is_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows, bias = random_mxfp4(64, 96), torch.eye(96), torch.randn(64)
    layer = linear_for([weight], [bias], Precision(FP32, CPU))
    wanted = layer(rows)
    monkeypatch.setattr(mxfp4, "UNPACKED_AT_ONCE", 20 * 96)
    assert torch.equal(layer(rows), wanted)


def kernel_of_a_card(
    row: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int], scales: torch.Tensor,
    table: torch.Tensor, block: int,
) -> torch.Tensor:  # fmt: skip
    """Of bitsandbytes: the first weight of a byte in its upper half, a scale for each block."""
    halves = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), -1).flatten()
    values = table[halves.long()].view(-1, block) * scales[:, None]
    return torch.nn.functional.linear(row, values.view(shape).to(row.dtype))


@pytest.mark.parametrize("is_right", [True, False])
def test_a_card_multiplies_one_row_with_the_bytes_where_its_kernel_is_right(
    is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*given: Any) -> torch.Tensor:
        return kernel_of_a_card(*given) * (1.0 if is_right else 1.1)

    bitsandbytes()
    ops = torch.ops.bitsandbytes
    monkeypatch.setattr(ops, "gemv_4bit", SimpleNamespace(default=kernel))
    monkeypatch.setattr(mxfp4, "has_kernel", mxfp4.tries_kernel)
    weights = [random_mxfp4(64, 96, seed=seed) for seed in range(3)]
    for is_summed in (False, True):
        matrices = [[weight] for weight in weights]
        stack = stack_for(matrices, 3, Precision(FP32, CPU), is_summed)
        layer = stack.chosen(torch.tensor([2, 0]))
        assert isinstance(layer, OneRowLinear if is_right else Mxfp4Linear)
        values = [weights[expert].dense(FP32) for expert in (2, 0)]
        wanted = torch.cat(values, int(is_summed)).T
        eye = torch.eye(wanted.shape[0])
        assert torch.equal(layer(eye), wanted)
        assert torch.equal(torch.cat([layer(row) for row in eye.split(1)]), wanted)


def test_rows_and_layers_below_each_other_are_those_of_the_values() -> None:
    first, second = random_mxfp4(6, 64), random_mxfp4(4, 64, seed=1)
    both = joined([first, second])
    assert isinstance(both, Mxfp4) and both.shape == (10, 64)
    order = torch.tensor([9, 0, 7])
    wanted = torch.cat((first.dense(FP32), second.dense(FP32)))[order]
    assert torch.equal(both.rows(order).dense(FP32), wanted)


def test_a_folder_whose_scales_do_not_fit_its_blocks_is_refused(tmp_path: Path) -> None:
    weight, name = random_mxfp4(2, 4, 64), "model.layers.0.mlp.experts.down_proj"
    parts = {f"{name}_blocks": weight.blocks, f"{name}_scales": weight.scales[:, :, :1].clone()}
    save_file(parts, tmp_path / "model.safetensors")
    config = '{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}'
    (tmp_path / "config.json").write_text(config)
    source = open_source(check_folder(tmp_path), FP32)
    assert source.names == {name}
    with pytest.raises(ModelError, match=r"down_proj.*not laid out as MXFP4 is.*Fetch the model"):
        source.read(name)
