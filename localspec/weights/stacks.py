"""The weights of all experts of one layer in one place, of which a device takes the chosen ones.

Experts stand along an axis of their own right before the axis of outputs, or before that of inputs.
Taking some of them therefore gives one weight: that of a layer with the outputs of all chosen
experts side by side, or of a layer that sums over the inputs of all of them. It is packed as the
experts are, so the kernels of linear layers multiply with it. Nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from localspec.core.errors import ModelError
from localspec.formats.bitsandbytes_layers import UNPACKED_AT_ONCE
from localspec.weights import mxfp4, nf4
from localspec.weights.int4 import Int4Linear, packed_parts, unpacked_values
from localspec.weights.linear import Linear, PlainLinear, QuantisedLinear, bytes_of
from localspec.weights.mxfp4 import Mxfp4Linear, OneRowLinear, turned
from localspec.weights.stored import Dense, Grouped, Mxfp4, Mxfp4Tables, Nf4, Weight

Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class StackFormat:
    """How matrices [out, in] of one kind are laid out. parts: the tensors of a matrix on the
    device. out_axes, in_axes: where outputs and inputs stand in each of them. layer: the linear
    layer of such tensors. values: what they stand for, [out, in]."""

    parts: Callable[[Weight], Parts]
    out_axes: tuple[int, ...]
    in_axes: tuple[int, ...]
    layer: Callable[[Parts], Linear]
    values: Callable[[Parts], torch.Tensor]


class Stack(QuantisedLinear):
    """The matrices of all experts. As a layer among others it has a size; what multiplies is the
    layer of some chosen experts.

    is_summed: chosen experts stand side by side with their inputs, else with their outputs. error:
    how far a layer of 4 bits in groups lies off, see Int4Linear."""

    has_invariant_rows = False

    def __init__(self, first: Weight, count: int, is_summed: bool, of: StackFormat) -> None:
        """first: like every matrix. of: their format."""
        self.error = 0.0
        self.kind, self.num_experts, self.is_summed = type(first), count, is_summed
        self.num_weights = first.shape[0] * first.shape[1]
        self._format, self._axes = of, of.in_axes if is_summed else of.out_axes
        self._parts = tuple(
            part.new_empty((*part.shape[:axis], count, *part.shape[axis:]))
            for part, axis in zip(of.parts(first), self._axes, strict=True)
        )
        self.weight_bytes = bytes_of(*self._parts)

    def fill(self, expert: int, weight: Weight) -> None:
        """Raise ModelError for a matrix in another format than the first one."""
        parts = self._format.parts(weight) if type(weight) is self.kind else ()
        places = [
            held.select(axis, expert) for held, axis in zip(self._parts, self._axes, strict=True)
        ]
        if [part.shape for part in parts] != [place.shape for place in places]:
            raise ModelError(
                "The experts of a layer of this model are kept in different formats, and a GPU "
                "holds them in one. Choose another copy of the model, or run it on the CPU."
            )
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)

    def chosen(self, experts: torch.Tensor) -> Linear:
        """Return the layer of some experts, in this order. experts: their numbers on the device."""
        return self._format.layer(self._taken(experts))

    @property
    def num_at_once(self) -> int:
        """How many experts `products` may unpack together."""
        return max(1, UNPACKED_AT_ONCE // self.num_weights)

    def products(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the product of each of some experts with rows of its own, [k, n, out]. rows:
        [k, n, in]. experts: [k]."""
        count = experts.shape[0]
        if count == 1:
            return self.chosen(experts)(rows[0])[None]
        values = self._format.values(self._taken(experts))
        if self.is_summed:  # [out, k * in]
            return torch.bmm(rows, values.view(values.shape[0], count, -1).permute(1, 2, 0))
        return torch.bmm(rows, values.view(count, -1, values.shape[1]).mT)

    def _taken(self, experts: torch.Tensor) -> Parts:
        """Words of 8 bytes are copied, where a part consists of them: bytes take longer."""
        return tuple(
            _words(part).index_select(axis, experts).flatten(axis, axis + 1).view(part.dtype)
            for part, axis in zip(self._parts, self._axes, strict=True)
        )


