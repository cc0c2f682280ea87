"""MXFP4: folders whose experts are kept in it, and the layer that multiplies with it.

No kernel of torch multiplies with MXFP4 and no other format of 4 bits holds its values, so the
layer unpacks its weight for every product by a table of bytes. The weight itself stays as the file
holds it: 4.25 bits. On a GPU a kernel of bitsandbytes for a single row takes the table of the 16
values as an argument, and a scale for 32 weights: `OneRowLinear` multiplies with the packed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from localspec.core.errors import ModelError
from localspec.formats.bitsandbytes_layers import UNPACKED_AT_ONCE
from localspec.formats.folder_files import ModelFolder
from localspec.formats.safetensors_file import TensorPlace
from localspec.weights.dense import PACKED_DTYPES
from localspec.weights.files import places_in, read_tensor
from localspec.weights.library import bitsandbytes
from localspec.weights.linear import QuantisedLinear, bytes_of, taken
from localspec.weights.stored import MXFP4_BLOCK, Dense, Mxfp4, Mxfp4Tables, Weight

TRIED_ROWS = 64  # Outputs of the product that tries the kernel of a GPU.
MOST_ERROR = 0.02  # Of that product, by its norm: rounding to bf16 is near 0.003.
BLOCKS, SCALES = "_blocks", "_scales"  # end the names of the two parts of a weight
# Rows, a weight [out, in] and a bias, or none.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Mxfp4Linear(QuantisedLinear):
    """The product with the unpacked weight. On a processor it has the bits of the same weight in a
    packed layer of full precision, from two rows on."""

    has_invariant_rows = False

    def __init__(self, weight: Mxfp4, bias: torch.Tensor | None, tables: Mxfp4Tables) -> None:
        """weight: [out, in]. tables: on its device, in the precision of the rows."""
        self.weight = weight
        self.bias = bias
        self._tables = tables
        self._product = _product_of(tables.pairs.dtype, tables.pairs.device.type)
        self.weight_bytes = bytes_of(weight.blocks, weight.scales, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return _unpacked_product(rows, self.weight, self.bias, self._tables, self._product)

    def of_outputs(self, places: torch.Tensor) -> Mxfp4Linear:
        """See Linear."""
        bias = taken(self.bias, places)
        return Mxfp4Linear(self.weight.rows(places), bias, self._tables)


class OneRowLinear(QuantisedLinear):
    """The product on a GPU with a kernel for single rows (`has_kernel`); for several rows the
    weight is unpacked."""

    has_invariant_rows = False

    def __init__(self, weight: Mxfp4, tables: Mxfp4Tables) -> None:
        """weight: [out, in], `turned`. tables: of turned weights, in the precision of the rows."""
        self.weight, self._tables = weight, tables
        self.weight_bytes = bytes_of(weight.blocks, weight.scales)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] > 1:
            return _unpacked_product(rows, self.weight, None, self._tables, F.linear)
        scales = F.embedding(self.weight.scales.int(), self._tables.scales).float()
        packed = self.weight.blocks.reshape(-1, 1)
        kernel: Any = torch.ops.bitsandbytes.gemv_4bit.default
        result: torch.Tensor = kernel(
            rows, packed, self.weight.shape, scales.flatten(), self._tables.values, MXFP4_BLOCK
        )
        return result


def _unpacked_product(
    rows: torch.Tensor,
    weight: Mxfp4,
    bias: torch.Tensor | None,
    tables: Mxfp4Tables,
    product: Product,
) -> torch.Tensor:
    """Unpack as many outputs at a time as fit the bound."""
    num_out, num_in = weight.shape
    step = max(1, UNPACKED_AT_ONCE // num_in)
    if step >= num_out:
        return product(rows, weight.unpacked(tables), bias)
    pieces = [slice(start, start + step) for start in range(0, num_out, step)]
    biases = [None if bias is None else bias[piece] for piece in pieces]
    products = [
        product(rows, weight.rows(piece).unpacked(tables), part)
        for piece, part in zip(pieces, biases, strict=True)
    ]
    return torch.cat(products, -1)


def turned(weight: Mxfp4) -> Mxfp4:
    """Return the weight with the first of two weights in the upper half of each byte."""
    return Mxfp4(weight.blocks << 4 | weight.blocks >> 4, weight.scales)


@cache
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a GPU multiplies a row of this precision with packed weights."""
    return device.type == "cuda" and tries_kernel(device, dtype)


