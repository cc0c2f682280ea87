"""A quantised copy of a loaded model that shares with it whatever is not quantised, cache included.

Contract: `quantised_twin` gives a model over the original's KV cache whose linear layers, the
output head too, are kept in 4 or 8 bits, and the bytes it holds of its own. Embedding, norms and
every layer whose shape the format cannot take are the original's tensors. The original is read,
never written. The native decoder keeps its fused layers, the transformers path gets a copy of the
module. Every quantised layer is compared with its original once, when it is made.

The format is the fastest for one row (`kind_for`): NF4 where the device has a kernel for it; else
8 bits by FBGEMM, on a processor that it knows; else 4 bits in groups. On a processor with a kernel
for NF4, two threads, ms: 7168 x 1024 .094 in NF4, .135 in groups, .15 in 8 bits; 16384 x 2048 .34,
.47 and .37. On one without, one thread: 2048 x 1024 .32 in groups, .16 in 8 bits.

`quantise_ends` does so with the output head of a target, and on a GPU with its embedding, alone
and where it is asked for.

Not here: drafting with a copy (drafters.self_quant), 4-bit or 8-bit targets (weights).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from localspec.core.errors import ModelError
from localspec.forward import nf4
from localspec.forward.decoder import Decoder
from localspec.forward.grouped import Grouped, Int4Linear
from localspec.forward.int8 import RoundedRowsLinear, has_fbgemm
from localspec.forward.layer_parts import bytes_of
from localspec.forward.model import CausalLM, LanguageModel, has_state
from localspec.forward.nf4 import Nf4Embedding, Nf4Linear
from localspec.forward.weight_layout import LayerModule, Linear, ModuleLinear

Kind = Literal["nf4", "int8", "int4"]

GROUP = 64  # weights that share one scale in the formats of 4 bits; a row must hold whole ones
ROWS = 32  # of outputs, that the kernels for a processor take at a time
MAX_RELATIVE_ERROR = 0.5  # 4 bits are near 0.1, 8 near 0.02; a broken kernel is beyond 1
MIN_QUANTISED_SHARE = 0.5  # below this a draft step costs about what the target's own costs


@dataclass(frozen=True)
class Twin:
    """model: over its original's cache. weight_bytes: what it holds beside its original."""

    model: LanguageModel
    weight_bytes: int


def kind_for(device: torch.device) -> Kind:
    """Raises ModelError where the device has no kernel for few bits."""
    if device.type not in ("cpu", "cuda"):
        raise ModelError(
            f"bitsandbytes has no proven 4-bit path on {device.type}, so no quantised copy can be "
            "made there. Use another drafter, or run the model on the CPU."
        )
    if nf4.has_kernel(device):
        return "nf4"
    return "int8" if has_fbgemm() else "int4"


def quantised_twin(model: LanguageModel, kind: Kind | None = None) -> Twin:
    """Quantise now. kind: None for the device's. Raises ModelError where the device, an absent
    package or the model's shapes forbid it."""
    kind = kind or kind_for(model.device)
    if isinstance(model, Decoder):
        return _decoder_twin(model, kind)
    assert isinstance(model, CausalLM), "a model runs natively or on transformers"
    copied, held = quantised_copy(model.module, kind)
    return Twin(CausalLM(copied, model.cache), held)


def _decoder_twin(model: Decoder, kind: Kind) -> Twin:
    held = num_weights = num_quantised = 0

    def change(linear: Linear) -> Linear:
        nonlocal held, num_weights, num_quantised
        dense = linear.dense()
        if dense is None:  # quantised already: it stays as it is
            return linear
        is_head = linear is model.weights.head
        num_weights += 0 if is_head else dense.weight.numel()
        if not suits(dense):
            return linear
        num_quantised += 0 if is_head else dense.weight.numel()
        made = quantised_layer(dense, kind)
        held += made.weight_bytes
        return made

    twin = model.with_linears(change)
    _require_share(num_quantised, num_weights)
    return Twin(twin, held)


