"""The numbers of a row have the same bits whatever rows stand beside it, however many threads share
them: bf16 and fp32, whole tensors and parts of wider rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from localspec.forward import activations

FUNCTIONS = {
    **activations.ACTIVATIONS,
    "sigmoid": activations.sigmoid,
    "softplus": activations.softplus,
    "steep silu": lambda rows: activations.steep_silu(rows, 1.702),
}
WIDTHS = (1, 40, 256, 3584)
NUM_ROWS = (1, 5, 9, 17, 64, 129)


@pytest.fixture(params=[3, 6])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """A processor's cores are often no power of two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_beside_any_rows(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    for width in WIDTHS:
        generator = torch.Generator().manual_seed(0)
        both = torch.randn(NUM_ROWS[-1], 2 * width, generator=generator).to(dtype)
        for rows in (both[:, :width], both[:, :width].contiguous()):
            whole = function(rows)
            for count in NUM_ROWS:
                assert torch.equal(function(rows[:count]), whole[:count])
                assert torch.equal(function(rows[-count:]), whole[-count:])


def test_rows_go_to_a_kernel_at_once_where_threads_share_whole_vectors() -> None:
    """Six threads share 12 rows of 3584 numbers, not 13."""
    assert activations.piece_sizes(12, 3584, 6, takes_all_threads=True) == (12,)
    assert activations.piece_sizes(13, 3584, 6, takes_all_threads=True) == (12, 1)
    assert activations.piece_sizes(500, 4096, 4) == (500,)
