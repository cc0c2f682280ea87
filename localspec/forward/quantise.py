"""A cheaper copy of a loaded model that shares with it whatever is not quantised, cache included.

Contract: `quantised_twin` gives a model over the original's KV cache whose linear layers are 4-bit
(NF4 by bitsandbytes) or int8 (torch's own kernels, CPU only), and the bytes it holds of its own.
Embedding, norms, output head and every layer whose shape the format cannot take are the original's
tensors. The original is read, never written. The native decoder keeps its fused layers, the
transformers path gets a copy of the module. Every quantised layer is compared with its original
once, when it is made. `cheapest_kind` says which of the two formats this machine runs faster.

A twin lives as long as the process: bitsandbytes repacks its weights in place and cannot save
them afterwards, so `state_dict` refuses.

Not here: drafting with a twin (drafters.self_quant), 4-bit or 8-bit targets (weights).
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn

from localspec.errors import ModelError
from localspec.forward.decoder import Decoder
from localspec.forward.model import CausalLM, LanguageModel
from localspec.forward.weight_layout import Linear, ModuleLinear, pass_seconds

Kind = Literal["nf4", "int8"]

NF4_BLOCK = 64  # weights that share one scale; a row must hold whole blocks
NF4_ROWS = 32  # rows the CPU kernel of bitsandbytes takes at a time
MAX_RELATIVE_ERROR = 0.5  # NF4 is near 0.1, int8 near 0.02; a broken kernel is beyond 1
MIN_QUANTISED_SHARE = 0.5  # below this a draft step costs about what the target's own costs

TIMED_WEIGHTS = 64 * 2**20  # enough not to fit a processor's cache where the model would not


@dataclass(frozen=True)
class Twin:
    """model: over its original's cache. weight_bytes: what it holds beside its original."""

    model: LanguageModel
    weight_bytes: int


def quantised_twin(model: LanguageModel, kind: Kind) -> Twin:
    """Quantise now. Raises ModelError where the device, an absent package or the model's shapes
    forbid it."""
    if isinstance(model, Decoder):
        return _decoder_twin(model, kind)
    copied, held = quantised_copy(_module_of(model), kind)
    return Twin(CausalLM(copied, model.cache), held)


def _decoder_twin(model: Decoder, kind: Kind) -> Twin:
    held = num_weights = num_quantised = 0

    def change(linear: Linear) -> Linear:
        nonlocal held, num_weights, num_quantised
        dense = linear.dense()
        if dense is None:  # quantised already: it stays as it is
            return linear
        num_weights += dense.weight.numel()
        if not suits(dense, kind):
            return linear
        num_quantised += dense.weight.numel()
        made, num_bytes = quantised_layer(dense, kind)
        held += num_bytes
        return ModuleLinear([made], num_bytes)

    twin = model.with_linears(change)
    _require_share(num_quantised, num_weights, kind)
    return Twin(twin, held)


def quantised_copy(module: Any, kind: Kind) -> tuple[Any, int]:
    """A copy of `module` (a transformers causal language model) with quantised linear layers, and
    the bytes of these layers. Raises ModelError as `quantised_twin` does."""
    _check_device(module.device, kind)
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    twin = copy.deepcopy(module, dict(shared)).eval()  # structure only: tensors are not copied
    suited = [path for path, linear in _named_linears(twin) if suits(linear, kind)]
    outer = {id(module.get_input_embeddings().weight), id(module.get_output_embeddings().weight)}
    body = sum(weight.numel() for weight in module.parameters() if id(weight) not in outer)
    quantised = sum(module.get_submodule(path).weight.numel() for path in suited)
    _require_share(quantised, body, kind)
    held = 0
    with torch.no_grad():
        for path in suited:
            made, num_bytes = quantised_layer(twin.get_submodule(path), kind)
            twin.set_submodule(path, made)
            held += num_bytes
    return twin, held


# -- the cheaper format ---------------------------------------------------------------------


