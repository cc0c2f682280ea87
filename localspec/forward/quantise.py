"""A quantised copy of a loaded model that shares with it whatever is not quantised, cache included.

`quantised_twin` gives a model over the original's KV cache whose linear layers, the output head
too, are kept in 4 or 8 bits, and the bytes it holds of its own. Embedding, norms and every layer
whose shape the format cannot take are the original's tensors. The original is read, never written.
The native decoder keeps its fused layers, the transformers path gets a copy of the module. Every
quantised layer is compared with its original once, when it is made.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from localspec.core.errors import ModelError
from localspec.forward.decoder import Decoder
from localspec.forward.model import CausalLM, LanguageModel
from localspec.weights.linear import Linear
from localspec.weights.precision import GROUP, ROWS, Kind, kind_for, quantised_linear, suits

MIN_QUANTISED_SHARE = 0.5  # below this a draft step costs about what the target's own costs


@dataclass(frozen=True)
class Twin:
    """model: over its original's cache. weight_bytes: what it holds beside its original."""

    model: LanguageModel
    weight_bytes: int


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
        if not suits(dense.weight.shape):
            return linear
        num_quantised += 0 if is_head else dense.weight.numel()
        made = quantised_linear(*_tensors_of(dense), kind)
        held += made.weight_bytes
        return made

    twin = model.with_linears(change)
    _require_share(num_quantised, num_weights)
    return Twin(twin, held)


def _tensors_of(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = None if linear.bias is None else linear.bias.detach()
    return linear.weight.detach(), bias


def quantised_copy(module: Any, kind: Kind) -> tuple[Any, int]:
    """A copy of `module` (a transformers causal language model) with quantised linear layers, and
    the bytes of these layers. Raises ModelError as `quantised_twin` does."""
    shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    twin = copy.deepcopy(module, dict(shared)).eval()  # structure only: tensors are not copied
    # Subclasses are another format (a quantised target, an adapter): they stay as they are.
    linears = [(path, each) for path, each in twin.named_modules() if type(each) is nn.Linear]
    suited = [path for path, linear in linears if suits(linear.weight.shape)]
    head = module.get_output_embeddings()
    outer = {id(module.get_input_embeddings().weight), id(head.weight)}
    body = sum(weight.numel() for weight in module.parameters() if id(weight) not in outer)
    sizes = [module.get_submodule(path) for path in suited]
    _require_share(sum(each.weight.numel() for each in sizes if each is not head), body)
    held = 0
    with torch.no_grad():
        for path in suited:
            made_of = twin.get_submodule(path)
            made = quantised_linear(*_tensors_of(made_of), kind)
            twin.set_submodule(path, _LayerModule(made, made_of.out_features))
            held += made.weight_bytes
    return twin, held


def _require_share(num_quantised: int, num_weights: int) -> None:
    """Raises ModelError for a copy that would mostly be the original."""
    if num_quantised < MIN_QUANTISED_SHARE * max(1, num_weights):
        raise ModelError(
            f"Only {num_quantised / max(1, num_weights):.0%} of the layer weights could be "
            "quantised to 4 bits, so the copy would draft no faster than the model itself. The "
            f"kernels take layers in full precision of {GROUP} x n inputs and {ROWS} x n outputs. "
            "Use another drafter."
        )


class _LayerModule(nn.Module):
    """A layer in the place of a module's own, for rows of any shape."""

    def __init__(self, layer: Linear, out_features: int) -> None:
        super().__init__()
        self.layer, self.out_features = layer, out_features

    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            "A quantised copy cannot be saved: its weights are laid out for this device. It is "
            "made from its model at every start; save the model instead."
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product = self.layer(hidden.reshape(-1, hidden.shape[-1]))
        return product.view(*hidden.shape[:-1], -1)
