"""The layout of a GPU's kernel for 4 bits in groups, imitated on a processor.

A tile holds 8 outputs and as many inputs as the kernel takes at once, in an order of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localspec.weights import int4
from localspec.weights.tiles import TILE, TILE_ROWS, TILES, nibble_order, unpacked_numbers


def imitate_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack and multiply weights of 4 bits in groups on the processor as a GPU does."""
    monkeypatch.setattr(int4, "_packed", _packed)
    monkeypatch.setattr(int4, "_order_on", lambda device, tiles: _order(tiles))
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu", _product)


def _packed(values: torch.Tensor, lowest: int, device: torch.device) -> torch.Tensor:
    tiles = next(count for count in TILES if values.shape[1] % (count * TILE) == 0)
    by_tile = (values - lowest).view(-1, TILE_ROWS, values.shape[1] // tiles // TILE, tiles * TILE)
    return _tile(by_tile.transpose(1, 2), tiles)


def _tile(numbers: torch.Tensor, tiles: int) -> torch.Tensor:
    """[..., TILE_ROWS, inputs] numbers -> [..., 32, tiles / 2] words."""
    order = torch.randperm(TILE_ROWS * TILE * tiles, generator=torch.Generator().manual_seed(tiles))
    shuffled = numbers.flatten(-2)[..., order].view(*numbers.shape[:-2], 32, tiles // 2, 8).long()
    words = (shuffled << torch.arange(0, 32, 4)).sum(-1)
    return (words - (words >> 31 << 32)).int()


def _order(tiles: int) -> torch.Tensor:
    return nibble_order(lambda tile: _tile(tile, tiles), (TILE_ROWS, TILE * tiles))


def _product(
    rows: torch.Tensor, packed: torch.Tensor, group_size: int, scales_and_zeros: torch.Tensor
) -> torch.Tensor:
    numbers: Any = unpacked_numbers(packed, _order(2 * packed.shape[-1])).float() - int4.MIDDLE
    scales, middles = scales_and_zeros.float().transpose(0, 1).unbind(-1)
    weight = numbers * scales.repeat_interleave(group_size, 1)
    return rows.float() @ (weight + middles.repeat_interleave(group_size, 1)).T