def cheapest_kind(model: LanguageModel, clock: Callable[[], float] = perf_counter) -> Kind:
    """The format whose linear layers take less time for one token on the model's device.

    On a GPU that is NF4, unmeasured. On a CPU both are built for at most TIMED_WEIGHTS weights and
    timed over a few passes (about a second in all), and the others counted by their size. clock:
    seconds, monotonic. Raises ModelError when neither can be used.
    """
    if model.device.type != "cpu":
        _check_device(model.device, "nf4")
        return "nf4"
    kinds: tuple[Kind, ...] = ("nf4", "int8")
    seconds, faults = dict[Kind, float](), list[str]()
    for kind in kinds:
        try:
            seconds[kind] = _step_seconds(_linears(model), kind, clock)
        except ModelError as error:
            faults.append(str(error))
    if not seconds:
        raise ModelError(" ".join(faults))
    return min(seconds, key=lambda kind: seconds[kind])


@torch.inference_mode()
def _step_seconds(linears: Iterable[nn.Linear], kind: Kind, clock: Callable[[], float]) -> float:
    """Of all linear layers for one token; those that `kind` cannot take count by their size."""
    layers, rows, covered, everything = list[nn.Module](), list[torch.Tensor](), 0, 0
    for linear in linears:
        everything += linear.weight.numel()
        if covered < TIMED_WEIGHTS and suits(linear, kind):
            layers.append(quantised_layer(linear, kind)[0])
            rows.append(torch.ones(1, 1, linear.in_features, dtype=linear.weight.dtype))
            covered += linear.weight.numel()
    if not covered:
        raise ModelError(f"No layer of this model has a shape that {kind} can take.")
    return pass_seconds(layers, rows, clock) * everything / covered


# -- which layers ---------------------------------------------------------------------------


def _linears(model: LanguageModel) -> Iterator[nn.Linear]:
    """The plain linear layers of the blocks, one by one: each may be unpacked for it."""
    if isinstance(model, Decoder):
        dense = (one.dense() for block in model.weights.blocks for one in block.linears)
        yield from (layer for layer in dense if layer is not None)
    else:
        yield from (layer for _, layer in _named_linears(_module_of(model)))


def _module_of(model: LanguageModel) -> Any:
    assert isinstance(model, CausalLM), "a model runs natively or on transformers"
    return model.module


