"""Models in 4-bit groups: with the very weights of their files, or rounded.

Contract: `in_groups` builds a transformers module whose packed layers are Int4Linear and all
others dense, without ever holding the packed ones in full precision. What files hold in 4 bits is
kept so; what a GGUF file holds in more bits is rounded to 4 on a GPU, whose memory is the scarcer.
Other weights are rounded where a processor has no kernel for NF4, those in 16 or 32 bits one by one
as they are read: bitsandbytes would unpack every weight at every step, which takes 9 times as long.
For the families that the native decoder takes.

Not here: reading the files (stored), the layers (grouped), other ways to 4 bits (weights).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from localspec.core.errors import ModelError
from localspec.formats.folder_files import ModelFolder
from localspec.formats.native import LAYOUTS
from localspec.formats.safetensors_file import tensor_shapes
from localspec.forward import nf4
from localspec.forward.completeness import require_read, weights_missing
from localspec.forward.grouped import CPU, MOST_REPACKING_ERROR, Grouped, Int4Linear, has_kernel
from localspec.forward.quantise import GROUP, suits
from localspec.forward.stored import Dense, stored_weights


def in_groups(
    found: ModelFolder,
    known: Any,
    dtype: torch.dtype,
    device: torch.device,
    ends_may_stay: bool = False,
) -> Any:
    """The module with layers in 4 bits; None where bitsandbytes has to make them: for other
    families, and for layouts and devices without a kernel where NF4 has one. known: the config as
    transformers reads it. ends_may_stay: on the host, embedding and output head. Raises
    ModelError."""
    if known.model_type not in LAYOUTS:
        return None
    is_slow = device.type == "cpu" and not nf4.has_kernel(device)
    if found.stored is None:
        return _rounded(found, known, dtype) if is_slow else None
    is_kept = bool(found.stored.group_size) and (device.type == "cpu" or dtype == torch.bfloat16)
    is_kept = is_kept and has_kernel(device)
    if not is_kept and not is_slow:
        return None
    make = partial(Int4Linear.of_weight, bias=None, device=device)
    weights = stored_weights(found, dtype, make if is_kept else None)
    if weights is None or not (weights.kept or is_slow):
        return None
    del known.quantization_config
    module, dense = empty_module(known, dtype, device), dict(weights.dense)
    layers = {_path(place): layer for place, layer in weights.kept.items()}
    if device.type == "cuda" or not weights.kept:
        size = found.stored.group_size if weights.kept else GROUP
        layers |= _rounded_rest(module, dense, size, device)
    ends = (module.get_input_embeddings(), module.get_output_embeddings())
    staying = {path for path, each in module.named_modules() if ends_may_stay and each in ends}
    dense = {k: v if _path(k) in staying else v.to(device) for k, v in dense.items()}
    return _assembled(found, module, layers, dense)


def _rounded_rest(
    module: Any, dense: Dense, group_size: int, device: torch.device
) -> Iterator[tuple[str, Int4Linear]]:
    """The linear layers among `dense`, which loses them, by their paths."""
    for path in sorted(_layers_of(module)):
        weight = dense.pop(f"{path}.weight", None)
        if weight is not None:
            groups = Grouped.rounded(weight, group_size)
            yield path, Int4Linear.of_weight(groups, None, device)


def _rounded(found: ModelFolder, known: Any, dtype: torch.dtype) -> Any:
    """None where names are such that only transformers' own loading understands them."""
    module = empty_module(known, dtype)
    needed = {_path(place) for place, _ in module.named_parameters()}
    if not needed <= {_path(place) for file in found.files for place in tensor_shapes(file)}:
        return None
    suited, layers, dense = _layers_of(module), dict[str, Int4Linear](), dict[str, torch.Tensor]()
    for place, tensor in _read(found.files):
        path = _path(place)
        if path in suited:
            layers[path] = Int4Linear.of_weight(Grouped.rounded(tensor, GROUP), None)
        else:
            dense[place] = tensor.to(dtype)
    return _assembled(found, module, layers, dense)


def empty_module(
    known: Any, dtype: torch.dtype, device: torch.device = CPU, attention: str = "sdpa"
) -> Any:
    """The module without weights. Its buffers are computed on the device: no file holds them.
    attention: transformers' name of the kernel, of which some families have only "eager"."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with device, init_empty_weights(), no_init_weights():  # else noise is drawn for each weight
        module = AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation=attention)
    module.tie_weights()
    return module


def _assembled(
    found: ModelFolder,
    module: Any,
    layers: Mapping[str, Int4Linear],
    dense: dict[str, torch.Tensor],
) -> Any:
    """The module with these layers in their places and all other weights. Raises ModelError."""
    for path, layer in layers.items():
        bias = dense.pop(f"{path}.bias", None)
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        if not layer.error <= MOST_REPACKING_ERROR:  # NaN too
            raise ModelError(
                f"The 4-bit kernel of this machine answers {layer.error:.1%} off for {path} in "
                f"{found.name}. Load it with --dtype bf16."
            )
        module.set_submodule(path, layer)
    unread = module.load_state_dict(dense, strict=False, assign=True).unexpected_keys
    module.tie_weights()
    missing = [place for place, tensor in module.named_parameters() if tensor.is_meta]
    if missing:
        raise weights_missing(found.name, missing)
    require_read(found, module, unread)
    return module.eval().requires_grad_(False)


def left_whole(known: Any, dtype: torch.dtype) -> list[str]:
    """Linear layers that bitsandbytes cannot run in 4 bits on a processor with a kernel for NF4,
    such as Mamba's input; and the output head."""
    module = empty_module(known, dtype, attention="eager")  # never run
    linear = {path for path, each in module.named_modules() if type(each) is nn.Linear}
    return sorted(linear - _layers_of(module))


def _layers_of(module: Any) -> frozenset[str]:
    """The linear layers that the format can take, but for the output head."""
    head = module.get_output_embeddings()
    found = ((path, each) for path, each in module.named_modules() if each is not head)
    return frozenset(path for path, each in found if type(each) is nn.Linear and suits(each))


def _path(place: str) -> str:
    """Of the layer whose weight has this name."""
    return place.removesuffix(".weight")


def _read(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
