"""What keeps the bits of a row the same, whatever rows are computed beside it, on a processor.

Contract: a matrix product adds up the same numbers in another order when its shape makes the
library choose another kernel, and rounds differently. Measured with oneDNN and MKL of torch 2.13:
- Linear layers in oneDNN's packed layout give a row the same bits at every width but 1, bf16 and
  fp32. Of few rows ROW_MULTIPLE are the fastest, so fewer are filled up (`padded`).
- Batched products in fp32 give the same bits for every multiple of ROW_MULTIPLE rows.
- A sum over further keys of weight 0 has the same bits at most lengths: `summed_length` gives one.
  Keys of weight 0 between the others change nothing within a part of the sum (`begins_part`).
- The number of threads changes nothing.

Norms, rotation, activation and softmax work row by row. Another processor may differ: loading a
model compares (`weights.Opened`), and says so where it does.

Not here: the products themselves (weight_layout, attention), the comparison (weights).
"""

from __future__ import annotations

from functools import cache

import torch

ROW_MULTIPLE = 4
KEY_MULTIPLE = 64
LONGEST_TESTED = 2048  # beyond, every multiple continues what the shorter ones begin
REFERENCE_LENGTH = 4096


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def padded(rows: torch.Tensor) -> torch.Tensor:
    """rows, [n, ...], on a processor at least ROW_MULTIPLE of them: the last one is repeated."""
    missing = ROW_MULTIPLE - rows.shape[0]
    if missing <= 0 or rows.device.type != "cpu":
        return rows
    return torch.cat((rows, rows[-1:].expand(missing, *rows.shape[1:])))


def summed_length(num_keys: int) -> int:
    """The number of keys to sum over where `num_keys` count: the others weigh 0."""
    if num_keys > LONGEST_TESTED:
        return rounded_up(num_keys, KEY_MULTIPLE)
    return next(length for length in _tested_lengths() if length >= num_keys)


def begins_part(place: int) -> bool:
    """Whether a sum over keys may begin a new part at this place, whose numbers are added up apart
    from those before it."""
    if place % KEY_MULTIPLE:
        return False
    return place >= LONGEST_TESTED or place in _tested_parts()


@cache
@torch.inference_mode()
def _tested_lengths() -> tuple[int, ...]:
    """Multiples of KEY_MULTIPLE over which a sum has the bits of a longer one, the last of them
    LONGEST_TESTED. A library splits a long sum into equal parts of its own choice."""
    weights, values = _probe()

    def is_same(length: int) -> bool:
        held = weights.clone()
        held[:, :, length:] = 0.0
        short = torch.bmm(held[:, :, :length], values[:, :length])
        return torch.equal(short, torch.bmm(held, values))

    lengths = range(KEY_MULTIPLE, LONGEST_TESTED, KEY_MULTIPLE)
    return (*(length for length in lengths if is_same(length)), LONGEST_TESTED)


@cache
@torch.inference_mode()
def _tested_parts() -> frozenset[int]:
    """Multiples of KEY_MULTIPLE below LONGEST_TESTED where a sum begins a new part: moving numbers
    over such a place, with zeros left behind, changes its bits."""
    weights, values = _probe()

    def is_changed(place: int) -> bool:
        size = KEY_MULTIPLE // 2
        before, after = slice(place - size, place), slice(place, place + size)
        held = weights.clone()
        held[:, :, place:] = 0.0
        moved, moved_values = held.clone(), values.clone()
        moved[:, :, after], moved_values[:, after] = held[:, :, before], values[:, before]
        moved[:, :, before] = 0.0
        return not torch.equal(torch.bmm(held, values), torch.bmm(moved, moved_values))

    return frozenset(filter(is_changed, range(KEY_MULTIPLE, LONGEST_TESTED, KEY_MULTIPLE)))


def _probe() -> tuple[torch.Tensor, torch.Tensor]:
    """Noise as weights, [2, ROW_MULTIPLE, m], and values, [2, m, 64]."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, REFERENCE_LENGTH, 64, generator=generator)
    return torch.rand(2, ROW_MULTIPLE, REFERENCE_LENGTH, generator=generator), values
