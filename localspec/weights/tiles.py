"""The layout in which a GPU's kernel for 4 bits in groups reads its numbers, and the way back.

torch packs numbers for that kernel (`_convert_weight_to_int4pack`) and has no operator that unpacks
them. The order inside a tile is therefore read off: three tiles are packed whose numbers are the
digits of their own places, to the base of 16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

TILE = 16  # Inputs in a tile of the layout.
TILES = (8, 4, 2)  # Tiles of inputs that it may put together, the preferred count first.
TILE_ROWS = 8  # Outputs in a tile of the layout.
DIGITS = 3  # Digits to the base of 16 of a place in the largest tile, of 1,024 numbers.

Pack = Callable[[torch.Tensor], torch.Tensor]


def nibble_order(pack: Pack, num_tiles: int) -> torch.Tensor:
    """Return the nibble of a packed tile that holds each of its numbers, [TILE_ROWS * inputs].

    pack: [TILE_ROWS, inputs] numbers from 0 to 15 -> the packed tile. num_tiles: of TILES."""
    num_in = TILE * num_tiles
    places = torch.arange(TILE_ROWS * num_in).view(TILE_ROWS, num_in)
    digits = [_nibbles(pack((places >> 4 * digit & 15).int())) for digit in range(DIGITS)]
    held = sum(part.flatten().long() << 4 * digit for digit, part in enumerate(digits))
    assert isinstance(held, torch.Tensor)
    return held.argsort()


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