def _words(part: torch.Tensor) -> torch.Tensor:
    is_whole = part.shape[-1] * part.element_size() % torch.int64.itemsize == 0
    return part.view(torch.int64) if is_whole else part


def stackable(weight: Weight, dtype: torch.dtype) -> Weight:
    """Return the weight itself if a format of stacks takes it, else its values. dtype: of them."""
    is_nf4 = isinstance(weight, Nf4) and weight.kind == "nf4" and weight.block_size == nf4.BLOCK
    if is_nf4 and weight.shape[1] % nf4.BLOCK == 0:
        return weight
    if isinstance(weight, Dense | Grouped | Mxfp4):
        return weight
    return Dense(weight.dense(dtype))


def format_of(weight: Weight, dtype: torch.dtype, device: torch.device) -> StackFormat:
    """weight: as `stackable` returns it. dtype: of the rows."""
    if isinstance(weight, Grouped):
        return StackFormat(
            lambda each: _groups(each, device),
            (0, 1),
            (1, 0),
            _of_groups(weight.group_size),
            lambda parts: unpacked_values(parts[0], parts[1], dtype),
        )
    if isinstance(weight, Mxfp4):
        has_kernel = mxfp4.has_kernel(device, dtype)
        tables = Mxfp4Tables.of(dtype, device, has_kernel)

        def layer(parts: Parts) -> Linear:
            chosen = Mxfp4(*parts)
            return OneRowLinear(chosen, tables) if has_kernel else Mxfp4Linear(chosen, None, tables)

        blocks = _turned_blocks if has_kernel else _blocks
        values = lambda parts: Mxfp4(*parts).unpacked(tables)  # noqa: E731
        return StackFormat(blocks, (0, 0), (1, 1), layer, values)
    if isinstance(weight, Nf4):
        return StackFormat(
            _nf4,
            (0, 0),
            (1, 1),
            lambda parts: nf4.stored_linear(_whole_nf4(parts), None),
            lambda parts: _whole_nf4(parts).dense(dtype),
        )
    return StackFormat(_values, (0,), (1,), _plain_layer, lambda parts: parts[0])


def _plain_layer(parts: Parts) -> Linear:
    return PlainLinear(parts[0], None)


def _values(weight: Weight) -> Parts:
    assert isinstance(weight, Dense)
    return (weight.values,)  # [out, in]


def _blocks(weight: Weight) -> Parts:
    assert isinstance(weight, Mxfp4)
    return weight.blocks, weight.scales  # [out, in / 32, 16], [out, in / 32]


def _turned_blocks(weight: Weight) -> Parts:
    assert isinstance(weight, Mxfp4)
    return _blocks(turned(weight))


def _nf4(weight: Weight) -> Parts:
    assert isinstance(weight, Nf4)
    num_out = weight.shape[0]
    return weight.packed.view(num_out, -1), weight.scales.view(num_out, -1)


def _whole_nf4(parts: Parts) -> Nf4:
    packed, scales = parts
    shape = (packed.shape[0], 2 * packed.shape[1])
    return Nf4(packed.reshape(-1, 1), scales.flatten(), shape, nf4.BLOCK, "nf4")


def _groups(weight: Weight, device: torch.device) -> Parts:
    assert isinstance(weight, Grouped)
    return packed_parts(weight, device)  # tiles of outputs, of inputs, ...; [groups, out, 2]


def _of_groups(group_size: int) -> Callable[[Parts], Linear]:
    def layer(parts: Parts) -> Linear:
        packed, scales_and_zeros = parts
        return Int4Linear(packed, scales_and_zeros, scales_and_zeros.shape[0] * group_size, None)

    return layer