def tries_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if a small product on a device is right."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (TRIED_ROWS, 3, MXFP4_BLOCK // 2), generator=generator)
    scales = torch.randint(120, 128, (TRIED_ROWS, 3), generator=generator)
    weight = Mxfp4(blocks.byte(), scales.byte())
    row = torch.randn(1, 3 * MXFP4_BLOCK, generator=generator)
    wanted = row @ weight.dense(torch.float32).T
    try:
        bitsandbytes()
        tables = Mxfp4Tables.of(dtype, device, is_turned=True)
        layer = OneRowLinear(turned(weight.to(device)), tables)
        product = layer(row.to(device, dtype)).float().cpu()
    except (RuntimeError, AttributeError, NotImplementedError, ModelError):
        return False
    return bool((product - wanted).norm() <= MOST_ERROR * wanted.norm())


@cache
def _product_of(dtype: torch.dtype, device_type: str) -> Product:
    """Return the kernel of packed layers (weights.dense) where it runs: torch's own product gives a
    row other bits at other numbers of rows."""
    kernel: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if device_type != "cpu" or dtype not in PACKED_DTYPES or kernel is None:
        return F.linear

    def product(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        result: torch.Tensor = kernel(rows, weight, bias, "none", [], "")
        return result

    try:
        ones = torch.ones(2, 2, dtype=dtype)
        is_right = bool((product(ones, ones, None) == 2.0).all())
    except RuntimeError:  # a processor without these kernels
        return F.linear
    return product if is_right else F.linear


class Mxfp4Source:
    """The tensors of a folder, with those in MXFP4 under the name of the whole weight."""

    def __init__(self, found: ModelFolder, dtype: torch.dtype) -> None:
        self._name, self._places = found.name, places_in(found.files)
        begins = (each.removesuffix(BLOCKS) for each in self._places if each.endswith(BLOCKS))
        self._packed = {each for each in begins if f"{each}{SCALES}" in self._places}

    @property
    def names(self) -> frozenset[str]:
        parts = {f"{each}{part}" for each in self._packed for part in (BLOCKS, SCALES)}
        return frozenset((self._places.keys() - parts) | self._packed)

    def read(self, name: str) -> Weight:
        """Raises ModelError for parts that are no weight in MXFP4."""
        if name not in self._packed:
            return Dense(read_tensor(self._places[name]))
        return self._packed_weight(name, *self._parts_of(name))

    def entries(self, name: str) -> Iterator[Weight]:
        """Raises ModelError for parts that are no weight in MXFP4."""
        if name not in self._packed:
            yield from (Dense(read_tensor(place)) for place in self._places[name].entries())
            return
        blocks, scales = self._parts_of(name)
        if blocks.shape[:1] != scales.shape[:1]:
            raise self._error(name, f"{scales.shape[0]} experts of {blocks.shape[0]}")
        for parts in zip(blocks.entries(), scales.entries(), strict=True):
            yield self._packed_weight(name, *parts)

    def _parts_of(self, name: str) -> tuple[TensorPlace, TensorPlace]:
        return self._places[f"{name}{BLOCKS}"], self._places[f"{name}{SCALES}"]

    def _packed_weight(self, name: str, blocks: TensorPlace, scales: TensorPlace) -> Mxfp4:
        try:
            return Mxfp4(read_tensor(blocks), read_tensor(scales))
        except ValueError as error:
            raise self._error(name, error) from error

    def _error(self, name: str, fault: object) -> ModelError:
        return ModelError(
            f"The packed weight {name} in {self._name} is not laid out as MXFP4 is ({fault}). "
            "Fetch the model again, or choose another copy of it."
        )
