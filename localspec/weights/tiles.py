"""The layouts in which kernels for 4 bits read their numbers, and the way back.

Libraries lay numbers out for a kernel (`_convert_weight_to_int4pack` of torch) and have no operator
that takes them back. The order inside a tile is therefore read off: tiles are packed whose numbers
are the digits of their own places, to the base of 16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from localspec.core.errors import ModelError

TILE = 16  # Inputs in a tile of the layout.
TILES = (8, 4, 2)  # Tiles of inputs that it may put together, the preferred count first.
TILE_ROWS = 8  # Outputs in a tile of the layout.
BYTES_AT_ONCE = 2**22  # Packed bytes of which rows are taken at once.

Pack = Callable[[torch.Tensor], torch.Tensor]


def nibble_order(pack: Pack, shape: tuple[int, int]) -> torch.Tensor:
    """Return the nibble of a packed tile that holds each of its numbers, [outputs * inputs].

    pack: numbers from 0 to 15, [outputs, inputs] -> the packed tile. shape: outputs and inputs."""
    count = shape[0] * shape[1]
    places, num_digits = torch.arange(count).view(shape), -(-(count - 1).bit_length() // 4)
    digits = [_nibbles(pack((places >> 4 * digit & 15).int())) for digit in range(num_digits)]
    held = sum(part.flatten().long() << 4 * digit for digit, part in enumerate(digits))
    assert isinstance(held, torch.Tensor)
    return held.argsort()


def rows_of_blocks(
    packed: torch.Tensor, places: torch.Tensor, shape: tuple[int, int], pack: Pack
) -> torch.Tensor:
    """Return the numbers of some outputs, [k, in] uint8.

    packed: blocks one after the other, each as `pack` lays it out. places: of the outputs, [k]
    ascending. shape: outputs and inputs of a block. Raises ModelError for an output of a block that
    is not whole."""
    (num_rows, num_in), order = shape, nibble_order(pack, shape)
    numbers = packed.reshape(-1).view(torch.uint8)
    num_bytes = num_rows * num_in // 2
    whole = numbers[: numbers.numel() // num_bytes * num_bytes].view(-1, num_bytes)
    if int(places[-1]) >= num_rows * whole.shape[0]:
        raise ModelError(
            f"An output head of 4 bits whose tokens are no multiple of {num_rows} gives no rows "
            "away. Load the model with --dtype 4-bit."
        )
    parts = list[torch.Tensor]()
    for some in torch.split(places, max(1, BYTES_AT_ONCE // num_bytes)):
        blocks, block_of_place = (some // num_rows).unique(return_inverse=True)
        values = _nibbles(whole[blocks]).flatten(1)[:, order].view(-1, num_rows, num_in)
        parts.append(values[block_of_place, some % num_rows])
    return torch.cat(parts)


def unpacked_numbers(packed: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the numbers of packed tiles, [out, in] uint8. packed: [out / TILE_ROWS, n, ...] int32,
    of a machine whose first byte of a word is the lowest."""
    num_rows, num_columns = packed.shape[:2]
    nibbles = _nibbles(packed).view(num_rows, num_columns, -1)[..., order]
    tiles = nibbles.view(num_rows, num_columns, TILE_ROWS, -1)
    return tiles.transpose(1, 2).reshape(num_rows * TILE_ROWS, -1)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    halves = words.contiguous().view(torch.uint8)
    return torch.stack((halves & 15, halves >> 4), -1)
