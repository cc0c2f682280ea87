"""Layers of 4 bits in groups: several of one input as one, and the layout that a GPU reads."""

from __future__ import annotations

import pytest
import torch

from localspec.weights.int4 import Int4Linear, has_kernel, pairs_of
from localspec.weights.linear import SideBySide
from localspec.weights.precision import Precision, linear_for
from localspec.weights.stored import INT4_ROWS, Dense, Grouped, Weight
from localspec.weights.tiles import nibble_order, unpacked_numbers

ROWS = INT4_ROWS
NUM_IN = 256
WIDTHS = (1, 2, 5, 16)
KEPT = Precision(torch.float32, torch.device("cpu"), keeps_groups=True)


def dense_of(num_out: int) -> torch.Tensor:
    return torch.randn(num_out, NUM_IN, generator=torch.Generator().manual_seed(num_out))


def groups_of(num_out: int, group_size: int = 64) -> Grouped:
    return Grouped.rounded(dense_of(num_out), group_size)


@pytest.mark.parametrize("sizes", [(ROWS, ROWS), (4 * ROWS, ROWS, 2 * ROWS)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_of_one_input_answer_as_one_to_the_bit(
    sizes: tuple[int, ...], has_bias: bool
) -> None:
    biases = [torch.arange(size) / 7 if has_bias else None for size in sizes]
    weights = [groups_of(size) for size in sizes]
    layers = [
        Int4Linear.of_weight(weight, bias) for weight, bias in zip(weights, biases, strict=True)
    ]
    fused = linear_for(weights, biases, KEPT)
    assert isinstance(fused, Int4Linear) and fused.has_invariant_rows
    rows = torch.randn(max(WIDTHS), NUM_IN, generator=torch.Generator().manual_seed(1))
    for width in WIDTHS:
        apart = torch.cat([layer(rows[:width]) for layer in layers], 1)
        assert torch.equal(fused(rows[:width]), apart)
    assert fused.weight_bytes == sum(layer.weight_bytes for layer in layers)


@pytest.mark.parametrize(
    "other",
    [groups_of(ROWS, 32), groups_of(ROWS // 2), Dense(dense_of(ROWS))],
    ids=["groups of another size", "no whole block of outputs", "another format"],
)
def test_what_cannot_be_one_weight_stays_side_by_side(other: Weight) -> None:
    first = groups_of(ROWS)
    fused = linear_for([first, other], [None, None], KEPT)
    assert isinstance(fused, SideBySide)
    rows = torch.randn(3, NUM_IN, generator=torch.Generator().manual_seed(1))
    parts = [linear_for([weight], [None], KEPT)(rows) for weight in (first, other)]
    assert torch.equal(fused(rows), torch.cat(parts, -1))


@pytest.mark.parametrize("num_tiles", [2, 4, 8])
def test_the_numbers_of_a_packed_weight_are_read_back(num_tiles: int) -> None:
    """With tiles whose order is any: that of a GPU is known to no operator of torch."""
    width = 16 * num_tiles
    order = torch.randperm(8 * width, generator=torch.Generator().manual_seed(num_tiles))

    def pack(tile: torch.Tensor) -> torch.Tensor:
        shuffled = tile.flatten()[order].view(32, num_tiles // 2, 8).long()
        words = (shuffled << torch.arange(0, 32, 4)).sum(-1)
        return (words - (words >> 31 << 32)).int()

    generator = torch.Generator().manual_seed(7)
    numbers = torch.randint(0, 16, (24, 3 * width), generator=generator)
    tiles = numbers.view(3, 8, 3, width).transpose(1, 2)
    packed = torch.stack([torch.stack([pack(tile) for tile in row]) for row in tiles])
    assert torch.equal(unpacked_numbers(packed, nibble_order(pack, (8, width))), numbers.byte())


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