def _named_linears(module: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Every plain linear layer except the output head, by path."""
    head = module.get_output_embeddings()
    for path, layer in module.named_modules():
        # Subclasses are another format (a quantised target, an adapter): they stay as they are.
        if type(layer) is nn.Linear and layer is not head:
            yield path, layer


def suits(linear: nn.Linear, kind: Kind) -> bool:
    if kind == "int8":
        return True
    return linear.in_features % NF4_BLOCK == 0 and linear.out_features % NF4_ROWS == 0


def _check_device(device: torch.device, kind: Kind) -> None:
    if kind == "int8" and device.type != "cpu":
        raise ModelError(
            f"int8 drafting runs on the processor only, and this model is on {device.type}. "
            "Choose NF4."
        )
    if kind == "nf4" and device.type not in ("cpu", "cuda"):
        raise ModelError(
            f"bitsandbytes has no proven 4-bit path on {device.type}, so no quantised copy can be "
            "made there. Use another drafter, or run the model on the CPU."
        )


def _require_share(num_quantised: int, num_weights: int, kind: Kind) -> None:
    """Raises ModelError for a copy that would mostly be the original."""
    if num_quantised < MIN_QUANTISED_SHARE * max(1, num_weights):
        shapes = f" NF4 takes layers of {NF4_BLOCK} x n inputs and {NF4_ROWS} x n outputs."
        raise ModelError(
            f"Only {num_quantised / max(1, num_weights):.0%} of the layer weights could be "
            f"quantised to {kind}, so the copy would draft no faster than the model itself."
            + (shapes if kind == "nf4" else " Its weights lie in no plain linear layers.")
            + " Use another drafter."
        )


# -- one layer ------------------------------------------------------------------------------


def quantised_layer(linear: nn.Linear, kind: Kind) -> tuple[nn.Module, int]:
    """The layer in the wanted format, compared with the original on one row of noise, and its
    bytes. Raises ModelError where its kernels are missing or wrong."""
    try:
        made: Any = _nf4_linear(linear) if kind == "nf4" else Int8Linear(linear)
        row = torch.randn(1, linear.in_features, generator=torch.Generator().manual_seed(0))
        row = row.to(linear.weight.device, linear.weight.dtype)  # [1, in]
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
    made.register_state_dict_pre_hook(_refuse_saving)
    return made, made.weight_bytes if kind == "int8" else _nf4_bytes(made)


class Int8Linear(nn.Module):
    """A linear layer with one int8 scale a row; activations are quantised on the fly."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.out_features = linear.out_features
        self._packed = torch.ops.quantized.linear_prepack(_per_row_int8(linear), bias)
        # The packed weight is opaque: x86 kernels hold it once, others beside the unpacked one. A
        # row also has its scale, zero point, offset and bias.
        held = 1 if torch.backends.quantized.engine in ("x86", "fbgemm") else 2
        self.weight_bytes = held * linear.weight.numel() + 16 * linear.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        try:
            # reduce_range: processors without VNNI overflow on the eighth bit.
            out: torch.Tensor = torch.ops.quantized.linear_dynamic(
                hidden.float(), self._packed, reduce_range=True
            )
        except RuntimeError:
            # The kernel finds no range for NaN. A float layer passes it on, so that the check of
            # the logits names the fault.
            if bool(torch.isfinite(hidden).all()):
                raise
            return hidden.new_full((*hidden.shape[:-1], self.out_features), float("nan"))
        return out.to(hidden.dtype)


def _per_row_int8(linear: nn.Linear) -> torch.Tensor:
    weight = linear.weight.detach().float()  # [out, in]
    scales = (weight.abs().amax(dim=1) / 127.0).clamp(min=1e-12).double()
    zeros = torch.zeros(linear.out_features, dtype=torch.long)
    with warnings.catch_warnings():
        # Deprecated in torch; the version is pinned, and the kernel is tested.
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
        return torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)


def _nf4_linear(linear: nn.Linear) -> nn.Module:
    library = _bitsandbytes()
    made = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        compress_statistics=False,  # scales of scales save 6 % and cost a step at every call
        device="meta",  # the original's weight is put in its place
    )
    weight = library.nn.Params4bit(
        linear.weight.detach(),
        requires_grad=False,
        quant_type="nf4",
        blocksize=NF4_BLOCK,
        compress_statistics=False,
        module=made,
    )
    made.weight = weight.to(linear.weight.device)  # quantises into tensors of its own
    if linear.bias is not None:
        # A copy, for the forward casts the bias it was given in place.
        bias = linear.bias.detach().to(torch.bfloat16, copy=True)
        made.bias = nn.Parameter(bias, requires_grad=False)
    layer: nn.Module = made.eval()
    return layer


def _bitsandbytes() -> Any:
    """The library, imported without letting it look for compiled kernels on a model hub."""
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    missing = object()
    kernels: Any = sys.modules.get("kernels", missing)
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    sys.modules["kernels"] = None  # type: ignore[assignment]  # makes its import fail: no network
    logger.setLevel(logging.ERROR)  # it would warn of that
    try:
        return import_module("bitsandbytes")
    except ImportError as error:
        raise ModelError(
            f"NF4 needs the package bitsandbytes, which cannot be imported ({error}). Install "
            "the versions in requirements.txt, or choose another drafter."
        ) from error
    finally:
        logger.setLevel(level)
        if kernels is missing:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = kernels


def _nf4_bytes(layer: Any) -> int:
    state = layer.weight.quant_state
    held = (layer.weight.data, state.absmax, state.code, layer.bias)
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def _refuse_saving(*_: object) -> None:
    raise ModelError(
        "A quantised copy cannot be saved: its weights are repacked for this processor. It is "
        "made from its model at every start; save the model instead."
    )