@torch.no_grad()
def quantise_ends(module: Any, device: torch.device) -> None:
    """Put the output head of a transformers module into 4 bits on `device`, and on a GPU, whose
    memory is the scarcer, its embedding: one that is tied to the head needs none of its own. Raises
    ModelError."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if type(head) is not nn.Linear or not suits(head) or has_state(module.config):
        raise ends_refused()
    is_tied = head.weight is embedding.weight
    made = quantised_layer(head.to(device), "nf4" if nf4.has_kernel(device) else "int4")
    module.set_output_embeddings(LayerModule(made, head.out_features))
    del head  # before the other table is put beside it
    if device.type != "cuda":
        return
    assert isinstance(made, Nf4Linear), "a GPU has a kernel for NF4"
    table = made if is_tied else Nf4Linear.of_weight(embedding.weight.to(device), None)
    factor = getattr(embedding, "embed_scale", None)
    module.set_input_embeddings(Nf4Embedding(table, embedding.weight.dtype, factor))


def ends_refused() -> ModelError:
    return ModelError(
        "The output head of this model cannot be kept in 4 bits: that takes a model that the "
        f"native decoder runs, and a head of {GROUP} x n inputs and {ROWS} x n tokens. Use "
        "--dtype 4-bit."
    )


def quantised_copy(module: Any, kind: Kind) -> tuple[Any, int]:
    """A copy of `module` (a transformers causal language model) with quantised linear layers, and
    the bytes of these layers. Raises ModelError as `quantised_twin` does."""
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    twin = copy.deepcopy(module, dict(shared)).eval()  # structure only: tensors are not copied
    # Subclasses are another format (a quantised target, an adapter): they stay as they are.
    linears = [(path, each) for path, each in twin.named_modules() if type(each) is nn.Linear]
    suited = [path for path, linear in linears if suits(linear)]
    head = module.get_output_embeddings()
    outer = {id(module.get_input_embeddings().weight), id(head.weight)}
    body = sum(weight.numel() for weight in module.parameters() if id(weight) not in outer)
    sizes = [module.get_submodule(path) for path in suited]
    _require_share(sum(each.weight.numel() for each in sizes if each is not head), body)
    held = 0
    with torch.no_grad():
        for path in suited:
            made_of = twin.get_submodule(path)
            made = quantised_layer(made_of, kind)
            twin.set_submodule(path, LayerModule(made, made_of.out_features))
            held += made.weight_bytes
    return twin, held


# -- one layer ------------------------------------------------------------------------------


def suits(linear: nn.Linear) -> bool:
    return linear.in_features % GROUP == 0 and linear.out_features % ROWS == 0


def _require_share(num_quantised: int, num_weights: int) -> None:
    """Raises ModelError for a copy that would mostly be the original."""
    if num_quantised < MIN_QUANTISED_SHARE * max(1, num_weights):
        raise ModelError(
            f"Only {num_quantised / max(1, num_weights):.0%} of the layer weights could be "
            "quantised to 4 bits, so the copy would draft no faster than the model itself. The "
            f"kernels take layers in full precision of {GROUP} x n inputs and {ROWS} x n outputs. "
            "Use another drafter."
        )


@torch.inference_mode()
def quantised_layer(linear: nn.Linear, kind: Kind) -> Linear:
    """The layer in the wanted format, compared with the original on one row of noise. Raises
    ModelError where its kernels are missing or wrong."""
    weight = linear.weight.detach()
    bias = None if linear.bias is None else linear.bias.detach()
    try:
        made = MAKERS[kind](weight, bias)
        row = torch.randn(1, linear.in_features, generator=torch.Generator().manual_seed(0))
        row = row.to(weight.device, weight.dtype)  # [1, in]
        wanted, got = linear(row).float(), made(row).float()  # [1, out]
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError) as error:
        raise ModelError(
            f"{kind} kernels do not run here ({error}). Use another drafter, or install the "
            "versions in requirements.txt."
        ) from error
    difference, size = float((got - wanted).norm()), float(wanted.norm())
    if not difference <= MAX_RELATIVE_ERROR * size + 1e-6:  # also refuses NaN
        raise ModelError(
            f"The {kind} kernels of this machine answer {difference / max(size, 1e-9):.0%} off "
            "from the layer they stand for. They are not used; choose another drafter."
        )
    return made


def _int4(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    layer = Int4Linear.of_weight(Grouped.rounded(weight, GROUP), bias)
    return ModuleLinear([layer], bytes_of(*layer.parameters(), *layer.buffers()))


MAKERS: Mapping[Kind, Callable[[torch.Tensor, torch.Tensor | None], Linear]] = {
    "nf4": Nf4Linear.of_weight,
    "int8": RoundedRowsLinear,
    "int4": _int4,
}
