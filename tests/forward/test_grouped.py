"""Layers of 4 bits in groups: several of one input as one, and the layout that a GPU reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from localspec.forward.grouped import ROWS, Grouped, Int4Linear, has_kernel, pairs_of
from localspec.forward.weight_layout import fused

NUM_IN = 256
WIDTHS = (1, 2, 5, 16)


def layer_of(num_out: int, group_size: int = 64, *, has_bias: bool = False) -> Int4Linear:
    weight = torch.randn(num_out, NUM_IN, generator=torch.Generator().manual_seed(num_out))
    bias = torch.arange(num_out) / 7 if has_bias else None
    return Int4Linear.of_weight(Grouped.rounded(weight, group_size), bias)


@pytest.mark.parametrize("sizes", [(ROWS, ROWS), (4 * ROWS, ROWS, 2 * ROWS)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_of_one_input_answer_as_one_to_the_bit(
    sizes: tuple[int, ...], has_bias: bool
) -> None:
    layers = [layer_of(size, has_bias=has_bias) for size in sizes]
    joined = fused(layers)
    rows = torch.randn(max(WIDTHS), NUM_IN, generator=torch.Generator().manual_seed(1))
    for width in WIDTHS:
        apart = torch.cat([layer(rows[:width]) for layer in layers], 1)
        assert torch.equal(joined(rows[:width]), apart)
    assert joined.has_invariant_rows and len(Int4Linear.side_by_side(layers)) == 1
    assert joined.weight_bytes == sum(
        tensor.nbytes for each in layers for tensor in (*each.parameters(), *each.buffers())
    )


@pytest.mark.parametrize(
    "others",
    [layer_of(ROWS, 32), layer_of(ROWS // 2), nn.Linear(NUM_IN, ROWS)],
    ids=["groups of another size", "no whole block of outputs", "another format"],
)
def test_what_cannot_stand_side_by_side_stays_apart(others: nn.Module) -> None:
    layers = [layer_of(ROWS), others]
    assert Int4Linear.side_by_side(layers) is layers


def test_a_gpu_reads_even_inputs_from_the_high_half_of_a_byte() -> None:
    """As torch's own tests of its kernel lay them out (testing._internal.common_quantization)."""
    numbers = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0))
    pairs = pairs_of(numbers.int())
    assert pairs.dtype == torch.uint8 and pairs.shape == (8, 32)
    assert torch.equal(pairs >> 4, numbers[:, ::2]) and torch.equal(pairs & 15, numbers[:, 1::2])


def test_a_device_without_a_kernel_is_known_before_weights_are_read() -> None:
    assert has_kernel(torch.device("cpu")) and not has_kernel(torch.device("mps"))
    if not torch.cuda.is_available():
        assert not has_kernel(torch.device("cuda", 7))
