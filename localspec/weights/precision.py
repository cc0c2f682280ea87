"""How the linear layers of a model are kept, and the layer that is made of a weight.

`linear_for` is the one way from a weight as stored to a product. It quantises last: weights of one
input are put below each other before, so that one layer stands for all of them. `stack_for` does
the same for all experts of a layer, which a GPU keeps in one place (weights.stacks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from localspec.core.errors import ModelError
from localspec.formats.stored import Stored
from localspec.weights import int4, int8, nf4
from localspec.weights.dense import dense_linear
from localspec.weights.int4 import MOST_REPACKING_ERROR, Int4Linear
from localspec.weights.int8 import RoundedRowsLinear, has_fbgemm
from localspec.weights.linear import Linear, SideBySide
from localspec.weights.mxfp4 import Mxfp4Linear
from localspec.weights.nf4 import Nf4Linear
from localspec.weights.stacks import Stack, format_of, stackable
from localspec.weights.stored import (
    INT4_ROWS,
    Dense,
    Grouped,
    Int8,
    Mxfp4,
    Mxfp4Tables,
    Nf4,
    Weight,
    joined,
)

Bits = Literal[4, 8]
Kind = Literal["nf4", "int8", "int4"]  # of a copy that drafts
GROUP = 64  # Weights that share one scale where weights are rounded here to 4 bits.
ROWS = 32  # Outputs that the kernels for a processor take at a time.
MAX_RELATIVE_ERROR = 0.5  # 4 bits are near 0.1, 8 near 0.02; a broken kernel is beyond 1.


@dataclass(frozen=True)
class Precision:
    """How the linear layers of a model are kept on a device.

    dtype: of activations and dense weights. kind: what weights in full precision are quantised to,
    None for nothing; "llm.int8" is LLM.int8. group_size: of "int4". keeps_groups: whether what a
    file holds in 4-bit groups stays so. elsewhere: how experts are kept on another device, None
    where they are on this one."""

    dtype: torch.dtype
    device: torch.device
    kind: Literal["nf4", "int4", "llm.int8"] | None = None
    group_size: int = GROUP
    keeps_groups: bool = False
    elsewhere: Precision | None = None

    @property
    def whole(self) -> Precision:
        """The same without quantising anything: for heads and routers."""
        return Precision(self.dtype, self.device)

    @property
    def of_experts(self) -> Precision:
        """How experts are kept. LLM.int8 would wait for the device at every one of them. What a
        file holds in more than 4 bits beside groups is rounded to 4 on a processor too: a mixture
        is nearly all experts."""
        kept = self.elsewhere or self
        if kept.kind == "llm.int8":
            return kept.whole
        return replace(kept, kind="int4") if kept.keeps_groups else kept

    @property
    def stacks_experts(self) -> bool:
        """True where experts are taken from a stack by index: a processor reads the indices."""
        return self.device.type != "cpu"


def precision_for(
    stored: Stored | None,
    bits: Bits | None,
    dtype: torch.dtype,
    device: torch.device,
    experts_device: torch.device | None = None,
) -> Precision:
    """Return how a model whose files hold their weights as `stored` is kept in `bits`.

    experts_device: of experts, where it is another one; a processor computes in what is fastest
    there."""
    kept = _precision_on(stored, bits, dtype, device)
    if experts_device is None or experts_device == device:
        return kept
    own = torch.bfloat16 if nf4.has_kernel(experts_device) else torch.float32
    return replace(kept, elsewhere=_precision_on(stored, bits, own, experts_device))


def _precision_on(
    stored: Stored | None, bits: Bits | None, dtype: torch.dtype, device: torch.device
) -> Precision:
    """How a model is kept on one device.

    What files hold in 4-bit groups is kept where the device has a kernel; what a GGUF file holds in
    more bits is then rounded to 4 on a GPU, whose memory is the scarcer. Other weights become NF4,
    or groups where a processor has no kernel for NF4: it would unpack every weight at every step,
    which takes 9 times as long."""
    if stored is not None and stored.stays:
        # What bitsandbytes wrote is computed in 16 bits: its kernels round rows to them anyway.
        return Precision(torch.bfloat16 if dtype == torch.float32 else dtype, device)
    if bits is None:
        return Precision(dtype, device)
    if bits == 8:
        return Precision(dtype, device, "llm.int8")
    is_cpu = device.type == "cpu"
    size = 0 if stored is None else stored.group_size
    if size and (is_cpu or dtype == torch.bfloat16) and int4.has_kernel(device):
        return Precision(dtype, device, None if is_cpu else "int4", size, keeps_groups=True)
    has_nf4 = not is_cpu or nf4.has_kernel(device)
    return Precision(dtype, device, "nf4" if has_nf4 else "int4")


def linear_for(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    precision: Precision,
    is_measured: bool = True,
) -> Linear:
    """Return one layer for weights of one input, their outputs side by side.

    biases: of each weight, [out] or None. is_measured: a layer of 4 bits in groups is compared with
    its weight, which takes a fifth of the time; for some of many layers that are alike that will
    do."""
    held = [_held(weight, precision) for weight in weights]
    together = joined(held) if _quantise_alike(held, precision) else None
    if together is None:
        pairs = zip(held, biases, strict=True)
        return SideBySide([_linear(weight, bias, precision, is_measured) for weight, bias in pairs])
    return _linear(together, _joined_bias(held, biases), precision, is_measured)


def stack_for(
    matrices: Iterable[Sequence[Weight]], count: int, precision: Precision, is_summed: bool
) -> Stack:
    """Return one product of all experts of a layer. Matrices are read, quantised and laid out one
    by one.

    matrices: of each of `count` experts, weights of one input, whose outputs stand side by side.
    is_summed: see Stack. Raises ModelError for a kernel that is wrong."""
    stack: Stack | None = None
    for expert, weights in enumerate(matrices):
        weight = stackable(_quantised(_as_one(weights, precision), precision), precision.dtype)
        if stack is None:
            layout = format_of(weight, precision.dtype, precision.device)
            stack = Stack(weight, count, is_summed, layout)
        stack.fill(expert, weight)
        if expert == 0 and isinstance(weight, Grouped):  # all are rounded alike
            stack.error = _first_of(stack, precision.device).measured(weight)
            _require_right(stack.error, weight)
    assert stack is not None, "a layer has experts"
    return stack


def _first_of(stack: Stack, device: torch.device) -> Int4Linear:
    layer = stack.chosen(torch.zeros(1, dtype=torch.int64, device=device))
    assert isinstance(layer, Int4Linear), "a stack of groups gives layers of groups"
    return layer


def _as_one(weights: Sequence[Weight], precision: Precision) -> Weight:
    """Weights of one input as one, by their values where their formats differ."""
    held = [_held(weight, precision) for weight in weights]
    together = joined(held)
    if together is not None:
        return together
    is_rounded_here = precision.kind == "int4"  # once, on the host
    dtype = torch.float32 if is_rounded_here else precision.dtype
    device = torch.device("cpu") if is_rounded_here else precision.device
    whole = torch.cat([weight.dense(dtype).to(device) for weight in held])
    return Dense(whole if suits(whole.shape) else whole.to(precision.device, precision.dtype))


def suits(shape: Sequence[int]) -> bool:
    """Return True if the formats of few bits take a weight [out, in]."""
    return len(shape) == 2 and shape[1] % GROUP == 0 and shape[0] % ROWS == 0


def _held(weight: Weight, precision: Precision) -> Weight:
    """The weight itself where it stays in its format, else dense on the device."""
    if isinstance(weight, Nf4 | Int8 | Mxfp4):
        return weight.to(precision.device)
    if isinstance(weight, Grouped) and precision.keeps_groups and weight.is_kept:
        return weight
    values = weight.values if isinstance(weight, Dense) else weight.dense(precision.dtype)
    if precision.kind == "int4" and suits(values.shape):  # rounded once, from what the file holds
        return Dense(values)
    return Dense(values.to(precision.device, precision.dtype))


def _quantise_alike(weights: Sequence[Weight], precision: Precision) -> bool:
    """True if all of them are quantised or none is. Groups of 4 bits need whole blocks of
    outputs."""
    if len(weights) == 1 or precision.kind is None or not isinstance(weights[0], Dense):
        return True
    rows = INT4_ROWS if precision.kind == "int4" else 1
    fits = {_is_quantised(each, precision) and not each.shape[0] % rows for each in weights}
    return fits == {True} or not any(_is_quantised(each, precision) for each in weights)


def _is_quantised(weight: Weight, precision: Precision) -> bool:
    if precision.kind is None or not isinstance(weight, Dense) or len(weight.shape) != 2:
        return False
    return precision.kind == "llm.int8" or suits(weight.shape)


def _joined_bias(
    weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    like = next((bias for bias in biases if bias is not None), None)
    if like is None or len(biases) == 1:
        return like
    sizes = [weight.shape[0] for weight in weights]
    parts = zip(biases, sizes, strict=True)
    return torch.cat([like.new_zeros(size) if bias is None else bias for bias, size in parts])


def _linear(
    weight: Weight, bias: torch.Tensor | None, precision: Precision, is_measured: bool
) -> Linear:
    bias = None if bias is None else bias.to(precision.device, precision.dtype)
    weight = _quantised(weight, precision)
    if isinstance(weight, Nf4):
        return nf4.stored_linear(weight, bias)
    if isinstance(weight, Int8):
        return int8.stored_linear(weight, bias)
    if isinstance(weight, Mxfp4):
        tables = Mxfp4Tables.of(precision.dtype, precision.device)
        return Mxfp4Linear(weight, bias, tables)
    if isinstance(weight, Grouped):
        layer = Int4Linear.of_weight(weight, bias, precision.device, is_measured)
        _require_right(layer.error, weight)
        return layer
    return dense_linear(weight.values, bias)


def _quantised(weight: Weight, precision: Precision) -> Weight:
    """The weight in the format in which it is kept."""
    if not isinstance(weight, Dense) or not _is_quantised(weight, precision):
        return weight
    if precision.kind == "int4":
        return Grouped.rounded(weight.values, precision.group_size)
    if precision.kind == "nf4":
        return Nf4.rounded(weight.values, nf4.BLOCK)
    return Int8.rounded(weight.values)


def _require_right(error: float, weight: Grouped) -> None:
    """error: how far a layer lies off. Raises ModelError for a kernel that is wrong."""
    if not error <= MOST_REPACKING_ERROR:  # NaN too
        raise ModelError(
            f"The 4-bit kernel of this machine answers {error:.1%} off for a weight of "
            f"{weight.shape[0]} x {weight.shape[1]}. Load the model with --dtype bf16."
        )


# -- copies that draft ------------------------------------------------------------------------


def kind_for(device: torch.device) -> Kind:
    """Return the format of a copy that is fastest for one row: NF4 where the device has a kernel
    for it; else 8 bits by FBGEMM, on a processor that it knows; else 4 bits in groups. On a
    processor with a kernel for NF4, two threads, ms: 7168 x 1024 .094 in NF4, .135 in groups, .15
    in 8 bits; 16384 x 2048 .34, .47 and .37. On one without, one thread: 2048 x 1024 .32 in groups,
    .16 in 8 bits. Raises ModelError where the device has no kernel for few bits."""
    if device.type not in ("cpu", "cuda"):
        raise ModelError(
            f"bitsandbytes has no proven 4-bit path on {device.type}, so no quantised copy can be "
            "made there. Use another drafter, or run the model on the CPU."
        )
    if nf4.has_kernel(device):
        return "nf4"
    return "int8" if has_fbgemm() else "int4"


@torch.inference_mode()
def quantised_linear(weight: torch.Tensor, bias: torch.Tensor | None, kind: Kind) -> Linear:
    """Return the layer in the wanted format, compared with the original on one row of noise.

    weight: [out, in]. Raises ModelError where its kernels are missing or wrong."""
    try:
        layer = MAKERS[kind](weight, bias)
        row = torch.randn(1, weight.shape[1], generator=torch.Generator().manual_seed(0))
        row = row.to(weight.device, weight.dtype)  # [1, in]
        wanted = torch.nn.functional.linear(row, weight, bias).float()  # [1, out]
        product = layer(row).float()  # [1, out]
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError) as error:
        raise ModelError(
            f"{kind} kernels do not run here ({error}). Use another drafter, or install the "
            "versions in requirements.txt."
        ) from error
    difference, size = float((product - wanted).norm()), float(wanted.norm())
    if not difference <= MAX_RELATIVE_ERROR * size + 1e-6:  # also refuses NaN
        raise ModelError(
            f"The {kind} kernels of this machine answer {difference / max(size, 1e-9):.0%} off "
            "from the layer they stand for. They are not used; choose another drafter."
        )
    return layer


MAKERS: Mapping[Kind, Callable[[torch.Tensor, torch.Tensor | None], Linear]] = {
    "nf4": lambda weight, bias: Nf4Linear.of_stored(_nf4(weight), bias),
    "int8": RoundedRowsLinear,
    "int4": lambda weight, bias: Int4Linear.of_weight(
        Grouped.rounded(weight.cpu(), GROUP), bias, weight.device
    ),
}


def _nf4(weight: torch.Tensor) -> Nf4:
    """Raises RuntimeError where no kernel multiplies with it."""
    if not nf4.has_kernel(weight.device):
        raise RuntimeError("this processor has no instructions for bf16")
    return Nf4.rounded(weight, nf4.BLOCK)
