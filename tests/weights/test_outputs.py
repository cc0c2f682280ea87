"""A layer of some outputs alone computes them as the whole layer does, in every format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from localspec.core.errors import ModelError
from localspec.weights.dense import Fp16Linear, PackedLinear, dense_linear
from localspec.weights.int4 import Int4Linear
from localspec.weights.int8 import Int8Linear, RoundedRowsLinear, stored_linear
from localspec.weights.linear import Linear, PlainLinear
from localspec.weights.mxfp4 import Mxfp4Linear
from localspec.weights.nf4 import BLOCK, Nf4Linear, UnpackedLinear
from localspec.weights.precision import Precision, linear_for
from localspec.weights.stored import INT4_ROWS, Grouped, Int8, Mxfp4, Nf4
from localspec.weights.tiles import rows_of_blocks
from tests.kit.card_int4 import imitate_card
from tests.kit.tiny import NEEDS_BF16

NUM_OUT, NUM_IN = 320, 128
BIAS = torch.arange(NUM_OUT) / 7
CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_outputs(count: int = 128) -> torch.Tensor:
    """Ascending places, the first and the last among them."""
    inner = 1 + torch.randperm(NUM_OUT - 2, generator=torch.Generator().manual_seed(1))
    return torch.cat((torch.tensor([0, NUM_OUT - 1]), inner[: count - 2])).sort().values


def packed(dtype: torch.dtype) -> Linear:
    layer = dense_linear(noise(NUM_OUT, NUM_IN).to(dtype), BIAS.to(dtype))
    return layer


def with_plain_rows() -> Linear:
    layer = PackedLinear(noise(NUM_OUT, NUM_IN), BIAS)
    layer.single_row_weight = noise(NUM_OUT, NUM_IN)
    return layer


def nf4(kind: str = "nf4") -> Nf4:
    weight = Nf4.rounded(noise(NUM_OUT, NUM_IN), BLOCK)
    return Nf4(weight.packed, weight.scales, weight.shape, BLOCK, kind)


def mxfp4() -> Linear:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (NUM_OUT, NUM_IN // 32, 16), generator=generator)
    scales = torch.randint(120, 128, (NUM_OUT, NUM_IN // 32), generator=generator)
    precision = Precision(torch.float32, CPU)
    return linear_for([Mxfp4(blocks.byte(), scales.byte())], [BIAS], precision)


LAYERS: dict[str, tuple[type, Callable[[], Linear]]] = {
    "plain": (PlainLinear, lambda: PlainLinear(noise(NUM_OUT, NUM_IN), BIAS)),
    "packed": (PackedLinear, lambda: packed(torch.float32)),
    "packed with plain rows": (PackedLinear, with_plain_rows),
    "fp16": (Fp16Linear, lambda: Fp16Linear(noise(NUM_OUT, NUM_IN).half().float(), BIAS)),
    "int8": (Int8Linear, lambda: stored_linear(Int8.rounded(noise(NUM_OUT, NUM_IN)), BIAS)),
    "groups": (Int4Linear, lambda: Int4Linear.of_weight(
        Grouped.rounded(noise(NUM_OUT, NUM_IN), 64), BIAS)),
    "mxfp4": (Mxfp4Linear, mxfp4),
    "unpacked nf4": (UnpackedLinear, lambda: UnpackedLinear(nf4("fp4"), BIAS)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@torch.inference_mode()
def test_some_outputs_have_the_bits_of_the_whole_layer(name: str) -> None:
    kind, make = LAYERS[name]
    layer, places = make(), some_outputs()
    assert isinstance(layer, kind)
    part = layer.of_outputs(places)
    assert isinstance(part, kind)
    for width in (1, 5):
        rows = noise(width, NUM_IN, seed=4)
        assert torch.equal(part(rows), layer(rows)[:, places])
    assert part.weight_bytes * NUM_OUT == layer.weight_bytes * len(places)


@torch.inference_mode()
def test_some_outputs_of_a_gpus_layout_are_those_of_the_whole_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imitate_card(monkeypatch)
    kind, make = LAYERS["groups"]
    layer, places, rows = make(), some_outputs(), noise(3, NUM_IN, seed=4)
    part = layer.of_outputs(places)
    assert isinstance(part, kind)
    torch.testing.assert_close(part(rows), layer(rows)[:, places])


@NEEDS_BF16
@torch.inference_mode()
def test_some_outputs_in_nf4_have_the_bits_of_the_whole_layer() -> None:
    layer, places = Nf4Linear.of_stored(nf4(), BIAS.bfloat16()), some_outputs()
    rows = noise(5, NUM_IN, seed=4).bfloat16()
    assert torch.equal(layer.of_outputs(places)(rows), layer(rows)[:, places])


@pytest.mark.parametrize("num_rows", [8, 32, INT4_ROWS])
def test_the_rows_of_blocks_in_any_order_are_read_back(num_rows: int) -> None:
    order = torch.randperm(num_rows * NUM_IN, generator=torch.Generator().manual_seed(num_rows))

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        halves = numbers.view(-1, num_rows * NUM_IN)[:, order].byte().view(-1, 2)
        return halves[:, 0] | halves[:, 1] << 4

    numbers = torch.randint(0, 16, (NUM_OUT, NUM_IN), generator=torch.Generator().manual_seed(7))
    places = some_outputs()
    rows = rows_of_blocks(pack(numbers), places, (num_rows, NUM_IN), pack)
    assert torch.equal(rows, numbers[places].byte())


def test_what_cannot_give_its_rows_away_says_so() -> None:
    last = torch.tensor([INT4_ROWS + 1])
    uneven = Int4Linear.of_weight(Grouped.rounded(noise(INT4_ROWS + 32, NUM_IN), 64), None)
    for layer in (RoundedRowsLinear(noise(NUM_OUT, NUM_IN), None), uneven):
        with pytest.raises(ModelError, match="gives no rows away"):
            layer.of_outputs(last)
